"""Runs: flags, trainer, launch. The story of a run is :mod:`gw_detectron.workbench.run.train`."""

from .flags import get_parser
from .run_datasets import use_recorded_datasets
from .train import main
from .trainer import Trainer

__all__ = ["Trainer", "get_parser", "main", "use_recorded_datasets"]
