"""Detectron2's DefaultTrainer with COCO evaluation, atomic checkpoints and diagnosed failures."""

import hashlib
import importlib.util
import logging
import math
import os
import weakref
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.data import DatasetMapper, build_detection_test_loader
from detectron2.engine import AMPTrainer, DefaultTrainer, SimpleTrainer, create_ddp_model, hooks
from detectron2.evaluation import DatasetEvaluator
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.utils import comm
from detectron2.utils.events import EventWriter, JSONWriter, TensorboardXWriter
from detectron2.utils.file_io import PathManager

from ..atomic import AtomicPathManager, remove_unfinished
from ..checkpoint import NORMS, LoadReport, NormRecord, StartWeights, load_checkpoint, open_start_weights
from ..checkpoint.records import RUN_RECORD, RunRecord
from ..config import changed_config
from ..data.images import ImageNamingMapper
from ..errors import ConfigError, NonFiniteError, is_user_error
from .accumulation import accumulated_step
from .evaluators import build_evaluator
from .interruption import InterruptionHook
from .launch import in_all_processes
from .metric_printer import MetricPrinter
from .nonfinite import LossGuard
from .optimizer import build_optimizer
from .precise_bn import PreciseStatistics
from .resource_errors import resource_errors_explained
from .run_files import METRICS, remove_evaluation
from .seeding import INITIAL_WEIGHTS, STEP, seed_generators
from .training_data import TrainingData, build_training_data

log = logging.getLogger(__name__)

# of RetinaNet, up to v0.6 also of FCOS: a running mean that scales the loss and is not in the model's state dict
_LOSS_NORMALIZER = "loss_normalizer"


