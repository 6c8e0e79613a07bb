"""Runs: request, checks, trainer, evaluation. The story of a run is :mod:`gw_detectron.workbench.run.train`."""

from .request import DatasetFlags, RunRequest
from .run_datasets import use_recorded_datasets
from .train import main, prepare
from .trainer import Trainer

__all__ = [
    "DatasetFlags",
    "RunRequest",
    "Trainer",
    "main",
    "prepare",
    "use_recorded_datasets",
]
