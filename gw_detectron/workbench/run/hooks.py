"""Hooks of a training: stop at a signal, average the weights, keep the best ones."""

import contextlib
import datetime
import logging
import math
import os
import shlex
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.engine import HookBase
from detectron2.engine.hooks import BestCheckpointer, EvalHook
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ...atomic import atomic_write
from ...weights import RUN_RECORD_KEY, GWDetectionCheckpointer
from ...weights.opening import BEST_CHECKPOINT
from ...weights.reading import sha256_of
from ..dataset.source import own_source
from ..signals import TERMINATING, Interrupted, signals_handled
from .folder import BEST_PREDICTIONS, PREDICTIONS, VALIDATION_PREFIX

log = logging.getLogger(__name__)


class SignalHook(HookBase):
    """Stop at SIGTERM, SIGHUP or Ctrl-C with a checkpoint of the finished step.

    The handler notes the signal, and :meth:`after_step` acts on it: all processes stop after the
    same step. In an evaluation the handler stops at once. A second Ctrl-C stops without a
    checkpoint.

    Place it after the hooks whose state is in a checkpoint, and before the evaluation.
    """

    def __init__(self, checkpoint_period: int, eval_period: int = 0) -> None:
        self.checkpoint_period = checkpoint_period
        self.eval_period = eval_period
        self.received = 0
        self._evaluating = False
        self._handlers = contextlib.ExitStack()

    def before_train(self) -> None:
        handled = signals_handled(self._receive, *TERMINATING, signal.SIGINT)
        self._handlers.enter_context(handled)

    def before_step(self) -> None:
        self._evaluating = False

    def after_step(self) -> None:
        number = max(comm.all_gather(self.received))
        if number:
            self._stop(number)

        done = self.trainer.iter + 1
        if self.eval_period > 0 and done < self.trainer.max_iter:
            self._evaluating = done % self.eval_period == 0

    def after_train(self) -> None:
        self._handlers.close()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            # torchrun repeats a Ctrl-C of the terminal, and kills its processes itself
            if number == signal.SIGINT and not dist.is_torchelastic_launched():
                raise Interrupted(
                    number, "Stopped by a second Ctrl-C, without a checkpoint."
                )
            return

        self.received = number
        if self._evaluating:
            self._stop(number)

        message = f"{signal.Signals(number).name}: stopping after this step"
        if number == signal.SIGINT:
            message += "; a second Ctrl-C stops at once, without a checkpoint"
        log.warning(message)

    def _stop(self, number: int) -> None:
        """Write a checkpoint of the finished step unless there is one, and raise Interrupted."""
        self.received = number
        finished = self.trainer.iter
        checkpointer = self.trainer.checkpointer
        if (
            finished + 1
        ) % self.checkpoint_period and finished + 1 < self.trainer.max_iter:
            checkpointer.save(f"model_{finished:07d}", iteration=finished)

        stop = Interrupted(number)
        if comm.is_main_process():
            config = shlex.quote(os.path.join(checkpointer.save_dir, "config.yaml"))
            stop.message += (
                f" Iteration {finished} is finished; checkpoint "
                f"'{checkpointer.get_checkpoint_file()}'. Continue with "
                f"--resume --config-file {config}"
            )
            log.warning(stop.message)

        if not self._evaluating:
            comm.synchronize()  # a launcher ends all processes when the first one exits
        raise stop


class FirstEstimate(HookBase):
    """Say after the first steps how long the run takes.

    Detectron2's own line comes after 20 iterations, on a CPU a minute later.
    """

    #: Detectron2 times the fourth and later ones
    steps = 6

    def after_step(self) -> None:
        trainer = self.trainer
        done = trainer.iter + 1
        if done - trainer.start_iter != self.steps or done == trainer.max_iter:
            return
        step = trainer.storage.history("time").median(self.steps)
        left = datetime.timedelta(seconds=round(step * (trainer.max_iter - done)))
        log.info(
            "an iteration takes %.2g s, the rest of the run %s without evaluations",
            step,
            left,
        )


