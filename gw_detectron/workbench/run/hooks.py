"""Hooks of a training: stop at a signal, explain a non-finite loss, keep the best weights."""

import contextlib
import functools
import itertools
import logging
import os
import shlex
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.engine import HookBase
from detectron2.engine.hooks import BestCheckpointer, EvalHook
from detectron2.structures import Instances
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ...atomic import atomic_write
from ...norms.listing import is_synchronized
from ...weights import RUN_RECORD_KEY, GWDetectionCheckpointer
from ...weights.opening import BEST_CHECKPOINT
from ...weights.reading import sha256_of
from ..console import Interrupted, signals_handled
from .folder import BEST_PREDICTIONS, PREDICTIONS

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
        self._handlers.enter_context(
            signals_handled(self._receive, signal.SIGTERM, signal.SIGINT)
        )

    def before_step(self) -> None:
        self._evaluating = False

    def after_step(self) -> None:
        if number := max(comm.all_gather(self.received)):
            self._stop(number)
        done = self.trainer.iter + 1
        self._evaluating = (
            self.eval_period > 0
            and done % self.eval_period == 0
            and done < self.trainer.max_iter
        )

    def after_train(self) -> None:
        self._handlers.close()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            if (
                number == signal.SIGINT
                and time.monotonic() - self._received_at > _REPEAT_SECONDS
            ):
                raise Interrupted(number, "Stopped by a second Ctrl-C, without a checkpoint.")
            return
        self.received, self._received_at = number, time.monotonic()
        if self._evaluating:
            self._stop(number)
        again = (
            "; a second Ctrl-C stops at once, without a checkpoint"
            if number == signal.SIGINT
            else ""
        )
        log.warning("%s: stopping after this step%s", signal.Signals(number).name, again)

    def _stop(self, number: int) -> None:
        """Write a checkpoint of the finished step unless there is one, and raise Interrupted."""
        self.received = number
        stop, finished, checkpointer = (
            Interrupted(number),
            self.trainer.iter,
            self.trainer.checkpointer,
        )
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
            bad = ", ".join(
                f"{name}={loss.item():g}"
                for name, loss in losses.items()
                if not torch.isfinite(loss)
            )
            raise FloatingPointError(
                f"the loss is not finite: {bad or 'the sum of all losses overflows'}"
            )

    def explain(self, autocast: bool = False) -> str:
        """Describe where the last batch became non-finite; ``autocast`` runs the model in mixed precision, as then."""
        names = [
            str(example.get("file_name", "an image without a name")) for example in self._batch
        ]
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
            for name, module in itertools.islice(
                self.model.named_modules(), 1, None
            ):  # without the model itself
                label = f"{name} ({type(module).__name__})"
                observing.enter_context(
                    module.register_forward_hook(functools.partial(note_bad, label))
                )
            self.model(self._batch)
        return found[0] if found else ""


def _is_finite(value: Any) -> bool:
    if isinstance(value, Instances):
        value = value.get_fields()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    value = getattr(value, "tensor", value)  # of Boxes, ImageList
    return not isinstance(value, Tensor) or bool(torch.isfinite(value).all())


class TrainingEnded(BaseException):
    """A training has ended before ``SOLVER.MAX_ITER``. Not an Exception, which Detectron2 logs as a failure."""


