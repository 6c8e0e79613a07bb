"""Tests of the benchmarks; relative imports reach the oracle of the layers."""
