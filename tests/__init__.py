"""The tests; relative imports share `tiny_run.py` between the files of this folder."""
