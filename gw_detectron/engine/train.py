"""Run training or evaluation from command-line arguments.

Steps: config, start weights, preflight, output folder, model, training or evaluation.
"""

import argparse
import contextlib
import logging
import os
import shlex
from collections.abc import Iterator
from datetime import timedelta

import torch
from detectron2.config import CfgNode
from detectron2.engine import default_setup, defaults
from detectron2.evaluation import verify_results
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger

from ..atomic import AtomicPathManager
from ..checkpoint import StartWeights, load_checkpoint, open_start_weights
from ..checkpoint.loading import check_shapes
from ..checkpoint.opening import local_file
from ..config import changed_config, find_config_file, get_value, read_config
from ..data import record_datasets, registered_datasets
from ..errors import ConfigError, FileAccessError, PartialLoadError, UserError
from ..modeling.class_counts import object_count_keys
from ..norms.norm_listing import norm_summary
from ..preflight import PreflightReport, preflight
from .evaluators import MAIN_SCORES
from .launch import in_all_processes
from .output_lock import lock_output, output_unlocked_at_end
from .run_datasets import use_datasets
from .run_files import end_last_line, remove_converted_annotations, remove_earlier_run, remove_evaluation
from .seeding import use_deterministic_algorithms
from .trainer import Trainer, check_same_start
from .whitening_stats import WhiteningStatsHook

log = logging.getLogger(__name__)


@output_unlocked_at_end()
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
    cfg, start, warnings = prepare(args)
    if args.eval_only:
        results = evaluate(cfg, start, allow_partial=args.allow_partial)
        _log_scores(cfg, results)
        return results
    trainer = Trainer(cfg)
    log.info("norms: %s", norm_summary(trainer.checkpointer.model))
    if args.whitening_stats_period:
        trainer.register_hooks([WhiteningStatsHook(args.whitening_stats_period)])
    trainer.interruption.timeout = timedelta(seconds=args.dist_timeout)
    trainer.load_start_weights(start, allow_partial=args.allow_partial)
    log.info("seed: %d", trainer.record.seed)
    del start  # its tensors would be kept during the training
    if trainer.start_iter >= trainer.max_iter:
        warnings.append(
            f"SOLVER.MAX_ITER ({trainer.max_iter}): the run has finished its iterations and is only evaluated. Fix: "
            "raise it, and SOLVER.STEPS, to train longer."
        )
    for warning in warnings:  # again, below the model and the data, where they are seen
        log.warning(warning)
    trained = trainer.train()
    _log_scores(cfg, trained)
    return trained


def _log_scores(cfg: CfgNode, results: dict | None) -> None:
    """End the log with the main score of each task, and what to do next."""
    names, results = cfg.DATASETS.TEST, results or {}
    for name, scores in ({names[0]: results} if len(names) == 1 else results).items():
        found = [
            f"{task} {key} {value[key]:.1f}" for task, value in scores.items() for key in MAIN_SCORES if key in value
        ]
        if found:
            log.info("%s on %s. Next: gw-detectron report %s", ", ".join(found), name, shlex.quote(cfg.OUTPUT_DIR))


def prepare(args: argparse.Namespace) -> tuple[CfgNode, StartWeights, list[str]]:
    """Read the config, open the weights, check the run, prepare its output.

    The output folder comes last: a refused run leaves the folder of an earlier run unchanged.

    Returns:
        The config, the weights and the warnings, which are logged.

    Raises:
        PreflightError: the run would fail later or learn nothing.
        UserError: a flag, the config or the weights cannot be used, or the output folder cannot be written.
    """
    with in_all_processes():
        cfg = run_config(args)
        if args.resume and not args.eval_only and comm.is_main_process() and os.path.isdir(cfg.OUTPUT_DIR):
            with _access_errors_explained(cfg):
                lock_output(cfg.OUTPUT_DIR)  # else another training could write a newer checkpoint than the one opened
    with in_all_processes():
        start = open_start_weights(cfg, resume=args.resume)
        report = PreflightReport()
        if comm.is_main_process():
            report = preflight(
                cfg,
                start,
                eval_only=args.eval_only,
                resume=args.resume,
                overwrite=args.overwrite,
                allow_partial=args.allow_partial,
                config_file=args.config_file,
            )
            if args.num_gpus and cfg.MODEL.DEVICE == "cpu" and torch.cuda.is_available():
                report.warnings.append(
                    "MODEL.DEVICE ('cpu'): the run does not use the GPU of this machine. Fix: add MODEL.DEVICE cuda, "
                    "or give --num-gpus 0."
                )
        if not args.ignore_preflight:
            report.raise_errors()
    with in_all_processes():
        start.checkpoint()  # fetches remote weights, raises the error of opening it
    if args.eval_only and start.resumed:  # for the record beside the results
        cfg = changed_config(cfg, {"MODEL.WEIGHTS": start.address})
        cfg.freeze()
    with in_all_processes():
        clear_output(cfg, args)
    with in_all_processes():
        prepare_output(cfg, args)
    warnings = report.errors + report.warnings
    for warning in warnings:
        log.warning(warning)
    if args.eval_only and args.whitening_stats_period:
        log.warning("--whitening-stats-period has no effect with --eval-only: it observes the layers in training")
    return cfg, start, warnings