class WeightAverage(HookBase):
    """Average the weights of a model over its iterations, by torch's ``AveragedModel``, in ``averaged``.

    With d = ``SOLVER.EMA``, the decay after n iterations is min(d, (1 + n) / (10 + n)), so that a short run forgets its
    first weights. Buffers, such as BN's statistics, are averaged alike. The model is without DistributedDataParallel.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self._average = AveragedModel(model, multi_avg_fn=self._update, use_buffers=True)
        self.averaged: nn.Module = self._average.module

    def _update(self, averages: Any, values: Any, count: Tensor | int) -> None:
        decay = min(self._decay, (1 + int(count)) / (10 + int(count)))
        get_ema_multi_avg_fn(decay)(averages, values, count)

    def after_step(self) -> None:
        self._average.update_parameters(self._model)

    def start(self) -> None:
        """Train from the weights that were loaded into the averaged model, as a checkpoint holds them."""
        self._model.load_state_dict(self.averaged.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {"count": int(self._average.n_averaged), "weights": self._model.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._average.n_averaged.fill_(int(state["count"]))
        self._model.load_state_dict(state["weights"])


class BestWeights(BestCheckpointer):
    """Keep the weights with the best ``TEST.BEST`` in ``model_best.pth``; end after ``TEST.PATIENCE`` evaluations.

    Their predictions are kept for a report. A resumed run repeats an evaluation whose score its checkpoint lacks.
    ``evaluations`` are the hooks that log the scores; they come before this one. Those ``at_end`` come after
    ``SOLVER.MAX_ITER``, which a run that ends earlier does not reach.
    """

    def __init__(
        self,
        cfg: CfgNode,
        checkpointer: GWDetectionCheckpointer,
        evaluations: Sequence[EvalHook],
        at_end: Sequence[EvalHook] = (),
    ) -> None:
        record = checkpointer.checkpointables[RUN_RECORD_KEY]
        best = _BestCheckpointer(checkpointer.model, cfg.OUTPUT_DIR, **{RUN_RECORD_KEY: record})
        best.path_manager = checkpointer.path_manager
        mode = "min" if cfg.TEST.BEST.endswith("loss") else "max"
        super().__init__(
            cfg.TEST.EVAL_PERIOD,
            best,
            cfg.TEST.BEST,
            mode,
            BEST_CHECKPOINT.removesuffix(".pth"),
        )
        self._evaluations, self._at_end, self._patience = evaluations, at_end, cfg.TEST.PATIENCE
        self._last_iter, self._waited = (
            -1,
            0,
        )  # of the last evaluation; evaluations since the best one
        files = [MetadataCatalog.get(name).get("json_file") for name in cfg.DATASETS.TEST]
        self._data = [sha256_of(file) for file in files if file and os.path.isfile(file)]

    def before_train(self) -> None:
        start = self.trainer.start_iter
        self.trainer.iter = self.trainer.storage.iter = (
            start - 1
        )  # as after the last step of the checkpoint
        # whose last evaluation came after its checkpoint
        finished = self.trainer.checkpointer.get_checkpoint_file().endswith("model_final.pth")
        if self._last_iter + 1 < start < self.trainer.max_iter and (
            finished or start % self._period == 0
        ):
            for hook in self._evaluations:
                hook._do_eval()
            self._best_checking()
        else:
            self._check_patience(save=False)
        self.trainer.iter = self.trainer.storage.iter = start

    def _best_checking(self) -> None:
        before, self._last_iter = self.best_iter, self.trainer.storage.iter
        # the main process has scores; a stopped evaluation leaves an earlier one's scores
        score = self.trainer.storage.latest().get(self._val_metric)
        if comm.is_main_process() and (score is None or score[1] == self._last_iter):
            super()._best_checking()  # which warns where there is no such score
        self._waited = 0 if self.best_iter != before else self._waited + (score is not None)
        predictions = Path(self._checkpointer.save_dir, "inference", PREDICTIONS)
        if self.best_iter != before and predictions.is_file():  # on the main process
            with atomic_write(predictions.with_name(BEST_PREDICTIONS)) as temporary:
                shutil.copyfile(predictions, temporary)
        self._check_patience(save=True)

    def _check_patience(self, *, save: bool) -> None:
        waited = comm.is_main_process() and 0 < self._patience <= self._waited
        if self.trainer.iter + 1 >= self.trainer.max_iter or not any(comm.all_gather(waited)):
            return
        if save:
            self.trainer.checkpointer.save("model_final", iteration=self.trainer.iter)
            for hook in self._at_end:
                hook._do_eval()
        raise TrainingEnded(
            f"TEST.PATIENCE ({self._patience}): no better {self._val_metric} in {self._waited} evaluations. The run "
            f"ends after iteration {self._last_iter}."
        )

    def state_dict(self) -> dict[str, Any]:
        values = (self.best_metric, self.best_iter, self._last_iter, self._waited)
        return {self._val_metric: values, "data": self._data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, unless the run had another ``TEST.BEST`` or other validation files."""
        if state.get("data", self._data) != self._data:
            log.warning(
                "TEST.BEST: the validation files have changed, so the next evaluation is the best one so far"
            )
            if comm.is_main_process():  # a report would judge them by other images
                Path(self._checkpointer.save_dir, "inference", BEST_PREDICTIONS).unlink(
                    missing_ok=True
                )
        elif values := state.get(self._val_metric):
            self.best_metric, self.best_iter, self._last_iter, self._waited = values


class _BestCheckpointer(GWDetectionCheckpointer):
    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Leave the tag: a run is resumed from its last checkpoint, which has the training state."""