class EpochLogger(logging.LoggerAdapter):
    """Detectron2's line of progress, with the number of passes over the images.

    Args:
        logger: of Detectron2's printer.
        max_iter: iterations of the run.
        epoch: iterations of a pass.
    """

    def __init__(self, logger: logging.Logger, max_iter: int, epoch: float) -> None:
        super().__init__(logger)
        self._epoch = epoch
        self._epochs = max_iter / epoch

    def process(self, msg: Any, kwargs: Any) -> tuple[str, Any]:
        epoch = (get_event_storage().iter + 1) / self._epoch
        return f" epoch: {epoch:.3g} of {self._epochs:.3g} {msg}", kwargs


class TrainingEnded(BaseException):
    """A training has ended before ``SOLVER.MAX_ITER``.

    It is not an Exception, which Detectron2 would log as a failure.
    """


class WeightAverage(HookBase):
    """Average the weights of a model over its iterations in ``averaged``.

    With d = ``SOLVER.EMA``, the decay after n iterations is min(d, (1 + n) / (10 + n)), so that a
    short run forgets its first weights. Buffers, such as BN's statistics, are averaged alike. The
    model is without DistributedDataParallel.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        self._average = AveragedModel(
            model, multi_avg_fn=self._update, use_buffers=True
        )
        self.averaged: nn.Module = self._average.module

    def _update(self, averages: Any, values: Any, count: Tensor | int) -> None:
        decay = min(self._decay, (1 + int(count)) / (10 + int(count)))
        get_ema_multi_avg_fn(decay)(averages, values, count)

    def after_step(self) -> None:
        self._average.update_parameters(self._model)

    def start(self) -> None:
        """Train from the weights that a checkpoint has given to the averaged model."""
        self._model.load_state_dict(self.averaged.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {
            "count": int(self._average.n_averaged),
            "weights": self._model.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._average.n_averaged.fill_(int(state["count"]))
        self._model.load_state_dict(state["weights"])


class BestWeights(BestCheckpointer):
    """Keep the weights with the best ``TEST.BEST`` in ``model_best.pth``.

    Their predictions are kept for a report. The training ends after ``TEST.PATIENCE`` evaluations
    without a better score, not counting scores that are not finite. A resumed run repeats an
    evaluation whose score its checkpoint lacks.

    Args:
        cfg: with ``TEST.BEST``; the losses, named ``validation/loss_cls`` and so on, are minimized.
        checkpointer: of the training.
        evaluations: hooks that log the scores; they come before this one.
        at_end: hooks that come after ``SOLVER.MAX_ITER``, which a run that ends earlier does not
        reach.
    """

    def __init__(
        self,
        cfg: CfgNode,
        checkpointer: GWDetectionCheckpointer,
        evaluations: Sequence[EvalHook],
        at_end: Sequence[EvalHook] = (),
    ) -> None:
        record = checkpointer.checkpointables[RUN_RECORD_KEY]
        best = _BestCheckpointer(
            checkpointer.model, cfg.OUTPUT_DIR, **{RUN_RECORD_KEY: record}
        )
        best.path_manager = checkpointer.path_manager
        best.final_iteration = cfg.SOLVER.MAX_ITER - 1
        # a dataset of this name has scores such as validation/bbox/AP
        place, slash, _ = cfg.TEST.BEST.rpartition("/")
        is_loss = place + slash == VALIDATION_PREFIX
        super().__init__(
            cfg.TEST.EVAL_PERIOD,
            best,
            cfg.TEST.BEST,
            "min" if is_loss else "max",
            BEST_CHECKPOINT.removesuffix(".pth"),
        )

        self._evaluations = evaluations
        self._at_end = at_end
        self._patience = cfg.TEST.PATIENCE
        self._evaluated_iter = -1  # of the last evaluation
        self._waited = 0  # evaluations since the best one
        self._note_state()

        self._data = [digest for name in cfg.DATASETS.TEST if (digest := _digest(name))]
        self._best_predictions = Path(cfg.OUTPUT_DIR, "inference", BEST_PREDICTIONS)

    def before_train(self) -> None:
        trainer = self.trainer
        start = trainer.start_iter
        # as after the last step of the checkpoint
        trainer.iter = trainer.storage.iter = start - 1

        # a finished run has written its checkpoint before its last evaluation
        finished = trainer.checkpointer.get_checkpoint_file().endswith(
            "model_final.pth"
        )
        was_due = finished or start % self._period == 0
        if was_due and self._evaluated_iter + 1 < start < trainer.max_iter:
            for hook in self._evaluations:
                hook._do_eval()
            self._best_checking()
        else:
            self._check_patience(save=False)
        trainer.iter = trainer.storage.iter = start

    def _best_checking(self) -> None:
        best_before = self.best_iter
        self._evaluated_iter = self.trainer.storage.iter
        # the main process has scores; an evaluation without this score leaves an earlier one
        score, scored_iter = self.trainer.storage.latest().get(
            self._val_metric, (math.nan, self._evaluated_iter)
        )
        if comm.is_main_process() and scored_iter == self._evaluated_iter:
            super()._best_checking()  # which warns where there is no such score

        if self.best_iter != best_before:
            self._waited = 0
            self._keep_predictions()
        elif math.isfinite(score):
            self._waited += 1

        # after the files: a run that is stopped before repeats the evaluation
        self._note_state()
        self._check_patience(save=True)

    def _note_state(self) -> None:
        self._state = (
            self.best_metric,
            self.best_iter,
            self._evaluated_iter,
            self._waited,
        )

    def _keep_predictions(self) -> None:
        predictions = self._best_predictions.with_name(PREDICTIONS)
        if predictions.is_file():
            with atomic_write(self._best_predictions) as temporary:
                shutil.copyfile(predictions, temporary)

    def _check_patience(self, *, save: bool) -> None:
        """End the training if a better score has not come for long."""
        waited = comm.is_main_process() and 0 < self._patience <= self._waited
        at_end = self.trainer.iter + 1 >= self.trainer.max_iter
        if at_end or not any(comm.all_gather(waited)):
            return

        if save:
            self.trainer.checkpointer.save("model_final", iteration=self.trainer.iter)
            for hook in self._at_end:
                hook._do_eval()
        raise TrainingEnded(
            f"TEST.PATIENCE ({self._patience}): no better {self._val_metric} in {self._waited} "
            f"evaluations. The run ends after iteration {self._evaluated_iter}."
        )

    def state_dict(self) -> dict[str, Any]:
        return {self._val_metric: self._state, "data": self._data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, unless the run had another ``TEST.BEST`` or other validation files."""
        if state.get("data", self._data) != self._data:
            log.warning(
                "TEST.BEST: the validation files have changed, so the next evaluation is the best "
                "one so far"
            )
            if comm.is_main_process():  # a report would judge them by other images
                self._best_predictions.unlink(missing_ok=True)
        elif self._val_metric in state:
            self.best_metric, self.best_iter, self._evaluated_iter, self._waited = (
                state[self._val_metric]
            )
            self._note_state()


def _digest(dataset: str) -> str:
    """Return the digest of a dataset's annotations, "" if they are in no local file."""
    source = own_source(dataset)
    if source is not None:
        return source.sha256()
    file = MetadataCatalog.get(dataset).get("json_file")
    return sha256_of(file) if file and os.path.isfile(file) else ""


class _BestCheckpointer(GWDetectionCheckpointer):
    final_iteration: int

    def save(self, name: str, **kwargs: Any) -> None:
        """Save the best weights; a kill must not leave the predictions of earlier ones beside them."""
        # Detectron2 counts one more in the evaluation after the last step
        kwargs["iteration"] = min(kwargs["iteration"], self.final_iteration)
        predictions = Path(self.save_dir, "inference", BEST_PREDICTIONS)
        predictions.unlink(missing_ok=True)
        super().save(name, **kwargs)

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Leave the tag: a run is resumed from its last checkpoint with the training state."""
