"""Tests of the modules; oracle and cases are those of tests/ops."""
