"""A run on one page: flags, config, start weights, preflight, model, training, evaluation."""

import argparse
import logging

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.evaluation import verify_results
from detectron2.utils import comm

from ..analysis import WhiteningWatch
from ..checkpoint import PartialLoadError, StartWeights, load_checkpoint, open_start_weights
from ..modeling.norm import norm_summary
from ..preflight import preflight
from .flags import prepare_output, run_config
from .launch import in_all_processes
from .trainer import Trainer

log = logging.getLogger(__name__)


def main(args: argparse.Namespace) -> dict | None:
    """Train, or evaluate with ``--eval-only``, in the current process.

    Args:
        args: the flags of :func:`gw_detectron.engine.get_parser`.

    Returns:
        The results of the last evaluation, on the main process.

    Raises:
        PreflightError: the run would fail later or learn nothing.
        PartialLoadError: the weights lack a part of the backbone, or for ``--eval-only`` of the heads.
        NormMismatchError: the weights were trained with other norms.
        UserError: see :func:`prepare` and :meth:`Trainer.train`.
    """
    cfg, start = prepare(args)
    if args.eval_only:
        return evaluate(cfg, start, allow_partial=args.allow_partial)
    trainer = Trainer(cfg)
    log.info("norms: %s", norm_summary(trainer.checkpointer.model))
    if args.whitening_stats_period:
        trainer.register_hooks([WhiteningWatch(args.whitening_stats_period)])
    trainer.load_start_weights(start, allow_partial=args.allow_partial)
    del start  # its tensors would be kept during the training
    return trainer.train()


def prepare(args: argparse.Namespace) -> tuple[CfgNode, StartWeights]:
    """Read the config, open the start weights, check the run, and only then prepare its output folder.

    A refused run leaves the output folder of an earlier run unchanged.

    Raises:
        PreflightError: the run would fail later or learn nothing.
        UserError: a flag, the config or the weights cannot be used, or the output folder cannot be written.
    """

    def check() -> tuple[CfgNode, StartWeights, list[str]]:
        cfg = run_config(args)
        start = open_start_weights(cfg, resume=args.resume)
        warnings = []
        if comm.is_main_process():
            options = {"eval_only": args.eval_only, "resume": args.resume, "ignore": args.ignore_preflight}
            warnings = preflight(cfg, start, **options)
        start.checkpoint()  # raises the error of opening it
        return cfg, start, warnings

    cfg, start, warnings = in_all_processes(check)
    in_all_processes(lambda: prepare_output(cfg, args))
    if args.eval_only and args.whitening_stats_period:
        warnings.append("--whitening-stats-period has no effect with --eval-only: it observes the layers in training")
    for warning in warnings:
        log.warning(warning)
    return cfg, start


def evaluate(cfg: CfgNode, start: StartWeights, *, allow_partial: bool = False) -> dict:
    """Build the model, load its weights and evaluate it on ``DATASETS.TEST``.

    Raises:
        PartialLoadError: the weights lack a part of the detector.
    """
    model = Trainer.build_model(cfg)
    log.info("norms: %s", norm_summary(model))
    report = load_checkpoint(DetectionCheckpointer(model), start.checkpoint(), allow_partial=allow_partial)
    log.info(str(report))
    if report.new and not allow_partial:
        raise PartialLoadError(
            f"MODEL.WEIGHTS ('{start.address}'): not a whole detector: {report}. Fix: give the weights of a trained "
            "detector, or accept random values with --allow-partial."
        )
    results = Trainer.test(cfg, model)
    if cfg.TEST.AUG.ENABLED:
        results.update(Trainer.test_with_TTA(cfg, model))
    if comm.is_main_process():
        verify_results(cfg, results)
    return results
