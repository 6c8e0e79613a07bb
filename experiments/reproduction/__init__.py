"""Train the rows of MODEL_ZOO.md and fill its columns "ours"."""
