"""Hooks of a training: stop at a signal, explain a non-finite loss."""

import contextlib
import functools
import itertools
import logging
import os
import shlex
import signal
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from detectron2.engine import HookBase
from detectron2.structures import Instances
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from ..cli import Interrupted, signals_handled
from ..norms.listing import is_synchronized

log = logging.getLogger(__name__)

_REPEAT_SECONDS = 1.0  # torchrun sends a Ctrl-C of the terminal to its processes a second time
_STABILIZE = "lower SOLVER.BASE_LR, lengthen SOLVER.WARMUP_ITERS or set SOLVER.CLIP_GRADIENTS.ENABLED True"


class SignalHook(HookBase):
    """Stop at SIGTERM or Ctrl-C with a checkpoint of the finished step.

    The handler notes the signal, and :meth:`after_step` acts on it: all processes stop after the same step. In an
    evaluation the handler stops at once. A second Ctrl-C stops without a checkpoint.

    Place it after the hooks whose state is in a checkpoint, and before the evaluation.
    """

    def __init__(self, checkpoint_period: int, eval_period: int = 0) -> None:
        self.checkpoint_period, self.eval_period = checkpoint_period, eval_period
        self.received = 0
        self._received_at = 0.0
        self._evaluating = False
        self._handlers = contextlib.ExitStack()

    def before_train(self) -> None:
        self._handlers.enter_context(signals_handled(self._receive, signal.SIGTERM, signal.SIGINT))

    def before_step(self) -> None:
        self._evaluating = False

    def after_step(self) -> None:
        if number := max(comm.all_gather(self.received)):
            self._stop(number)
        done = self.trainer.iter + 1
        self._evaluating = self.eval_period > 0 and done % self.eval_period == 0 and done < self.trainer.max_iter

    def after_train(self) -> None:
        self._handlers.close()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            if number == signal.SIGINT and time.monotonic() - self._received_at > _REPEAT_SECONDS:
                raise Interrupted(number, "Stopped by a second Ctrl-C, without a checkpoint.")
            return
        self.received, self._received_at = number, time.monotonic()
        if self._evaluating:
            self._stop(number)
        again = "; a second Ctrl-C stops at once, without a checkpoint" if number == signal.SIGINT else ""
        log.warning("%s: stopping after this step%s", signal.Signals(number).name, again)

    def _stop(self, number: int) -> None:
        """Write a checkpoint of the finished step unless there is one, and raise Interrupted."""
        self.received = number
        stop, finished, checkpointer = Interrupted(number), self.trainer.iter, self.trainer.checkpointer
        if (finished + 1) % self.checkpoint_period and finished + 1 < self.trainer.max_iter:
            checkpointer.save(f"model_{finished:07d}", iteration=finished)
        if comm.is_main_process():
            stop.message += (
                f" Iteration {finished} is finished; checkpoint '{checkpointer.get_checkpoint_file()}'. Continue with "
                f"--resume --config-file {shlex.quote(os.path.join(checkpointer.save_dir, 'config.yaml'))}"
            )
            log.warning(stop.message)
        if not self._evaluating:
            comm.synchronize()  # a launcher ends all processes when the first one exits
        raise stop


class LossGuard:
    """Stop a training at a non-finite loss, and find the image or module behind it.

    Each process checks its own batch, so the process with the broken image names it. The model is not its
    ``DistributedDataParallel`` wrapper.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._batch: Sequence[dict] = ()
        model.register_forward_pre_hook(self._remember)
        model.register_forward_hook(self._check)

    def _remember(self, module: nn.Module, args: tuple) -> None:
        self._batch = args[0]

    def _check(self, module: nn.Module, args: tuple, losses: Any) -> None:
        if not (module.training and torch.is_grad_enabled() and isinstance(losses, dict)):
            return
        # one synchronization with the device, where the heads have just caused several
        if not torch.isfinite(sum(losses.values(), torch.zeros(()))).all():
            bad = ", ".join(f"{name}={loss.item():g}" for name, loss in losses.items() if not torch.isfinite(loss))
            raise FloatingPointError(f"the loss is not finite: {bad or 'the sum of all losses overflows'}")

    def explain(self, autocast: bool = False) -> str:
        """Describe where the last batch became non-finite; ``autocast`` runs the model in mixed precision, as then."""
        names = [str(example.get("file_name", "an image without a name")) for example in self._batch]
        for name, example in zip(names, self._batch, strict=True):
            if not _is_finite([example.get("image"), example.get("instances")]):
                return f"The image {name} or its annotations have values that are NaN or infinite. Fix: repair it."
        images = ", ".join(names)
        if module := self._first_bad_module(autocast):
            return f"The first module with a non-finite output is {module}, for the images {images}. Fix: {_STABILIZE}."
        return f"All modules are finite. Fix: check the annotations of the images {images}."

    def _first_bad_module(self, autocast: bool) -> str:
        found: list[str] = []

        def note_bad(label: str, module: nn.Module, args: tuple, output: Any) -> None:
            if not _is_finite(output):
                found.append(label)

        for module in self.model.modules():
            if is_synchronized(module):
                module.eval()  # in training mode it would wait for processes that do not run the model again
        # Any error ends this run, which only searches; its events must not be mixed with the training's.
        with (
            contextlib.ExitStack() as observing,
            contextlib.suppress(Exception),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),  # compiled modules do not call new hooks
            EventStorage(),
            torch.autocast(next(self.model.parameters()).device.type, enabled=autocast),
        ):
            for name, module in itertools.islice(self.model.named_modules(), 1, None):  # without the model itself
                label = f"{name} ({type(module).__name__})"
                observing.enter_context(module.register_forward_hook(functools.partial(note_bad, label)))
            self.model(self._batch)
        return found[0] if found else ""


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(torch.isfinite(value).all())
    if isinstance(value, Instances):
        return _is_finite(value.get_fields())
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    return _is_finite(getattr(value, "tensor", None)) if hasattr(value, "tensor") else True  # Boxes, ImageList
