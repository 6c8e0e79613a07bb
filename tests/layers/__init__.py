"""Tests of the layers: relative imports share the oracle between the files of this folder."""
