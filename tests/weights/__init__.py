"""Tests of weights; relative imports share `synthetic.py` between the files."""
