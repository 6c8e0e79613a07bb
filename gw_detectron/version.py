"""The version of the package, defined here alone."""

__version__ = "0.1.0"
