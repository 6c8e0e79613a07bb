"""Runs: flags, trainer, launch, demo. The story of a run is :mod:`gw_detectron.engine.train`."""

from .flags import get_parser, setup
from .train import main
from .trainer import Trainer

__all__ = ["Trainer", "get_parser", "main", "setup"]
