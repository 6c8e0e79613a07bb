"""Hooks that decide which weights of a training are kept, and when it ends."""

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.engine import HookBase
from detectron2.engine.hooks import BestCheckpointer, EvalHook
from detectron2.utils import comm
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..atomic import atomic_write
from ..checkpoint import RUN_RECORD, GWDetectionCheckpointer
from ..checkpoint.opening import BEST_CHECKPOINT
from .output_folder import BEST_PREDICTIONS, PREDICTIONS

log = logging.getLogger(__name__)


class TrainingEnded(BaseException):
    """A training has ended before ``SOLVER.MAX_ITER``. Not an Exception, which Detectron2 logs as a failure."""


class WeightAverage(HookBase):
    """Average the weights of a model over its iterations, by torch's ``AveragedModel``, in ``averaged``.

    After n iterations the decay is min(d, (1 + n) / (10 + n)), so that a short run forgets its first weights. Buffers,
    such as the running statistics of BN, are averaged alike.
    The model is the trained one, not its ``DistributedDataParallel``; d is ``SOLVER.EMA``.
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

    Their predictions are kept for a report. A resumed run repeats an evaluation that a kill has cut off.
    ``evaluations`` are the hooks that log the scores; they come before this one.
    """

    def __init__(self, cfg: CfgNode, checkpointer: GWDetectionCheckpointer, evaluations: Sequence[EvalHook]) -> None:
        record = checkpointer.checkpointables[RUN_RECORD]
        best = _BestCheckpointer(checkpointer.model, cfg.OUTPUT_DIR, **{RUN_RECORD: record})
        best.path_manager = checkpointer.path_manager
        mode = "min" if cfg.TEST.BEST.endswith("loss") else "max"
        super().__init__(cfg.TEST.EVAL_PERIOD, best, cfg.TEST.BEST, mode, BEST_CHECKPOINT.removesuffix(".pth"))
        self._evaluations, self._patience = evaluations, cfg.TEST.PATIENCE
        self._last_iter, self._waited = -1, 0  # of the last evaluation; evaluations since the best one

    def before_train(self) -> None:
        start = self.trainer.start_iter
        self.trainer.iter = self.trainer.storage.iter = start - 1  # as after the last step of the checkpoint
        if start > self._last_iter + 1 and start % self._period == 0:
            for hook in (*self._evaluations, self):
                hook.after_step()
        else:
            self._check_patience(save=False)
        self.trainer.iter = self.trainer.storage.iter = start

    def _best_checking(self) -> None:
        before, self._last_iter = self.best_iter, self.trainer.storage.iter
        # the main process has scores; a stopped evaluation leaves those of an earlier one
        if self.trainer.storage.latest().get(self._val_metric, (0, -1))[1] == self._last_iter:
            super()._best_checking()
        self._waited = 0 if self.best_iter != before else self._waited + 1
        predictions = Path(self._checkpointer.save_dir, "inference", PREDICTIONS)
        if not self._waited and predictions.is_file():
            with atomic_write(predictions.with_name(BEST_PREDICTIONS)) as temporary:
                shutil.copyfile(predictions, temporary)
        self._check_patience(save=True)

    def _check_patience(self, *, save: bool) -> None:
        waited = comm.is_main_process() and 0 < self._patience <= self._waited
        if self.trainer.iter + 1 >= self.trainer.max_iter or not any(comm.all_gather(waited)):
            return
        if save:
            self.trainer.checkpointer.save("model_final", iteration=self.trainer.iter)
        raise TrainingEnded(
            f"TEST.PATIENCE ({self._patience}): no better {self._val_metric} in {self._waited} evaluations. The run "
            f"ends after iteration {self._last_iter}."
        )

    def after_train(self) -> None:
        super().after_train()
        if self.best_iter is not None:
            log.info("Best %s: %.2f, after iteration %d", self._val_metric, self.best_metric, self.best_iter)

    def state_dict(self) -> dict[str, Any]:
        return {self._val_metric: (self.best_metric, self.best_iter, self._last_iter, self._waited)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, unless the run had another ``TEST.BEST``."""
        if values := state.get(self._val_metric):
            self.best_metric, self.best_iter, self._last_iter, self._waited = values


class _BestCheckpointer(GWDetectionCheckpointer):
    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Leave the tag: a run is resumed from its last checkpoint, which has the training state."""
