"""Detectron2's DefaultTrainer with exact resume and safe checkpoints."""

import importlib.util
import logging
import os
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from detectron2.config import CfgNode
from detectron2.data import (
    DatasetMapper,
    Metadata,
    MetadataCatalog,
    build_detection_test_loader,
)
from detectron2.engine import (
    AMPTrainer,
    DefaultTrainer,
    SimpleTrainer,
    create_ddp_model,
    hooks,
)
from detectron2.engine.train_loop import TrainerBase
from detectron2.evaluation import (
    COCOPanopticEvaluator,
    DatasetEvaluator,
    DatasetEvaluators,
    SemSegEvaluator,
)
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.utils import comm
from detectron2.utils.events import (
    CommonMetricPrinter,
    EventWriter,
    JSONWriter,
    TensorboardXWriter,
)
from detectron2.utils.file_io import PathManager
from fvcore.nn.precise_bn import get_bn_modules

from ...atomic import AtomicPathManager
from ...config import changed_config
from ...errors import ConfigError, NonFiniteError, first_line, summarize_names
from ...norms.listing import norm_summary
from ...weights import (
    RUN_RECORD_KEY,
    Checkpoint,
    GWDetectionCheckpointer,
    LazyCheckpoint,
    LoadReport,
    RunRecord,
    load_checkpoint,
    open_start_weights,
    trained_classes,
)
from ...weights.opening import PERIODIC_CHECKPOINTS
from ..dataset.coco_scores import coco_tasks
from ..dataset.data_fit import training_scale
from ..dataset.dataset_checks import wrong_evaluator
from ..dataset.metadata import classes_of
from ..images import ImageNamingMapper
from ..images.augmentations import training_mapper
from .bn_statistics import measure_missing_statistics
from .evaluation import LOSS_NORMALIZER, build_coco_evaluator, validation_losses
from .folder import METRICS, earlier_run, remove_files, stale_output
from .hooks import (
    BestWeights,
    EpochLogger,
    FirstEstimate,
    SignalHook,
    TrainingEnded,
    WeightAverage,
)
from .logs import end_last_line
from .optimizer import accumulated_step, set_norm_decay
from .randomness import INITIAL_WEIGHTS, STEP, seed_generators
from .start import check_same_start, open_run
from .training_data import TrainingData, build_training_data

log = logging.getLogger(__name__)

_WEIGHTS_ONLY = "leave out --resume and set MODEL.WEIGHTS to the checkpoint, to load its weights only."


