"""Explain a lack of memory and killed data-loading workers."""

import contextlib
import os
import re
from collections.abc import Iterator

from detectron2.config import CfgNode

from ..checkpoint import last_checkpoint
from ..cli import is_out_of_memory
from ..config import get_value
from ..errors import DataWorkerError, RunMemoryError, UserError, first_line
from .nonfinite import LossGuard

# messages of torch
_WORKER_FAILURE = re.compile(r"DataLoader worker \(pid|shared memory object|</torch_\d|insufficient shared memory")


@contextlib.contextmanager
def resource_errors_explained(cfg: CfgNode, guard: LossGuard | None = None) -> Iterator[None]:
    """Explain a lack of memory by images and config keys.

    Args:
        cfg: the config of the run.
        guard: knows the images of a training step; None for an evaluation.

    Raises:
        RunMemoryError: the GPU or the machine is out of memory.
        DataWorkerError: a data-loading worker was killed, or had no shared memory.
    """
    try:
        yield
    except UserError:
        raise
    except (RuntimeError, MemoryError, OSError, EOFError) as error:
        reason, resume = first_line(error), ""
        with contextlib.suppress(UserError, OSError):  # this error matters, not one of the file
            if os.path.isfile(os.path.join(cfg.OUTPUT_DIR, "last_checkpoint")):
                resume = f"; continue with --resume from '{last_checkpoint(cfg.OUTPUT_DIR)}'"
        # A worker that dies while it hands over a batch leaves a broken socket without a file name.
        socket = isinstance(error, (ConnectionError, EOFError, FileNotFoundError)) and cfg.DATALOADER.NUM_WORKERS > 0
        if (socket and getattr(error, "filename", None) is None) or _WORKER_FAILURE.search(str(error)):
            raise DataWorkerError(
                f"DATALOADER.NUM_WORKERS ({cfg.DATALOADER.NUM_WORKERS}): a data-loading worker failed: {reason}. The "
                "machine's memory or its shared memory (/dev/shm) may be full. Fix: lower DATALOADER.NUM_WORKERS (0 "
                f"needs no shared memory) or enlarge /dev/shm (docker run --shm-size 8g){resume}."
            ) from error
        if not is_out_of_memory(error):
            raise
        if guard is None:
            work, keys, hint = "an evaluation", ["INPUT.MIN_SIZE_TEST", "INPUT.MAX_SIZE_TEST"], ""
        else:
            work = f"a step with images of {guard.image_sizes()} pixels"
            keys = ["SOLVER.IMS_PER_BATCH", "INPUT.MIN_SIZE_TRAIN", "INPUT.MAX_SIZE_TRAIN"]
            hint = f"; raise SOLVER.ACCUMULATE ({cfg.SOLVER.ACCUMULATE}) as much as the batch shrinks"
        first, *others = (f"{key} ({get_value(cfg, key)})" for key in keys)
        raise RunMemoryError(
            f"{first}: out of memory in {work}: {reason}. Fix: lower {', '.join([keys[0], *others])}{hint}{resume}."
        ) from error
