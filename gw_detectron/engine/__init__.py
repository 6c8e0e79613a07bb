"""A run on one page: flags, config, preflight, model, weights, training, evaluation."""

from .setup import get_parser, setup
from .trainer import Trainer, checked_setup, main

__all__ = ["Trainer", "checked_setup", "get_parser", "main", "setup"]
