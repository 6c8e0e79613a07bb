"""Screen output, log.txt and metrics.json."""

import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from detectron2.utils import comm
from tqdm import tqdm

from ...errors import is_user_error, message_of, printable

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

    # "No CUDA runtime is found", of every run on a machine with CUDA's compiler only
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

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
