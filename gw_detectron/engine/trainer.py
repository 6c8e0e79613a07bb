"""The Trainer, which is Detectron2's with COCO evaluation, and the run of ``tools/train_net.py``."""

import argparse
import importlib.util
import logging
import os
import weakref
from collections import OrderedDict
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.data import (
    DatasetMapper,
    MetadataCatalog,
    build_detection_test_loader,
    build_detection_train_loader,
)
from detectron2.engine import (
    AMPTrainer,
    DefaultTrainer,
    SimpleTrainer,
    create_ddp_model,
    hooks,
)
from detectron2.evaluation import COCOEvaluator, verify_results
from detectron2.modeling import GeneralizedRCNNWithTTA
from detectron2.utils import comm
from detectron2.utils.events import CommonMetricPrinter, EventWriter, JSONWriter
from detectron2.utils.file_io import PathManager

from ..analysis import WhiteningStatsHook
from ..checkpoint import NORMS, NoteOfNorms, PartialLoadError, strict_backbone_load
from ..modeling.norm import norm_summary
from ..preflight import COCO_EVALUATORS, preflight
from .hooks import LossGuard, NamingMapper, NonFiniteError, WholeFileWriter, remove_unfinished
from .launch import in_all_processes, is_for_the_user
from .optimizer import build_optimizer
from .setup import config_of_run, get_parser, prepare_run, setup

__all__ = ["Trainer", "checked_setup", "fast_coco_evaluation_is_built", "get_parser", "main", "setup"]