def evaluate(cfg: CfgNode, start: StartWeights, *, allow_partial: bool = False) -> dict:
    """Build the model, load its weights and evaluate it on ``DATASETS.TEST``.

    Raises:
        PartialLoadError: the weights lack a part of the detector, or have it with other shapes.
    """
    model = Trainer.build_model(cfg)
    log.info("norms: %s", norm_summary(model))
    checkpoint = start.checkpoint()
    report = load_checkpoint(model, checkpoint, allow_partial=allow_partial)
    log.info(str(report))
    if report.new and not allow_partial:
        if checkpoint is not None:
            check_shapes(model, checkpoint, report.new)
        raise PartialLoadError(
            f"MODEL.WEIGHTS ('{start.address}'): not a whole detector: {report}. Fix: give the weights of a trained "
            "detector, or accept random values with --allow-partial."
        )
    if not report.new:
        check_same_start(model, start)
    results = Trainer.test(cfg, model)
    if cfg.TEST.AUG.ENABLED:
        results.update(Trainer.test_with_TTA(cfg, model))
    if comm.is_main_process():
        verify_results(cfg, results)
    return results


def run_config(args: argparse.Namespace) -> CfgNode:
    """Read the config of a run without writing anything.

    ``--num-gpus 0`` sets ``MODEL.DEVICE cpu``. Datasets of the user are registered, see :func:`use_datasets`. The
    name of a config becomes the path of its file in ``args``.

    Returns:
        The frozen config.

    Raises:
        ConfigError: a flag, a key or a value is unknown or unusable.
        MissingFileError: the config file does not exist.
    """
    if args.whitening_stats_period < 0:
        raise ConfigError(
            f"--whitening-stats-period {args.whitening_stats_period}: negative. Fix: give 1 or more iterations, or 0 "
            "to log nothing."
        )
    if args.overwrite and (args.resume or args.eval_only):
        other = "--resume, which continues" if args.resume else "--eval-only, which keeps"
        raise ConfigError(f"--overwrite: given together with {other} the earlier run. Fix: give one of the two.")
    args.config_file = find_config_file(args.config_file)  # Detectron2 reads it, too
    cfg = read_config(args.config_file, args.opts or [])
    if args.num_gpus == 0:
        cfg.MODEL.DEVICE = "cpu"
    if "?" in cfg.OUTPUT_DIR:
        raise ConfigError(
            f"OUTPUT_DIR ('{cfg.OUTPUT_DIR}'): contains '?', which begins options in the address of a checkpoint. Fix: "
            "give another folder."
        )
    use_datasets(cfg, args, run_folder(cfg, args))
    cfg.freeze()
    return cfg


def run_folder(cfg: CfgNode, args: argparse.Namespace) -> str:
    """Return the folder that the run writes to.

    It is ``OUTPUT_DIR``; for ``--eval-only`` its subfolder ``inference``, so the files of the training remain.
    """
    return os.path.join(cfg.OUTPUT_DIR, "inference") if args.eval_only else cfg.OUTPUT_DIR


def clear_output(cfg: CfgNode, args: argparse.Namespace) -> None:
    """Lock the output folder; remove the files of an earlier run that this one replaces or would append to.

    Raises:
        FileAccessError: the folder cannot be written.
        OutputInUseError: another training writes there.
        ConfigError: this run reads a file that ``--overwrite`` would remove.
    """
    if not comm.is_main_process():
        return
    needed = (args.config_file, local_file(cfg.MODEL.WEIGHTS))
    with _access_errors_explained(cfg):
        if not args.eval_only:
            lock_output(cfg.OUTPUT_DIR)
            if args.resume:
                end_last_line(cfg.OUTPUT_DIR)
            else:
                remove_earlier_run(cfg.OUTPUT_DIR, everything=args.overwrite, needed=needed)
        remove_evaluation(cfg.OUTPUT_DIR, needed=needed, config=not args.eval_only)
        remove_converted_annotations(cfg.OUTPUT_DIR)


def prepare_output(cfg: CfgNode, args: argparse.Namespace) -> None:
    """Set up logging, the seed and the output folder.

    As in Detectron2, ``config.yaml`` and ``log.txt`` are written there, and ``datasets.yaml`` with the user's datasets.

    Raises:
        FileAccessError: the folder cannot be written.
    """
    local = changed_config(cfg, {"OUTPUT_DIR": run_folder(cfg, args)})
    local.freeze()
    datasets = registered_datasets(cfg.DATASETS.TRAIN, cfg.DATASETS.TEST)
    with _access_errors_explained(cfg), _config_written_atomically() as path_manager:
        default_setup(local, args)
        if args.eval_only and comm.is_main_process():
            with path_manager.open(os.path.join(local.OUTPUT_DIR, "config.yaml"), "w") as file:
                file.write(cfg.dump())
        if comm.is_main_process():
            record_datasets(datasets, local.OUTPUT_DIR, cfg.OUTPUT_DIR)
    setup_logger(local.OUTPUT_DIR, distributed_rank=comm.get_rank(), name="gw_detectron")
    for name, dataset in {**datasets.train, **datasets.val}.items():
        counts = ", ".join(f"{key} {get_value(cfg, key)}" for key in object_count_keys(cfg))
        log.info("dataset %s: '%s', images in '%s'; %s", name, dataset.json, dataset.images, counts)
    if args.deterministic:
        use_deterministic_algorithms()


@contextlib.contextmanager
def _access_errors_explained(cfg: CfgNode) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise FileAccessError(
            f"OUTPUT_DIR ('{cfg.OUTPUT_DIR}'): cannot be written: {error}. Fix: give another folder."
        ) from error


@contextlib.contextmanager
def _config_written_atomically() -> Iterator[AtomicPathManager]:
    """Let Detectron2's ``default_setup`` replace ``config.yaml`` as a whole; it would rewrite the file in place."""
    stock = defaults.PathManager
    defaults.PathManager = atomic = AtomicPathManager(stock)
    try:
        yield atomic
    finally:
        defaults.PathManager = stock


def setup(args: argparse.Namespace) -> CfgNode:
    """Read the config and prepare the output folder, without checks."""
    cfg = run_config(args)
    clear_output(cfg, args)
    prepare_output(cfg, args)
    return cfg
