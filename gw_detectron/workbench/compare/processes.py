"""The processes of a comparison: where they run, how they end, and what they leave."""

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from ...atomic import write_json
from ...errors import RunError
from ..console import errors_reported
from ..run.folder import RESULT
from ..signals import end_processes

LOG = "process.txt"
#: seconds for the checkpoint of a run that is stopped
PATIENCE = 60.0
# processes that start with the imports done, and without CUDA
_CONTEXT = multiprocessing.get_context("forkserver")


class Processes:
    """The GPUs and threads that runs side by side share.

    Args:
        device: ``MODEL.DEVICE``.
        jobs: runs side by side.
    """

    def __init__(self, device: str, jobs: int) -> None:
        # a look for GPUs must not start CUDA before a fork
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        _CONTEXT.set_forkserver_preload(["gw_detectron.workbench.compare.jobs"])
        self.gpus: list[str | None] = [None]
        if device != "cpu" and torch.cuda.device_count() > 1:
            self.gpus = [*_visible_gpus(torch.cuda.device_count())]

        self.threads = torch.get_num_threads()
        if not os.environ.get("OMP_NUM_THREADS"):  # which torch obeys
            self.threads = max(1, self.threads // jobs)

    def start(self, work: Callable[..., Any], folder: Path, *args: Any) -> BaseProcess:
        """Start ``work(folder, *args)`` on the GPU with the fewest processes."""
        for name in (LOG, RESULT):  # of an earlier attempt
            (folder / name).unlink(missing_ok=True)
        busy: list[str | None] = [
            process.name for process in multiprocessing.active_children()
        ]
        gpu = min(self.gpus, key=busy.count)
        process = _CONTEXT.Process(
            target=run_in_process,
            name=gpu,
            args=(work, folder, self.threads, gpu, *args),
        )
        process.start()
        return process

    def run(self, work: Callable[..., Any], folder: Path, *args: Any) -> dict[str, Any]:
        """Return the result of ``work(folder, *args)`` in a process of its own."""
        process = self.start(work, folder, *args)
        try:
            return result_of(folder, process)
        finally:
            end_processes([process], PATIENCE)


def _visible_gpus(count: int) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(count)))
    return names[:count]


def run_in_process(
    work: Callable[..., Any], folder: Path, threads: int, gpu: str | None, *args: Any
) -> None:
    """Do a part of a comparison in a new process, which ends with its parent.

    Its output goes to a file.
    """
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    # the loaders' workers are forked, as in any other training
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(threads)

    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)

    threading.Thread(target=_stop_after_parent, daemon=True).start()
    with errors_reported():
        write_json(folder / RESULT, work(folder, *args))


def _stop_after_parent() -> None:
    """Stop with a checkpoint when the comparison was killed.

    The next call finds no other run in the folder.
    """
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE)
        os.kill(os.getpid(), signal.SIGKILL)


def result_of(folder: Path, process: BaseProcess) -> dict[str, Any]:
    """Return the result of a process that has ended, or raise the error that has ended it."""
    process.join()
    if (folder / RESULT).exists():  # the exit status may be a loader worker's
        return take_result(folder)

    log = folder / LOG
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    code = process.exitcode or 0
    if code < 0:
        name = signal.strsignal(-code)
        reason = (
            f"killed by signal {-code} ({name}). Fix: if memory was full, lower --jobs"
        )
    elif text:
        reason = text.rpartition("\nError: " if "\nError: " in text else "\n")[2]
    else:
        reason = (
            "no output. Fix: see the messages above; a script has to call it under "
            'if __name__ == "__main__"'
        )
    raise RunError(f"{reason} (log: {log}).")


def take_result(folder: Path) -> dict[str, Any]:
    """Return a result, and remove the gigabytes beside it.

    They serve only to continue a run without a result.
    """
    result = json.loads((folder / RESULT).read_text())
    for name in ("inference", "datasets"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for checkpoint in (*folder.glob("*.pth"), folder / "last_checkpoint"):
        checkpoint.unlink(missing_ok=True)
    return result
