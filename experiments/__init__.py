"""The figures of the whitening papers, redrawn on random features and small networks."""
