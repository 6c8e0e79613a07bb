"""Stop a training at SIGTERM or Ctrl-C with a checkpoint."""

import contextlib
import logging
import os
import shlex
import signal
import time
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from detectron2.engine import HookBase
from detectron2.utils import comm

from ..cli import Interrupted, signals_handled

log = logging.getLogger(__name__)

_REPEAT_SECONDS = 1.0  # torchrun sends a Ctrl-C of the terminal to its processes a second time


class InterruptionHook(HookBase):
    """Write a checkpoint and stop at SIGTERM or Ctrl-C.

    A signal during a step waits for the end of the step, which is the same step in all processes. A signal between
    steps stops at once in an evaluation and in a run of one process; several processes finish the next step, which some
    of them may have begun. A second Ctrl-C during a step stops at once, without a checkpoint.

    Place it after the hooks whose state is in a checkpoint, and before the evaluation.

    Args:
        period: iterations between two regular checkpoints.
        eval_period: iterations between two evaluations; 0 for one at the end.

    Attributes:
        timeout: how long a process waits for the others after a step; None is torch's default.
    """

    def __init__(self, period: int, eval_period: int = 0) -> None:
        self.period, self.eval_period = period, eval_period
        self.timeout: timedelta | None = None
        self._stop: Interrupted | None = None
        self._number = 0
        self._received_at = 0.0
        self._in_step = False
        self._finished = -1
        self._handlers = contextlib.ExitStack()
        self._group: Any = None

    def before_train(self) -> None:
        if comm.get_world_size() > 1:
            # a group on the CPU: no wait for the GPU in each step
            self._group = dist.new_group(backend="gloo", timeout=self.timeout)
        self._handlers.enter_context(signals_handled(self._receive, signal.SIGTERM, signal.SIGINT))

    def before_step(self) -> None:
        self._in_step = True

    def after_step(self) -> None:
        self._finished = self.trainer.iter
        if number := self._received_by_any():
            self._stop = Interrupted(number)
            self._save(self._stop)
            comm.synchronize()  # a launcher ends all processes when the first one exits
            raise self._stop
        if self._group and not self._evaluation_follows():
            return  # a signal still waits: the others cannot finish a step without this process
        self._in_step = False
        if self._number:  # of a signal that came between these lines
            self._stop = Interrupted(self._number)
            raise self._stop

    def _received_by_any(self) -> int:
        """Return the signal that one of the processes has received, or 0."""
        if not self._group:
            return self._number
        received = torch.tensor(self._number)
        dist.all_reduce(received, dist.ReduceOp.MAX, self._group)
        return int(received)

    def _evaluation_follows(self) -> bool:
        done = self.trainer.iter + 1
        return done >= self.trainer.max_iter or (self.eval_period > 0 and done % self.eval_period == 0)

    def after_train(self) -> None:
        with self._handlers:  # until the checkpoint is written: launchers repeat their signals
            if self._stop is None:
                return
            # Detectron2 evaluates after the last step, also when the run was stopped there.
            self.trainer.max_iter = max(self.trainer.max_iter, self.trainer.iter + 2)
            if self._finished >= 0 and not self._in_step:
                self.trainer.iter = self._finished  # between two steps the loop may have counted on
                self._save(self._stop)

    def stopped_by(self, error: Exception) -> None:
        """Raise Interrupted instead of an error that followed a signal.

        Such an error often comes from another process that the signal has ended.
        """
        if self._number:
            raise Interrupted(self._number) from error

    def _receive(self, number: int, frame: FrameType | None) -> None:
        repeated = bool(self._number)
        now = time.monotonic()
        if repeated and (number != signal.SIGINT or now - self._received_at < _REPEAT_SECONDS):
            return
        self._number, self._received_at = number, now
        if repeated or not self._in_step:
            self._stop = Interrupted(number, "Stopped by a second Ctrl-C, without a checkpoint." if repeated else "")
            raise self._stop
        again = "; a second Ctrl-C stops at once, without a checkpoint" if number == signal.SIGINT else ""
        log.warning("%s: stopping after this step%s", signal.Signals(number).name, again)

    def _save(self, stop: Interrupted) -> None:
        """Write a checkpoint of the finished step unless there is one."""
        finished, self._finished = self._finished, -1
        checkpointer = self.trainer.checkpointer
        if (finished + 1) % self.period and finished + 1 < self.trainer.max_iter:
            checkpointer.save(f"model_{finished:07d}", iteration=finished)
        if comm.is_main_process():
            stop.message += (
                f" Iteration {finished} is finished; checkpoint '{checkpointer.get_checkpoint_file()}'. Continue with "
                f"--resume --config-file {shlex.quote(os.path.join(checkpointer.save_dir, 'config.yaml'))}"
            )
            log.warning(stop.message)
