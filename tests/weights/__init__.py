"""Tests of the weights going in; relative imports share `synthetic.py` between the files of this folder."""
