"""The tests of GroupWhitening2d run once per backend, as those of the operation do."""

from ..ops.conftest import backend, pytest_generate_tests

__all__ = ["backend", "pytest_generate_tests"]