class Trainer(DefaultTrainer):
    """Detectron2's default trainer with COCO evaluation of boxes and masks.

    Data errors name the image, a non-finite loss is diagnosed, checkpoints are written atomically and read safely, and
    several processes also work on the CPU. An iteration is one optimizer step with ``SOLVER.ACCUMULATE`` batches.

    All random numbers follow from the seed of the run, which is ``SEED``, or random if that is negative. Checkpoints
    store the seed and the position in the data: a resumed run equals an uninterrupted one. Not restored are the data of
    an overridden :meth:`build_train_loader` and of PreciseBN.

    Args:
        cfg: Detectron2's config with this package's keys.

    Raises:
        ValueError: a component of the config is unknown or does not fit, or the config lacks this package's keys.
    """

    def __init__(self, cfg: CfgNode) -> None:
        if "COMPILE" not in cfg.MODEL:
            raise ConfigError(
                "cfg: has no keys of this package. Fix: call gw_detectron.add_gw_config(cfg) after get_cfg()."
            )
        record = cfg.dump()
        self._draws_seed = cfg.SEED < 0
        if self._draws_seed:
            cfg = changed_config(cfg, {"SEED": int(comm.shared_random_seed())})
        seed_generators(cfg.SEED, INITIAL_WEIGHTS, comm.get_rank())
        if comm.get_world_size() > 1 and cfg.MODEL.DEVICE == "cpu":
            self._init_for_cpu_processes(cfg)
        else:
            super().__init__(cfg)
        self.checkpointer.path_manager = AtomicPathManager(PathManager)
        self.checkpointer.add_checkpointable(NORMS, NormRecord(self.checkpointer.model))
        self.record = RunRecord(record, cfg.SEED)
        self.checkpointer.add_checkpointable(RUN_RECORD, self.record)
        self._loss_guard = LossGuard(self.checkpointer.model)

    def _init_for_cpu_processes(self, cfg: CfgNode) -> None:
        # DefaultTrainer.__init__ always passes a GPU number to DistributedDataParallel, which refuses it for a model on
        # the CPU. These are its steps without that number.
        super(DefaultTrainer, self).__init__()
        cfg = self.auto_scale_workers(cfg, comm.get_world_size())
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        loader = self.build_train_loader(cfg)
        model = create_ddp_model(model, broadcast_buffers=False, device_ids=None)
        self._trainer = SimpleTrainer(model, loader, optimizer)
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self.checkpointer = DetectionCheckpointer(model, cfg.OUTPUT_DIR, trainer=weakref.proxy(self))
        self.start_iter = 0
        self.max_iter = cfg.SOLVER.MAX_ITER
        self.cfg = cfg
        self.register_hooks(self.build_hooks())

    def state_dict(self) -> dict[str, Any]:
        # Up to v0.6 DefaultTrainer does not save the optimizer, whose momentum a resumed run needs. Later versions
        # write it under this name.
        state = super(DefaultTrainer, self).state_dict()
        state["_trainer"] = self._trainer.state_dict()
        state["seed"] = self.record.seed
        if (normalizer := self._loss_normalizer()) is not None:
            state[_LOSS_NORMALIZER] = normalizer
        if isinstance(self.data_loader, TrainingData):
            state["data"] = self.data_loader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the training state, the seed and the position in the data."""
        try:
            super(DefaultTrainer, self).load_state_dict(state_dict)
            if "_trainer" in state_dict:
                self._trainer.load_state_dict(state_dict["_trainer"])
            else:
                log.warning("--resume: no optimizer state in the checkpoint: the momentum starts from zero")
            self._load_loss_normalizer(state_dict)
            self._load_randomness(state_dict)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            writer = "" if "seed" in state_dict else " It was perhaps written by Detectron2's own trainer."
            raise ConfigError(
                f"--resume: the training state of the checkpoint does not fit this config: {error}.{writer} Weight "
                "decay, learning rate of biases, frozen layers or mixed precision (SOLVER, MODEL.BACKBONE.FREEZE_AT) "
                "differ, or other software wrote it. Fix: leave out --resume and set MODEL.WEIGHTS to the checkpoint, "
                "to load its weights only."
            ) from error

    def _loss_normalizer(self) -> float | None:
        value = getattr(self.checkpointer.model, _LOSS_NORMALIZER, None)
        return float(value) if isinstance(value, (int, float, torch.Tensor)) else None

    def _load_loss_normalizer(self, state: dict[str, Any]) -> None:
        if (value := state.get(_LOSS_NORMALIZER)) is not None:
            if not (isinstance(value, float) and 0 < value < math.inf):
                raise ValueError(f"{_LOSS_NORMALIZER} {value!r}")
            setattr(self.checkpointer.model, _LOSS_NORMALIZER, value)
        elif (value := self._loss_normalizer()) is not None:
            log.warning("--resume: no %s in the checkpoint: it starts from %g", _LOSS_NORMALIZER, value)

    def _load_randomness(self, state: dict[str, Any]) -> None:
        seed = state.get("seed")
        if seed is None:
            log.warning("--resume: no seed in the checkpoint: other random numbers than in an uninterrupted run")
        elif self._draws_seed:
            self.record.seed = _count("seed", seed)
        elif seed != self.cfg.SEED:
            log.warning("--resume: SEED %s is not the checkpoint's %s: other random numbers", self.cfg.SEED, seed)
        if self.cfg.TEST.PRECISE_BN.ENABLED:
            log.warning("--resume: PreciseBN starts from the beginning of its data")
        if not isinstance(self.data_loader, TrainingData):
            log.warning("--resume: the training data start from their beginning: build_train_loader stores no position")
            return
        self.data_loader.seed = self.record.seed
        data = state.get("data")
        if data is None:
            log.warning("--resume: no position in the data in the checkpoint: it is computed from the iteration")
            data = {"batches": state["iteration"] + 1}
        _count("batches", data["batches"])
        self.data_loader.load_state_dict(data)

    def resume_or_load(self, resume: bool = True, *, allow_partial: bool = False) -> LoadReport:
        """Load ``MODEL.WEIGHTS``, or the last checkpoint of ``OUTPUT_DIR``.

        The backbone must be complete; see :meth:`load_start_weights`.

        Args:
            resume: continue from the last checkpoint if there is one.
            allow_partial: accept weights that lack a part of the backbone or were trained with other norms.
        """
        return self.load_start_weights(open_start_weights(self.cfg, resume=resume), allow_partial=allow_partial)

    def load_start_weights(self, start: StartWeights, *, allow_partial: bool = False) -> LoadReport:
        """Load opened weights; for a resumed run also its training state.

        Raises:
            PartialLoadError, NormMismatchError, UserError: see :func:`gw_detectron.checkpoint.load_checkpoint`.
        """
        checkpoint = start.checkpoint()
        if start.resumed and checkpoint:
            state = checkpoint.metadata.get("trainer")
            try:
                self.start_iter = 1 + _count("iteration", state.get("iteration") if isinstance(state, dict) else None)
                _count("iteration", checkpoint.metadata.get("iteration", 0))  # Detectron2 writes it a second time
            except ValueError as error:
                raise ConfigError(
                    f"--resume ('{start.address}'): no training state in the checkpoint ({error}). Fix: leave out "
                    "--resume and set MODEL.WEIGHTS to the checkpoint, to load its weights only."
                ) from None
        elif checkpoint and comm.is_main_process():
            self.record.set_start_weights(checkpoint)
        report = load_checkpoint(self.checkpointer, checkpoint, allow_partial=allow_partial)
        if start.resumed and checkpoint:
            for name, checkpointable in self.checkpointer.checkpointables.items():
                if name in checkpoint.metadata:
                    checkpointable.load_state_dict(checkpoint.metadata[name])
        log.info(str(report))
        check_same_start(self.checkpointer.model, start, self.start_iter)
        return report

    @classmethod
    def build_model(cls, cfg: CfgNode) -> torch.nn.Module:
        """Build the model; compile its backbone if ``MODEL.COMPILE``."""
        model = super().build_model(cfg)
        if cfg.MODEL.COMPILE:
            model.backbone.compile()
        return model

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: torch.nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(cfg, model)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        return build_training_data(cfg, ImageNamingMapper(DatasetMapper(cfg, True)))

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Any:
        return build_detection_test_loader(cfg, dataset_name, mapper=ImageNamingMapper(DatasetMapper(cfg, False)))

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str, output_folder: str | None = None) -> DatasetEvaluator:
        """Build the evaluators of a dataset, see :func:`.evaluators.build_evaluator`."""
        return build_evaluator(cfg, dataset_name, output_folder)

    @classmethod
    def test_with_TTA(cls, cfg: CfgNode, model: torch.nn.Module) -> OrderedDict:
        """Evaluate with test-time augmentation (``TEST.AUG``); result names end in ``_TTA``."""
        log.info("Running inference with test-time augmentation ...")
        folder = os.path.join(cfg.OUTPUT_DIR, "inference_TTA")
        evaluators = [cls.build_evaluator(cfg, name, folder) for name in cfg.DATASETS.TEST]
        results = cls.test(cfg, GeneralizedRCNNWithTTA(cfg, model), evaluators)
        return OrderedDict((f"{key}_TTA", value) for key, value in results.items())

    @classmethod
    def test(cls, cfg: CfgNode, model: torch.nn.Module, evaluators: Any = None) -> OrderedDict:
        """Evaluate on ``DATASETS.TEST``; see Detectron2's ``DefaultTrainer.test``.

        All processes use the running statistics of the main one, which checkpoints contain.
        """
        if comm.get_world_size() > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
        with resource_errors_explained(cfg):
            return super().test(cfg, model, evaluators)

    def build_hooks(self) -> list[Any]:
        built = self._stock_hooks()
        if self.cfg.TEST.PRECISE_BN.ENABLED:
            # as in Detectron2, for the memory of a second loader
            options = changed_config(self.cfg, {"DATALOADER.NUM_WORKERS": 0})
            batches, count = self.build_train_loader(options), options.TEST.PRECISE_BN.NUM_ITER
            precise = PreciseStatistics(options.TEST.EVAL_PERIOD, self.model, batches, count)
            # before the checkpoints and the evaluation, which use the statistics
            place = next(i for i, hook in enumerate(built) if isinstance(hook, hooks.LRScheduler))
            built.insert(place + 1, precise)
        self.interruption = InterruptionHook(self.cfg.SOLVER.CHECKPOINT_PERIOD, self.cfg.TEST.EVAL_PERIOD)
        # after the scheduler and the checkpoints, before the evaluation
        place = next((i for i, hook in enumerate(built) if isinstance(hook, hooks.EvalHook)), len(built))
        built.insert(place, self.interruption)
        if self.cfg.TEST.AUG.ENABLED:
            # before the writers, which close after the training
            place = next((i for i, hook in enumerate(built) if isinstance(hook, hooks.PeriodicWriter)), len(built))
            built.insert(place, hooks.EvalHook(0, lambda: self.test_with_TTA(self.cfg, self.model)))
        return built

    def _evaluate(self) -> OrderedDict:
        """Evaluate the model in training; what ``--eval-only`` has left in this folder meanwhile is replaced."""
        if comm.is_main_process():
            remove_evaluation(self.cfg.OUTPUT_DIR)
        self._last_eval_results = self.test(self.cfg, self.model)
        return self._last_eval_results

    def _stock_hooks(self) -> list[Any]:
        """Build Detectron2's hooks without PreciseBN, which knows BN alone and would read the dataset again."""
        cfg = self.cfg
        self.cfg = changed_config(cfg, {"TEST.PRECISE_BN.ENABLED": False})
        try:
            evaluation = hooks.EvalHook(cfg.TEST.EVAL_PERIOD, self._evaluate)
            built = [hook for hook in super().build_hooks() if hook is not None]
            return [evaluation if isinstance(hook, hooks.EvalHook) else hook for hook in built]
        finally:
            self.cfg = cfg

    def build_writers(self) -> list[EventWriter]:
        solver = self.cfg.SOLVER
        writers = [
            MetricPrinter(self.max_iter, solver.IMS_PER_BATCH * solver.ACCUMULATE),
            JSONWriter(os.path.join(self.cfg.OUTPUT_DIR, METRICS)),
        ]
        if importlib.util.find_spec("tensorboard") is None:
            log.warning(f"tensorboard is not installed: metrics are written to {METRICS} only")
            return writers
        return [*writers, TensorboardXWriter(self.cfg.OUTPUT_DIR)]

    def before_step(self) -> None:
        seed_generators(self.record.seed, STEP, comm.get_rank(), self.iter)
        super().before_step()

    def run_step(self) -> None:
        try:
            with resource_errors_explained(self.cfg, self._loss_guard):
                self._run_step()
        except (FloatingPointError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            cause = self._loss_guard.explain(autocast=isinstance(self._trainer, AMPTrainer))
            raise NonFiniteError(f"iteration {self.iter}: {error}\n{cause}") from error
        except RuntimeError as error:
            self.interruption.stopped_by(error)
            raise

    def _run_step(self) -> None:
        if self.cfg.SOLVER.ACCUMULATE == 1:
            super().run_step()
        else:
            self._trainer.iter = self.iter  # the metrics of later versions of Detectron2 read it
            accumulated_step(self._trainer, self.cfg.SOLVER.ACCUMULATE)

    def train(self) -> dict | None:
        """Train to ``SOLVER.MAX_ITER``.

        Returns:
            The results of the last evaluation; None without one.

        Raises:
            NonFiniteError: the loss became infinite or NaN.
            FileAccessError: a checkpoint could not be written.
            RunMemoryError, DataWorkerError: see :func:`.resource_errors.resource_errors_explained`.
            RecordError: an image or its record cannot be used.
        """
        if comm.is_main_process():
            remove_unfinished(self.cfg.OUTPUT_DIR)
        loop_log = logging.getLogger("detectron2.engine.train_loop")
        loop_log.addFilter(_remove_traceback_of_user_errors)
        try:
            # again, since torch reports a killed worker by an error between any two lines
            with resource_errors_explained(self.cfg, self._loss_guard):
                super().train()
        finally:
            loop_log.removeFilter(_remove_traceback_of_user_errors)
        return getattr(self, "_last_eval_results", None)


def _count(name: str, value: Any) -> int:
    """Return a number of a checkpoint; raise ValueError unless it counts something."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53:
        return value
    raise ValueError(f"{name} {value!r}")


def check_same_start(model: torch.nn.Module, start: StartWeights, iteration: int = 0) -> None:
    """Require that all processes start with the same weights.

    Machines without a shared disk may read different files, and each process loads its own.

    Raises:
        SystemExit: the weights or the first iteration differ; the main process reports a ConfigError.
    """
    if comm.get_world_size() == 1:
        return
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy())
    starts = comm.all_gather((iteration, digest.hexdigest()))
    with in_all_processes():
        if len(set(starts)) > 1:
            raise ConfigError(
                f"{'--resume' if start.resumed else 'MODEL.WEIGHTS'} ('{start.address}'): the processes start with "
                f"different weights, in the iterations {[first for first, _ in starts]}. Fix: give all machines the "
                "same OUTPUT_DIR and MODEL.WEIGHTS, or copy those of the first machine to the others."
            )


def _remove_traceback_of_user_errors(record: logging.LogRecord) -> bool:
    """Log filter: replace the traceback of a user error by its message."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and is_user_error(error):
        record.exc_info = None
        record.msg = f"{record.msg} {error}"
    return True
