"""Tests of the operations. Relative imports share the oracle and the cases with the tests of the layers."""
