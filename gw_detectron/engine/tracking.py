"""Metrics of a training in trackio, Weights & Biases or MLflow."""

import importlib
import logging
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.utils.events import EventWriter, get_event_storage

from ..config import flat_items
from ..errors import ConfigError, first_line
from ..installation import require_packages

log = logging.getLogger(__name__)

TRACKERS = ("mlflow", "trackio", "wandb")


class TrackerWriter(EventWriter):
    """Log scalars to the tracker ``TRACKER``, with the config of the run. An error of the tracker does not end the run.

    A file in ``OUTPUT_DIR`` names the tracker's run, which a resumed one continues. The tracker's own environment
    variables choose server and project (``WANDB_PROJECT``, ``TRACKIO_PROJECT``, ``MLFLOW_EXPERIMENT_NAME``).
    """

    def __init__(self, cfg: CfgNode) -> None:
        name, folder = cfg.TRACKER, os.path.basename(os.path.abspath(cfg.OUTPUT_DIR))
        if name not in TRACKERS:
            raise ConfigError(f"TRACKER ({name!r}): unknown. Fix: give one of {', '.join(TRACKERS)}.")
        require_packages(f"TRACKER ({name!r})", name)
        tracker, self._last = importlib.import_module(name), -1
        file = Path(cfg.OUTPUT_DIR, f"{name}_run.txt")
        known = file.read_text() if file.is_file() else ""
        try:
            if name == "mlflow":
                known = tracker.start_run(run_id=known or None, run_name=folder).info.run_id
                tracker.log_text(cfg.dump(), "config.yaml")
                self._log, self._finish = tracker.log_metrics, tracker.end_run
            else:
                known = known or f"{folder}-{secrets.token_hex(3)}"
                project = os.environ.get(f"{name.upper()}_PROJECT", "gw_detectron")
                options = {"id": known, "dir": cfg.OUTPUT_DIR} if name == "wandb" else {}
                config = dict(flat_items(cfg))
                run = tracker.init(project=project, name=known, config=config, resume="allow", **options)
                self._log, self._finish = run.log, run.finish
        except Exception as error:
            raise ConfigError(f"TRACKER ({name!r}): does not start: {first_line(error)}.") from error
        file.write_text(known)

    def write(self) -> None:
        steps: dict[int, dict[str, float]] = defaultdict(dict)
        for name, (value, step) in get_event_storage().latest_with_smoothing_hint(20).items():
            if step > self._last:
                steps[step][re.sub(r"[^\w\-./ ]", "_", name)] = value  # of MLflow's characters
        self._last = max(steps, default=self._last)
        for step in sorted(steps):
            self._try(self._log, steps[step], step=step)

    def close(self) -> None:
        self._try(self._finish)

    def _try(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except Exception as error:
            log.warning("TRACKER: metrics of iteration %d may be missing there: %s", self._last, error)
