"""Screen output, log.txt, metrics.json, and experiment trackers."""

import importlib
import logging
import os
import re
import secrets
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.utils import comm
from detectron2.utils.events import EventWriter, get_event_storage
from tqdm import tqdm

from ...config import flat_items
from ...errors import ConfigError, first_line, is_user_error, message_of, printable
from ...installation import require_packages

log = logging.getLogger(__name__)

TRACKERS = ("mlflow", "trackio", "wandb")
_LOGGERS = ("detectron2", "fvcore", "gw_detectron")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# loggers that the screen leaves to log.txt: tables, networks, what every run says; below the level
_FILE_ONLY = {
    "detectron2.data": logging.WARNING,
    "detectron2.engine.defaults": logging.WARNING,
    "gw_detectron.layers": logging.WARNING,
    "detectron2.checkpoint": logging.ERROR,  # names of tensors, which the load report counts
    "fvcore.common.checkpoint": logging.ERROR,
}


class _PlainFormatter(logging.Formatter):
    """Leave out the colors of tables, and the traceback of an error that the user can fix.

    Other control characters are of names in files, and are escaped.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = _ANSI.sub("", super().format(record))
        return "\n".join(map(printable, text.split("\n")))

    def formatException(self, ei: Any) -> str:
        return (
            message_of(ei[1]) if is_user_error(ei[1]) else super().formatException(ei)
        )


class _FileHandler(logging.FileHandler):
    """log.txt of a run."""


class _ScreenHandler(logging.Handler):
    """The messages that somebody reads while a run starts, printed above any progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        for name, level in _FILE_ONLY.items():
            if record.name.startswith(name) and record.levelno < level:
                return

        record.prefix = f"{record.levelname}: " if record.levelno > logging.INFO else ""
        try:
            tqdm.write(self.format(record), file=sys.stdout)
            sys.stdout.flush()
        except Exception:
            self.handleError(record)


def log_to(folder: str) -> None:
    """Log to ``log.txt`` in a folder, and on the main process also to the screen.

    An earlier run of this process is logged to no longer. Loggers that a script has set up keep
    their handlers.
    """
    # Detectron2's RLE
    warnings.filterwarnings(
        "ignore", "The given NumPy array is not writable", UserWarning
    )

    rank = comm.get_rank()
    path = os.path.join(folder, f"log.txt.rank{rank}" if rank else "log.txt")
    file = _FileHandler(path, encoding="utf-8")
    file.setFormatter(
        _PlainFormatter(
            "[%(asctime)s] %(name)s %(levelname)s: %(message)s", "%m/%d %H:%M:%S"
        )
    )
    handlers: list[logging.Handler] = [file]
    if rank == 0:
        screen = _ScreenHandler(logging.INFO)
        screen.setFormatter(
            _PlainFormatter("[%(asctime)s] %(prefix)s%(message)s", "%H:%M:%S")
        )
        handlers.append(screen)

    for logger in map(logging.getLogger, _LOGGERS):
        for handler in logger.handlers[:]:
            if isinstance(handler, (_FileHandler, _ScreenHandler)):
                logger.removeHandler(handler)
                handler.close()
        if not logger.handlers:
            logger.handlers += handlers
            logger.propagate = False
            logger.setLevel(logging.DEBUG)


def end_last_line(path: Path) -> None:
    """End a line that a kill has cut off, so that it does not spoil the next record."""
    content = path.read_bytes() if path.is_file() else b""
    if content and not content.endswith(b"\n"):
        with path.open("a") as file:
            file.write("\n")


class TrackerWriter(EventWriter):
    """Log scalars to the tracker ``TRACKER``, with the config of the run.

    An error of the tracker does not end the run. A file in ``OUTPUT_DIR`` names the tracker's run,
    which a resumed one continues, unless the run is ``new``. The tracker's own environment
    variables choose server and project
    (``WANDB_PROJECT``, ``TRACKIO_PROJECT``, ``MLFLOW_EXPERIMENT_NAME``).
    """

    def __init__(self, cfg: CfgNode, *, new: bool = False) -> None:
        name = cfg.TRACKER
        if name not in TRACKERS:
            raise ConfigError(
                f"TRACKER ({name!r}): unknown. Fix: give one of {', '.join(TRACKERS)}."
            )
        require_packages(f"TRACKER ({name!r})", name)

        file = Path(cfg.OUTPUT_DIR, f"{name}_run.txt")
        known = file.read_text() if file.is_file() and not new else ""
        try:
            start = self._start_mlflow if name == "mlflow" else self._start_other
            known = start(cfg, known)
        except Exception as error:
            raise ConfigError(
                f"TRACKER ({name!r}): does not start: {first_line(error)}."
            ) from error
        file.write_text(known)
        self._last = -1

    def _start_mlflow(self, cfg: CfgNode, known: str) -> str:
        """Start or continue a run; return its identifier."""
        tracker = importlib.import_module("mlflow")
        run = tracker.start_run(run_id=known or None, run_name=_run_name(cfg))
        tracker.log_text(cfg.dump(), "config.yaml")
        self._log, self._finish = tracker.log_metrics, tracker.end_run
        return run.info.run_id

    def _start_other(self, cfg: CfgNode, known: str) -> str:
        """Start or continue a run of wandb or trackio; return its name."""
        name = known or f"{_run_name(cfg)}-{secrets.token_hex(3)}"
        options = {"id": name, "dir": cfg.OUTPUT_DIR} if cfg.TRACKER == "wandb" else {}
        run = importlib.import_module(cfg.TRACKER).init(
            project=os.environ.get(f"{cfg.TRACKER.upper()}_PROJECT", "gw_detectron"),
            name=name,
            config=dict(flat_items(cfg)),
            resume="allow",
            **options,
        )
        self._log, self._finish = run.log, run.finish
        return name

    def write(self) -> None:
        steps: dict[int, dict[str, float]] = defaultdict(dict)
        for name, (value, step) in (
            get_event_storage().latest_with_smoothing_hint(20).items()
        ):
            if step > self._last:
                steps[step][re.sub(r"[^\w\-./ ]", "_", name)] = (
                    value  # of MLflow's characters
                )

        self._last = max(steps, default=self._last)
        for step in sorted(steps):
            self._try(self._log, steps[step], step=step)

    def close(self) -> None:
        self._try(self._finish)

    def _try(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except Exception as error:
            log.warning(
                "TRACKER: metrics of iteration %d may be missing there: %s",
                self._last,
                error,
            )


def _run_name(cfg: CfgNode) -> str:
    return os.path.basename(os.path.abspath(cfg.OUTPUT_DIR))
