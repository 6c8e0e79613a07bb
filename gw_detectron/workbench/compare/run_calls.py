"""All that a comparison asks of a run: its config, checks, training, lock and metrics."""

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from detectron2.config import CfgNode

from ...errors import PreflightReport
from ...weights import open_start_weights
from ..run import Trainer, get_parser, main
from ..run.config_checks import preflight
from ..run.folder import METRICS, lock_output, read_metrics
from ..run.train import run_config, use_recipe


class Request(NamedTuple):
    """A run: flags of ``gw-detectron train`` that differ from the defaults, and config keys."""

    flags: Mapping[str, Any]
    opts: Sequence[Any]

    def arguments(self, **flags: Any) -> argparse.Namespace:
        """Return the arguments of the run with some further flags."""
        defaults = vars(get_parser().parse_args([]))
        given = {**self.flags, **flags, "opts": list(self.opts)}
        return argparse.Namespace(**{**defaults, **given})


def config_of(request: Request) -> CfgNode:
    """Return the config of a run, with its recipe; its datasets are registered."""
    args = request.arguments()
    cfg = run_config(args)
    use_recipe(cfg, args)
    return cfg


def check_run(cfg: CfgNode) -> PreflightReport:
    """Find what would stop a run."""
    return preflight(cfg, open_start_weights(cfg.MODEL.WEIGHTS))


def build_trainer(request: Request) -> Trainer:
    """Build the trainer of a run."""
    ignored = request.flags.get("ignore_preflight", False)
    return Trainer(config_of(request), ignore_preflight=ignored)


def train_or_continue(request: Request) -> dict[str, Any]:
    """Train, or continue a training; return its last results."""
    return main(request.arguments(resume=True)) or {}


def logged_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics that a run has logged in its folder, by iteration."""
    return read_metrics(folder / METRICS)


def locked(folder: Path, *, wait: bool = False) -> contextlib.closing:
    """Keep other runs out of a folder in a ``with``; refuse if there is one, or wait."""
    return contextlib.closing(lock_output(str(folder), wait=wait))