class Trainer(DefaultTrainer):
    """Detectron2's default trainer with COCO evaluation of boxes and masks.

    Data errors name the image, checkpoints are written atomically and read safely, and several
    processes also work on the CPU. An iteration is one optimizer step with ``SOLVER.ACCUMULATE``
    batches.

    All random numbers follow from the seed of the run, which is ``SEED``, or random if that is
    negative. Checkpoints store the seed and the position in the data: a resumed run equals an
    uninterrupted one. Not restored are the data of an overridden :meth:`build_train_loader` and of
    PreciseBN.

    Building it checks the run and locks ``OUTPUT_DIR`` until :meth:`train` ends, which writes the record
    of the run there.

    Args:
        cfg: Detectron2's config with this package's keys.
        resume: continue the run in ``OUTPUT_DIR``; None leaves it to :meth:`resume_or_load`.
        overwrite: remove an earlier run from ``OUTPUT_DIR`` when the training starts.
        allow_partial: accept weights that lack a part of the backbone or were trained with other
        norms.
        ignore_preflight: log errors of the checks as warnings.

    Raises:
        PreflightError: the run would fail later or learn nothing. Nothing has been written.
        RunError: another training writes to ``OUTPUT_DIR``.
    """

    def __init__(
        self,
        cfg: CfgNode,
        *,
        resume: bool | None = None,
        overwrite: bool = False,
        allow_partial: bool = False,
        ignore_preflight: bool = False,
    ) -> None:
        # DefaultTrainer's gives DistributedDataParallel a GPU number also for a model on the CPU.
        TrainerBase.__init__(self)
        self._hooks: list[Any] = []
        if "COMPILE" not in cfg.MODEL:
            raise ConfigError(
                "cfg: has no keys of this package. Fix: call gw_detectron.add_gw_config(cfg) "
                "after get_cfg()."
            )
        # the losses are computed with the default mapper
        leaves_loss_out = self._overrides("build_test_loader") and cfg.TEST.LOSS
        if leaves_loss_out:
            cfg = changed_config(cfg, {"TEST.LOSS": False})

        self._run = open_run(
            cfg,
            resume=resume,
            overwrite=overwrite,
            allow_partial=allow_partial,
            ignore_preflight=ignore_preflight,
            own_evaluator=self._overrides("build_evaluator"),
        )
        self.start_weights: LazyCheckpoint | None = self._run.weights
        self._resume = resume
        if leaves_loss_out:
            name = type(self).__name__
            log.info(
                "TEST.LOSS: left out, because %s overrides build_test_loader", name
            )

        self.allow_partial = allow_partial
        with self._run.lock as lock:
            self._build(cfg)
            self._lock = lock.pop_all()

    def end_loading(self) -> None:
        """Let the data-loading workers end."""
        held = vars(self._trainer)
        # in v0.6, and later
        for name in ("_data_loader_iter", "_data_loader_iter_obj"):
            if name in held:
                held[name] = None

    def rebuild(self, cfg: CfgNode) -> None:
        """Build model, optimizer, data and hooks anew, for other values of ``SOLVER`` and ``TEST``.

        The run was checked already; nothing may be loaded or trained yet.
        """
        for hook in self._hooks:
            if isinstance(hook, hooks.PeriodicWriter):
                for writer in hook._writers:
                    writer.close()
        self._hooks.clear()
        if comm.is_main_process():  # events of these writers
            self._run.stale += stale_output(cfg.OUTPUT_DIR, metrics=True)
        self._run.cfg = cfg
        self._build(cfg)

    def _overrides(self, name: str) -> bool:
        """Return whether a subclass has a method of its own."""
        return getattr(type(self), name).__code__ is not getattr(Trainer, name).__code__

    def _build(self, cfg: CfgNode) -> None:
        given = cfg.dump()
        self._draws_seed = cfg.SEED < 0
        if self._draws_seed:
            cfg = changed_config(cfg, {"SEED": int(comm.shared_random_seed())})
        seed_generators(cfg.SEED, INITIAL_WEIGHTS, comm.get_rank())
        self.cfg = cfg = self.auto_scale_workers(cfg, comm.get_world_size())
        self.start_iter = 0
        self.max_iter = cfg.SOLVER.MAX_ITER

        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        loader = self.build_train_loader(cfg)
        self._unwrapped = model  # which DistributedDataParallel may wrap
        device_ids = None if cfg.MODEL.DEVICE == "cpu" else [comm.get_local_rank()]
        parallel = create_ddp_model(
            model, broadcast_buffers=False, device_ids=device_ids
        )
        kind = AMPTrainer if cfg.SOLVER.AMP.ENABLED else SimpleTrainer
        self._trainer = kind(parallel, loader, optimizer)
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)

        saved = model
        self._average = None
        if cfg.SOLVER.EMA:
            # a copy of what DistributedDataParallel has made equal in all processes
            self._average = WeightAverage(model, cfg.SOLVER.EMA)
            saved = self._average.averaged
        self.checkpointer = GWDetectionCheckpointer(
            saved, cfg.OUTPUT_DIR, trainer=weakref.proxy(self)
        )
        self.checkpointer.path_manager = AtomicPathManager(PathManager)

        trained_on = Metadata()
        if cfg.DATASETS.TRAIN:
            trained_on = MetadataCatalog.get(cfg.DATASETS.TRAIN[0])
        self.record = RunRecord(
            given,
            cfg.SEED,
            classes_of(trained_on),
            training_scale(cfg),
        )
        self.checkpointer.add_checkpointable(RUN_RECORD_KEY, self.record)

        self.register_hooks(self.build_hooks())

    @classmethod
    def build_model(cls, cfg: CfgNode) -> torch.nn.Module:
        """Build the model; compile its backbone if ``MODEL.COMPILE``."""
        model = super().build_model(cfg)
        if cfg.MODEL.COMPILE:
            model.backbone.compile()
        return model

    @classmethod
    def build_optimizer(
        cls, cfg: CfgNode, model: torch.nn.Module
    ) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(cfg, model)
        solver = cfg.SOLVER
        optimizer.param_groups = set_norm_decay(
            optimizer.param_groups,
            model,
            solver.WEIGHT_DECAY_NORM,
            solver.WEIGHT_DECAY_BIAS,
        )
        return optimizer

    @classmethod
    def build_lr_scheduler(
        cls, cfg: CfgNode, optimizer: torch.optim.Optimizer
    ) -> torch.optim.lr_scheduler.LRScheduler:
        # fvcore refuses a step at the end
        steps = [step for step in cfg.SOLVER.STEPS if step < cfg.SOLVER.MAX_ITER]
        cfg = changed_config(cfg, {"SOLVER.STEPS": tuple(steps)})
        try:
            return super().build_lr_scheduler(cfg, optimizer)
        except ValueError as error:  # which names no key
            raise ConfigError(
                f"SOLVER: {first_line(error)}. Fix: correct LR_SCHEDULER_NAME, WARMUP_METHOD or STEPS."
            ) from error

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        mapper = ImageNamingMapper(training_mapper(cfg), cfg.INPUT.PERCENTILES)
        return build_training_data(cfg, mapper)

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Any:
        mapper = ImageNamingMapper(DatasetMapper(cfg, False), cfg.INPUT.PERCENTILES)
        return build_detection_test_loader(cfg, dataset_name, mapper=mapper)

    @classmethod
    def build_evaluator(
        cls, cfg: CfgNode, dataset_name: str, output_folder: str | None = None
    ) -> DatasetEvaluator:
        """Build the evaluators of boxes, masks, keypoints, semantic and panoptic masks.

        Predictions are written to ``output_folder``, which is ``inference`` in ``OUTPUT_DIR`` if
        None.
        """
        problem = wrong_evaluator(cfg, dataset_name)
        if problem:
            raise ConfigError(problem)

        folder = output_folder or os.path.join(cfg.OUTPUT_DIR, "inference")
        architecture = cfg.MODEL.META_ARCHITECTURE
        if architecture == "SemanticSegmentor":
            return SemSegEvaluator(dataset_name, output_dir=folder)

        objects = build_coco_evaluator(
            dataset_name,
            folder,
            detections=cfg.TEST.DETECTIONS_PER_IMAGE,
            tasks=coco_tasks(cfg),
            kpt_oks_sigmas=cfg.TEST.KEYPOINT_OKS_SIGMAS,
        )
        if architecture != "PanopticFPN":
            return objects

        evaluators = [objects, SemSegEvaluator(dataset_name, output_dir=folder)]
        if importlib.util.find_spec("panopticapi"):
            evaluators.append(COCOPanopticEvaluator(dataset_name, folder))
        else:
            log.warning(
                "panopticapi is not installed: panoptic quality (PQ) is not computed, only its "
                "parts. Fix: pip install git+https://github.com/cocodataset/panopticapi.git"
            )
        return DatasetEvaluators(evaluators)

    def build_hooks(self) -> list[Any]:
        """Build the hooks: what a checkpoint holds comes before it, and the evaluation after it."""
        cfg = self.cfg
        period = cfg.TEST.EVAL_PERIOD
        built: list[Any] = [
            hooks.IterationTimer(),
            FirstEstimate(),
            hooks.LRScheduler(),
        ]
        if self._average:
            built.append(self._average)
        if cfg.TEST.PRECISE_BN.ENABLED and get_bn_modules(self.model):
            data = self.build_train_loader(
                changed_config(cfg, {"DATALOADER.NUM_WORKERS": 0})
            )
            images = cfg.TEST.PRECISE_BN.NUM_ITER
            built.append(hooks.PreciseBN(period, self.checkpointer.model, data, images))

        if comm.is_main_process():
            built.append(self._periodic_checkpointer())
        self._signals = SignalHook(cfg.SOLVER.CHECKPOINT_PERIOD, period)
        built.append(self._signals)

        evaluations = [hooks.EvalHook(period, self._evaluate)]
        if cfg.TEST.LOSS and period > 0:
            evaluations.append(hooks.EvalHook(period, self._validate))
        at_end = []
        if cfg.TEST.AUG.ENABLED:
            at_end.append(hooks.EvalHook(0, self._evaluate_with_TTA))
        built += evaluations
        if cfg.TEST.BEST:
            built.append(BestWeights(cfg, self.checkpointer, evaluations, at_end))
        built += at_end

        if comm.is_main_process():
            # Detectron2's 20, or before the next evaluation replaces the scores
            steps = min(20, period) if period > 0 else 20
            built.append(hooks.PeriodicWriter(self.build_writers(), period=steps))
        return built

    def _periodic_checkpointer(self) -> hooks.PeriodicCheckpointer:
        solver = self.cfg.SOLVER
        keep = solver.KEEP or None
        hook = hooks.PeriodicCheckpointer(
            self.checkpointer, solver.CHECKPOINT_PERIOD, max_to_keep=keep
        )
        if self._run.weights.resumed:  # those of the run before its stop
            earlier = Path(self.cfg.OUTPUT_DIR).glob(PERIODIC_CHECKPOINTS)
            hook.recent_checkpoints = sorted(map(str, earlier))
        return hook

    @property
    def iterations_per_epoch(self) -> float | None:
        """The iterations of a pass over the images; None with a loader that is not ours."""
        if not isinstance(self.data_loader, TrainingData):
            return None
        return self.data_loader.batches_per_epoch / self.cfg.SOLVER.ACCUMULATE

    def build_writers(self) -> list[EventWriter]:
        folder = self.cfg.OUTPUT_DIR
        metrics = Path(folder, METRICS)
        end_last_line(metrics)

        start = self._run.weights
        purge_step = None  # the first step of which TensorBoard drops earlier values
        if start.opened and start.resumed:
            # the evaluation at the end of a run has the step after its last iteration, and stays
            purge_step = 1 + _next_iteration(start.opened.metadata, start.address)

        printer = CommonMetricPrinter(self.max_iter)
        epoch = self.iterations_per_epoch
        if epoch:
            printer.logger = EpochLogger(printer.logger, self.max_iter, epoch)
        return [
            printer,
            JSONWriter(str(metrics)),
            TensorboardXWriter(folder, purge_step=purge_step),
        ]

    def state_dict(self) -> dict[str, Any]:
        state = TrainerBase.state_dict(self)
        # In v0.6 DefaultTrainer saves no optimizer, whose momentum a resumed run needs; HEAD saves
        # it by this name.
        state["_trainer"] = self._trainer.state_dict()
        state["seed"] = self.record.seed
        if hasattr(self._unwrapped, LOSS_NORMALIZER):
            state[LOSS_NORMALIZER] = float(getattr(self._unwrapped, LOSS_NORMALIZER))
        if isinstance(self.data_loader, TrainingData):
            state["data"] = self.data_loader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the training state, the seed and the position in the data."""
        try:
            TrainerBase.load_state_dict(self, state_dict)
            if "_trainer" in state_dict:
                self._trainer.load_state_dict(state_dict["_trainer"])
            else:
                log.warning(
                    "--resume: no optimizer state in the checkpoint: the momentum starts from zero"
                )

            if LOSS_NORMALIZER in state_dict:
                value = float(state_dict[LOSS_NORMALIZER])
                setattr(self._unwrapped, LOSS_NORMALIZER, value)
            self._load_seed(state_dict.get("seed"))
            self._load_data_position(state_dict)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                "--resume: the training state of the checkpoint does not fit this config: "
                f"{error}. SOLVER or MODEL.BACKBONE.FREEZE_AT differ, or other software wrote it. "
                f"Fix: {_WEIGHTS_ONLY}"
            ) from error

    def _load_seed(self, seed: int | None) -> None:
        if seed is None:
            log.warning(
                "--resume: the checkpoint has no seed: random numbers differ from an "
                "uninterrupted run's"
            )
        elif self._draws_seed:
            self.record.seed = int(seed)
        elif seed != self.cfg.SEED:
            log.warning(
                "--resume: SEED %s is not the checkpoint's %s: random numbers differ",
                self.cfg.SEED,
                seed,
            )

    def _load_data_position(self, state: dict[str, Any]) -> None:
        if not isinstance(self.data_loader, TrainingData):
            log.warning(
                "--resume: the training data start from the beginning: build_train_loader stores "
                "no position"
            )
            return
        self.data_loader.seed = self.record.seed
        self.data_loader.load_state_dict(
            state.get("data", {"batches": state["iteration"] + 1})
        )

    def resume_or_load(self, resume: bool | None = None) -> LoadReport:
        """Load the last checkpoint of ``OUTPUT_DIR`` with its training state, or ``MODEL.WEIGHTS``.

        ``resume`` is said here or when the trainer is built; said nowhere it is True, as in
        Detectron2. Without it, a checkpoint in ``OUTPUT_DIR`` is a ConfigError.
        """
        folder = self.cfg.OUTPUT_DIR
        if resume is None:
            resume = self._resume is not False
        start = self.start_weights or open_start_weights(
            self.cfg.MODEL.WEIGHTS, folder if resume else ""
        )
        self.start_weights = None  # its tensors would be kept during the training
        if start.resumed and not resume:
            raise ConfigError(earlier_run(folder))

        checkpoint = start.checkpoint()
        states: dict[str, Any] = {}
        if checkpoint and start.resumed:
            states = checkpoint.metadata
            self.start_iter = _next_iteration(states, start.address)
        elif checkpoint and comm.is_main_process():
            self.record.set_start_weights(checkpoint)
            self._warn_of_other_classes(checkpoint)

        report = load_checkpoint(
            self.checkpointer, checkpoint, allow_partial=self.allow_partial
        )
        if checkpoint and not start.resumed:
            measure_missing_statistics(self.checkpointer.model, self.cfg)
        if self._average:
            self._average.start()
        self.checkpointer.restore(states, self.checkpointer.checkpointables)

        log.info("norms: %s", norm_summary(self.checkpointer.model))
        log.info(str(report))
        log.info("seed: %d", self.record.seed)
        check_same_start(self.checkpointer.model, start, self.start_iter)
        return report

    def _warn_of_other_classes(self, checkpoint: Checkpoint) -> None:
        """Warn if the class outputs of other classes are loaded, because there are as many."""
        theirs = list(trained_classes(checkpoint).values())
        ours = [str(entry["name"]) for entry in self.record.classes]
        if len(theirs) == len(ours) and theirs != ours:
            log.warning(
                "MODEL.WEIGHTS: was trained for %s, this run has %s: its class outputs start from theirs, in "
                "this order. Fix: if classes are the same, give them the same names and order",
                summarize_names(theirs, 8),
                summarize_names(ours, 8),
            )

    def before_step(self) -> None:
        seed_generators(self.record.seed, STEP, comm.get_rank(), self.iter)
        super().before_step()

    def run_step(self) -> None:
        try:
            if self.cfg.SOLVER.ACCUMULATE == 1:
                super().run_step()
            else:
                self._trainer.iter = self.iter  # after v0.6 its metrics read it
                accumulated_step(self._trainer, self.cfg.SOLVER.ACCUMULATE)
        except (FloatingPointError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            raise NonFiniteError(
                f"iteration {self.iter}: {error}\nFix: lower SOLVER.BASE_LR, lengthen "
                "SOLVER.WARMUP_ITERS or set SOLVER.CLIP_GRADIENTS.ENABLED True; in the first "
                "iterations, also look for NaN in your own images."
            ) from error

    def train(self) -> dict | None:
        """Train to ``SOLVER.MAX_ITER``; return the results of the last evaluation, or None.

        A loss that is not finite is a NonFiniteError.
        """
        unloaded = self.start_weights
        if unloaded and unloaded.resumed:
            raise ConfigError(earlier_run(self.cfg.OUTPUT_DIR))
        if unloaded and unloaded.address:
            log.warning(
                "MODEL.WEIGHTS ('%s'): not loaded. Fix: call resume_or_load() first.",
                unloaded.address,
            )
        if self.start_iter > self.max_iter:
            raise ConfigError(
                f"SOLVER.MAX_ITER ({self.max_iter}): the run to resume has {self.start_iter} iterations. Fix: give a "
                f"higher value, or {self.start_iter}, which only evaluates."
            )
        if self.start_iter == self.max_iter:
            log.warning(
                "SOLVER.MAX_ITER (%d): the run has finished and is only evaluated. Fix: for more iterations, give "
                "more --epochs, or SOLVER.MAX_ITER and SOLVER.STEPS, in place of --minutes.",
                self.max_iter,
            )

        self._run.begin()
        try:
            with self._lock:
                super().train()
        except TrainingEnded as end:
            log.info("%s", end)
        return getattr(self, "_last_eval_results", None)

    def after_train(self) -> None:
        if self._signals.received:
            # Detectron2 would evaluate after the last step, also when the run was stopped there
            evaluation = (hooks.EvalHook, hooks.BestCheckpointer)
            self._hooks = [
                hook for hook in self._hooks if not isinstance(hook, evaluation)
            ]
        elif self.start_iter == self.max_iter:
            # Detectron2 counts one iteration more when a finished run is resumed
            self.iter = self.start_iter
        super().after_train()

    @classmethod
    def test(
        cls, cfg: CfgNode, model: torch.nn.Module, evaluators: Any = None
    ) -> OrderedDict:
        """Evaluate on ``DATASETS.TEST``; see Detectron2's ``DefaultTrainer.test``.

        All processes use the running statistics of the main one, which checkpoints contain.
        """
        if comm.get_world_size() > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
        return super().test(cfg, model, evaluators)

    @classmethod
    def test_with_TTA(cls, cfg: CfgNode, model: torch.nn.Module) -> OrderedDict:
        """Evaluate with test-time augmentation (``TEST.AUG``); result names end in ``_TTA``."""
        log.info("Running inference with test-time augmentation ...")
        return cls.test_as("TTA", cfg, GeneralizedRCNNWithTTA(cfg, model))

    @classmethod
    def test_as(cls, name: str, cfg: CfgNode, model: torch.nn.Module) -> OrderedDict:
        """Evaluate into the folder ``inference_NAME``; names of results end in ``_NAME``."""
        folder = os.path.join(cfg.OUTPUT_DIR, f"inference_{name}")
        evaluators = [
            cls.build_evaluator(cfg, dataset, folder) for dataset in cfg.DATASETS.TEST
        ]
        results = cls.test(cfg, model, evaluators)
        return OrderedDict((f"{key}_{name}", value) for key, value in results.items())

    def _evaluate(self) -> OrderedDict:
        if comm.is_main_process():
            # an evaluation of another checkpoint may have come between
            remove_files(stale_output(self.cfg.OUTPUT_DIR))
        self._last_eval_results = self.test(self.cfg, self.checkpointer.model)
        return self._last_eval_results

    def _validate(self) -> None:
        model = self.checkpointer.model
        trained = self._unwrapped
        if hasattr(trained, LOSS_NORMALIZER):  # which the averaged model lacks
            setattr(model, LOSS_NORMALIZER, getattr(trained, LOSS_NORMALIZER))

        losses = validation_losses(self.cfg, model, self.record.seed)
        if comm.is_main_process():
            self.storage.put_scalars(**losses, smoothing_hint=False)
            # Detectron2's log would show the median of the last 20 evaluations
            for name in losses:
                self.storage.histories().pop(name, None)

    def _evaluate_with_TTA(self) -> OrderedDict:
        return self.test_with_TTA(self.cfg, self.checkpointer.model)


def _next_iteration(states: dict[str, Any], address: str) -> int:
    """Return the iteration after the last one of a checkpoint."""
    try:
        return 1 + int(states["trainer"]["iteration"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--resume ('{address}'): no training state in it ({error!r}). Fix: {_WEIGHTS_ONLY}"
        ) from None