class Trainer(DefaultTrainer):
    """Detectron2's default trainer with COCO evaluation of boxes and masks.

    Beyond it: errors in data name the image, a loss that is not finite is explained, checkpoints are written whole or
    not at all, and several processes also work on the CPU.

    Args:
        cfg: Detectron2's config with this package's keys.

    Raises:
        ValueError: a component of the config is unknown or does not fit.
    """

    def __init__(self, cfg: CfgNode) -> None:
        if comm.get_world_size() > 1 and cfg.MODEL.DEVICE == "cpu":
            self._init_for_cpu_processes(cfg)
        else:
            super().__init__(cfg)
        self.checkpointer.path_manager = WholeFileWriter(PathManager)
        self.checkpointer.add_checkpointable(NORMS, NoteOfNorms(self.checkpointer.model))
        self._loss_guard = LossGuard(self.checkpointer.model)

    def _init_for_cpu_processes(self, cfg: CfgNode) -> None:
        # DefaultTrainer.__init__ hands a GPU number to DistributedDataParallel, which refuses it for a model on the
        # CPU, and has no way to leave it out: these are its steps without that number.
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
        # Up to v0.6 DefaultTrainer forgets the optimizer, whose momentum a resumed run needs. This is what later
        # versions write, so that their checkpoints and these are alike.
        state = super(DefaultTrainer, self).state_dict()
        state["_trainer"] = self._trainer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super(DefaultTrainer, self).load_state_dict(state_dict)
        if "_trainer" in state_dict:
            try:
                self._trainer.load_state_dict(state_dict["_trainer"])
            except ValueError as error:
                raise ValueError(
                    f"the optimizer of the checkpoint is not that of this config: {error}. It was written with another "
                    "weight decay, learning rate of biases or frozen layers (SOLVER, MODEL.BACKBONE.FREEZE_AT) or by "
                    "other software. To start from its weights alone, leave out --resume and set MODEL.WEIGHTS to it"
                ) from error
        else:
            log = logging.getLogger(__name__)
            log.warning("this checkpoint has no state of the optimizer: its momentum starts from zero")

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: torch.nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(cfg, model)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        return build_detection_train_loader(cfg, mapper=NamingMapper(DatasetMapper(cfg, True)))

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Any:
        return build_detection_test_loader(cfg, dataset_name, mapper=NamingMapper(DatasetMapper(cfg, False)))

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str, output_folder: str | None = None) -> COCOEvaluator:
        """Returns the COCO evaluator of a data set.

        Args:
            cfg: the config; it tells whether there are masks and key points.
            dataset_name: a registered data set.
            output_folder: where predictions are stored; ``inference`` below the output folder if None.

        Raises:
            ValueError: the data set is not evaluated by the COCO rules.
        """
        kind = MetadataCatalog.get(dataset_name).get("evaluator_type")
        if kind not in COCO_EVALUATORS:
            raise ValueError(
                f"data set {dataset_name} has evaluator_type {kind!r}; this trainer evaluates {list(COCO_EVALUATORS)}. "
                "Set it in the MetadataCatalog if the data set has COCO annotations, or override build_evaluator"
            )
        tasks = ["bbox"]
        if cfg.MODEL.MASK_ON:
            tasks.append("segm")
        if cfg.MODEL.KEYPOINT_ON:
            tasks.append("keypoints")
        return COCOEvaluator(
            dataset_name,
            tasks=tuple(tasks),
            output_dir=output_folder or os.path.join(cfg.OUTPUT_DIR, "inference"),
            use_fast_impl=fast_coco_evaluation_is_built(),
            kpt_oks_sigmas=cfg.TEST.KEYPOINT_OKS_SIGMAS,
        )

    @classmethod
    def test_with_TTA(cls, cfg: CfgNode, model: torch.nn.Module) -> OrderedDict:
        """Evaluates with test-time augmentation, ``TEST.AUG``; the keys of the results end in ``_TTA``."""
        logging.getLogger(__name__).info("Running inference with test-time augmentation ...")
        folder = os.path.join(cfg.OUTPUT_DIR, "inference_TTA")
        evaluators = [cls.build_evaluator(cfg, name, folder) for name in cfg.DATASETS.TEST]
        results = cls.test(cfg, GeneralizedRCNNWithTTA(cfg, model), evaluators)
        return OrderedDict((f"{key}_TTA", value) for key, value in results.items())

    def build_hooks(self) -> list[Any]:
        built = super().build_hooks()
        if self.cfg.TEST.AUG.ENABLED:
            # before the writers, which close after the training and would miss the results
            place = next((i for i, hook in enumerate(built) if isinstance(hook, hooks.PeriodicWriter)), len(built))
            built.insert(place, hooks.EvalHook(0, lambda: self.test_with_TTA(self.cfg, self.model)))
        return built

    def build_writers(self) -> list[EventWriter]:
        if importlib.util.find_spec("tensorboard") is None:  # Detectron2 would stop without it
            log = logging.getLogger(__name__)
            log.warning("tensorboard is not installed: curves are written to metrics.json only")
            return [
                CommonMetricPrinter(self.max_iter),
                JSONWriter(os.path.join(self.cfg.OUTPUT_DIR, "metrics.json")),
            ]
        return super().build_writers()

    def run_step(self) -> None:
        try:
            super().run_step()
        except (FloatingPointError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
            cause = self._loss_guard.explain(autocast=isinstance(self._trainer, AMPTrainer))
            raise NonFiniteError(f"iteration {self.iter}: {error}\n{cause}") from error

    def train(self) -> dict | None:
        """Trains to ``SOLVER.MAX_ITER`` and returns the results of the last evaluation, if there was one.

        Raises:
            NonFiniteError: the loss became infinite or NaN.
            CheckpointWriteError: a checkpoint could not be written.
            DataError: an image or its record cannot be used.
        """
        if comm.is_main_process():
            remove_unfinished(self.cfg.OUTPUT_DIR)
        log = logging.getLogger("detectron2.engine.train_loop")
        log.addFilter(_without_traceback_for_users)
        try:
            super().train()
        finally:
            log.removeFilter(_without_traceback_for_users)
        return getattr(self, "_last_eval_results", None)


def _without_traceback_for_users(record: logging.LogRecord) -> bool:
    """Lets Detectron2's log record of an exception pass, without the traceback if the message says all."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and is_for_the_user(error):
        record.exc_info = None
        record.msg = f"{record.msg} {error}"
    return True


def fast_coco_evaluation_is_built() -> bool:
    """Whether the installed Detectron2 has its compiled COCO evaluation."""
    try:
        from detectron2 import _C

        return hasattr(_C, "COCOevalEvaluateImages")
    except ImportError:  # not compiled, or a pure Python build, which says so when the attribute is asked for
        return False


def checked_setup(args: argparse.Namespace) -> CfgNode:
    """Reads the config of a run, checks the run, and only then prepares its output folder.

    A refused run so leaves the folder of an earlier one as it was.

    Args:
        args: what :func:`get_parser` parses.

    Returns:
        The frozen config.

    Raises:
        PreflightError: the config, the data or the machine would let the run fail or learn nothing.
        ValueError: a flag is out of its range.
        Other errors: see :func:`gw_detectron.cli.config_of_run` and :func:`gw_detectron.cli.prepare_run`.
    """
    in_all_processes(lambda: _check_flags(args))
    cfg = in_all_processes(lambda: config_of_run(args))
    # the main process checks for all
    warnings = in_all_processes(
        lambda: (
            preflight(cfg, eval_only=args.eval_only, resume=args.resume, ignore=args.ignore_preflight)
            if comm.is_main_process()
            else []
        )
    )
    in_all_processes(lambda: prepare_run(cfg, args))
    for warning in warnings:
        logging.getLogger(__name__).warning(warning)
    return cfg


def _check_flags(args: argparse.Namespace) -> None:
    if args.whitening_stats_period < 0:
        raise ValueError(
            f"--whitening-stats-period {args.whitening_stats_period}: give the iterations from one look to the next, "
            "1 or more, or 0 to log nothing"
        )


def main(args: argparse.Namespace) -> dict | None:
    """Trains, or evaluates with ``--eval-only``, in the current process.

    Args:
        args: what :func:`get_parser` parses.

    Returns:
        The last evaluation's results, on the main process.

    Raises:
        PreflightError: the config, the data or the machine would let the run fail or learn nothing.
        PartialLoadError: weights left a part of the backbone, or in an evaluation of the heads, at random values.
        NormMismatchError: weights were trained with other norms.
        Other errors: see :func:`setup` and :meth:`Trainer.train`.
    """
    cfg = checked_setup(args)
    log = logging.getLogger(__name__)
    if args.eval_only:
        if args.whitening_stats_period:
            log.warning("--whitening-stats-period has no effect with --eval-only: it looks at the layers in training")
        model = Trainer.build_model(cfg)
        log.info("norms: %s", norm_summary(model))
        checkpointer = DetectionCheckpointer(model, cfg.OUTPUT_DIR)
        start = _start(checkpointer, cfg, args.resume)
        with strict_backbone_load(model, start, allow_partial=args.allow_partial) as report:
            checkpointer.resume_or_load(cfg.MODEL.WEIGHTS, resume=args.resume)
        log.info(str(report))
        if report.new and not args.allow_partial:
            raise PartialLoadError(f"{report}. An evaluation needs the weights of a whole detector")
        return _evaluate(cfg, model)
    trainer = Trainer(cfg)
    log.info("norms: %s", norm_summary(trainer.checkpointer.model))
    if args.whitening_stats_period:
        trainer.register_hooks([WhiteningStatsHook(args.whitening_stats_period)])
    start = _start(trainer.checkpointer, cfg, args.resume)
    with strict_backbone_load(trainer.model, start, allow_partial=args.allow_partial) as report:
        trainer.resume_or_load(resume=args.resume)
    log.info(str(report))
    return trainer.train()


def _start(checkpointer: DetectionCheckpointer, cfg: CfgNode, resume: bool) -> str:
    """The file or address that ``resume_or_load`` is going to load."""
    resumed = resume and checkpointer.has_checkpoint()
    return checkpointer.get_checkpoint_file() if resumed else cfg.MODEL.WEIGHTS


def _evaluate(cfg: CfgNode, model: torch.nn.Module) -> dict:
    results = Trainer.test(cfg, model)
    if cfg.TEST.AUG.ENABLED:
        results.update(Trainer.test_with_TTA(cfg, model))
    if comm.is_main_process():
        verify_results(cfg, results)
    return results
