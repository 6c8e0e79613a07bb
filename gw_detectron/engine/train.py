"""A run from flags to results: config, checks, output folder, model, training or evaluation."""

import argparse
import contextlib
import logging
import os
import shlex
from typing import NamedTuple

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, Metadata, MetadataCatalog
from detectron2.evaluation import verify_results
from detectron2.utils import comm
from detectron2.utils.collect_env import collect_env_info
from detectron2.utils.env import seed_all_rng
from detectron2.utils.file_io import PathManager
from detectron2.utils.logger import setup_logger

from ..atomic import AtomicPathManager
from ..checkpoint import StartWeights, load_model, open_start_weights
from ..checkpoint.opening import local_file
from ..config import changed_config, find_config_file, get_value, given_keys, read_config
from ..data import record_datasets, registered_datasets
from ..errors import ConfigError
from ..modeling.config_keys import object_count_keys
from ..norms.listing import norm_summary
from ..preflight import PreflightReport, preflight
from ..recipe import apply_recipe, recipe_lines
from .launch import in_all_processes
from .output_folder import clear_output, end_last_line, lock_output
from .run_datasets import use_datasets
from .trainer import Trainer, check_same_start

log = logging.getLogger(__name__)

#: main scores of boxes, masks and keypoints; of semantic; of panoptic segmentation
_MAIN_SCORES = ("AP", "mIoU", "PQ")


class Run(NamedTuple):
    """A checked run: its config, start weights, warnings, and the lock on its output folder."""

    cfg: CfgNode
    start: StartWeights
    warnings: list[str]
    lock: contextlib.ExitStack


def main(args: argparse.Namespace) -> dict | None:
    """Train, or evaluate with ``--eval-only``, in the current process.

    Args:
        args: the flags of :func:`gw_detectron.engine.get_parser`.

    Returns:
        The results of the last evaluation, on the main process.

    Raises:
        PreflightError: the run would fail later or learn nothing.
        WeightsError: the weights were trained with other norms, or lack a part of the backbone or, to be evaluated, of
            the heads.
        UserError: see :func:`prepare` and :meth:`Trainer.train`.
    """
    cfg, start, warnings, lock = prepare(args)
    with lock:
        if args.eval_only:
            results: dict | None = evaluate(cfg, start, allow_partial=args.allow_partial)
        else:
            trainer = Trainer(cfg)
            log.info("norms: %s", norm_summary(trainer.checkpointer.model))
            trainer.load_start_weights(start, allow_partial=args.allow_partial)
            log.info("seed: %d", trainer.record.seed)
            del start  # its tensors would be kept during the training
            if trainer.start_iter >= trainer.max_iter:
                warnings.append(
                    f"SOLVER.MAX_ITER ({trainer.max_iter}): the run has finished its iterations and is only evaluated. "
                    "Fix: raise it, and SOLVER.STEPS, to train longer."
                )
            for warning in warnings:  # again, below the model and the data, where they are seen
                log.warning(warning)
            results = trainer.train()
    _log_scores(cfg, results)
    return results


def prepare(args: argparse.Namespace) -> Run:
    """Read the config, open the weights, check the run, prepare its output.

    The output folder comes last: a refused run leaves the folder of an earlier run unchanged.

    Raises:
        PreflightError: the run would fail later or learn nothing.
        RunError: another training writes to the output folder.
        UserError: a flag, the config or the weights cannot be used.
        OSError: the output folder cannot be written.
    """
    with contextlib.ExitStack() as lock:
        with in_all_processes():
            cfg = run_config(args)
            reasons = use_recipe(cfg, args)
            trains = comm.is_main_process() and not args.eval_only
            exists = os.path.isdir(cfg.OUTPUT_DIR)
            if trains and exists:  # now: another training could write a newer checkpoint than is opened
                lock.enter_context(lock_output(cfg.OUTPUT_DIR))
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
            if not args.ignore_preflight:
                report.raise_errors()
            start.checkpoint()  # fetches remote weights, raises the error of opening it
            if args.eval_only and start.resumed:  # for the record beside the results
                cfg = changed_config(cfg, {"MODEL.WEIGHTS": start.address})
                cfg.freeze()
            if trains and not exists:
                lock.enter_context(lock_output(cfg.OUTPUT_DIR))
            clear_for(cfg, args)
        with in_all_processes():
            prepare_output(cfg, args)
        for line in recipe_lines(cfg, reasons):
            log.info(line)
        warnings = report.errors + report.warnings
        for warning in warnings:
            log.warning(warning)
        return Run(cfg, start, warnings, lock.pop_all())


def run_config(args: argparse.Namespace) -> CfgNode:
    """Read the config of a run without writing anything.

    ``--num-gpus 0`` sets ``MODEL.DEVICE cpu``. Datasets of the user are registered, see :func:`use_datasets`. The
    name of a config becomes the path of its file in ``args``.

    Returns:
        The frozen config.

    Raises:
        ConfigError: a flag, a key or a value is unknown or unusable.
        FileNotFoundError: the config file does not exist.
    """
    if args.overwrite and (args.resume or args.eval_only):
        other = "--resume, which continues" if args.resume else "--eval-only, which keeps"
        raise ConfigError(f"--overwrite: given together with {other} the earlier run. Fix: give one of the two.")
    if args.auto and not args.config_file:
        args.config_file = f"Own-Data/own_mask_rcnn_R_{50 if args.num_gpus else 18}_FPN_GW.yaml"
    args.config_file = find_config_file(args.config_file)
    cfg = read_config(args.config_file, args.opts or [])
    if args.auto and args.resume and os.path.isfile(record := os.path.join(cfg.OUTPUT_DIR, "config.yaml")):
        args.config_file, args.auto = record, False  # with the recipe of the run, also if its data have grown
        cfg = read_config(record, args.opts or [])
    if args.num_gpus == 0:
        cfg.MODEL.DEVICE = "cpu"
    use_datasets(cfg, args, _run_folder(cfg, args))
    cfg.freeze()
    return cfg


def use_recipe(cfg: CfgNode, args: argparse.Namespace) -> dict[str, str]:
    """Set what the training data decide, with ``--auto``, or the schedule alone, with ``--epochs``; return the reasons.

    Keys of the command line and of the user's own yaml keep their values.

    Raises:
        UserError: see :func:`apply_recipe`.
    """
    if args.eval_only or not (args.auto or args.epochs is not None):
        return {}
    files = {name: MetadataCatalog.get(name) for name in cfg.DATASETS.TRAIN if name in DatasetCatalog}
    if unknown := [name for name in cfg.DATASETS.TRAIN if not files.get(name, Metadata()).get("json_file")]:
        raise ConfigError(f"--auto: no COCO file of {', '.join(unknown)} is known. Fix: give --train-json.")
    cfg.defrost()
    reasons = apply_recipe(
        cfg,
        {each.json_file: each.image_root for each in files.values()},
        epochs=args.epochs,
        given=given_keys(args.config_file, args.opts or []),
        schedule_only=not args.auto,
    )
    cfg.freeze()
    return reasons


def clear_for(cfg: CfgNode, args: argparse.Namespace) -> None:
    """Delete the files of an earlier run that this one replaces or would append to.

    Raises:
        ConfigError: this run reads a file that ``--overwrite`` would delete.
    """
    if not comm.is_main_process():
        return
    needed = (args.config_file, local_file(cfg.MODEL.WEIGHTS))
    starts = not (args.resume or args.eval_only)
    clear_output(cfg.OUTPUT_DIR, metrics=starts, everything=args.overwrite, needed=needed)
    if args.resume and not args.eval_only:
        end_last_line(cfg.OUTPUT_DIR)


def prepare_output(cfg: CfgNode, args: argparse.Namespace) -> None:
    """Set up logging and seed, as Detectron2's ``default_setup``; write ``config.yaml`` and ``datasets.yaml``."""
    folder, rank = _run_folder(cfg, args), comm.get_rank()
    PathManager.mkdirs(folder)
    for name in ("fvcore", "detectron2", "gw_detectron"):
        setup_logger(folder, distributed_rank=rank, name=name)
    log.info("Process %d of %d. Environment:\n%s", rank, comm.get_world_size(), collect_env_info())
    log.info("Command line arguments: %s", args)
    datasets = registered_datasets(cfg.DATASETS.TRAIN, cfg.DATASETS.TEST)
    if comm.is_main_process():
        with AtomicPathManager(PathManager).open(os.path.join(folder, "config.yaml"), "w") as file:
            file.write(cfg.dump())
        record_datasets(datasets, folder, cfg.OUTPUT_DIR)
    for name, dataset in {**datasets.train, **datasets.val}.items():
        counts = ", ".join(f"{key} {get_value(cfg, key)}" for key in object_count_keys(cfg))
        log.info("dataset %s: '%s', images in '%s'; %s", name, dataset.json, dataset.images, counts)
    seed_all_rng(None if cfg.SEED < 0 else cfg.SEED + rank)
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK and not (args.eval_only or args.deterministic)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
        torch.use_deterministic_algorithms(True)


def evaluate(cfg: CfgNode, start: StartWeights, *, allow_partial: bool = False) -> dict:
    """Build the model, load its weights and evaluate it on ``DATASETS.TEST``.

    Raises:
        WeightsError: the weights lack a part of the detector, or have it with other shapes.
    """
    model = load_model(cfg, checkpoint=start.checkpoint(), device=cfg.MODEL.DEVICE, allow_partial=allow_partial)
    log.info("norms: %s", norm_summary(model))
    if not allow_partial:
        check_same_start(model, start)
    if cfg.MODEL.COMPILE:
        model.get_submodule("backbone").compile()
    results = Trainer.test(cfg, model)
    if cfg.TEST.AUG.ENABLED:
        results.update(Trainer.test_with_TTA(cfg, model))
    if comm.is_main_process():
        verify_results(cfg, results)
    return results


def _run_folder(cfg: CfgNode, args: argparse.Namespace) -> str:
    """Return the folder that the run writes to.

    Evaluation writes to ``OUTPUT_DIR/inference`` and leaves the training's log.txt and config.yaml untouched.
    """
    return os.path.join(cfg.OUTPUT_DIR, "inference") if args.eval_only else cfg.OUTPUT_DIR


def _log_scores(cfg: CfgNode, results: dict | None) -> None:
    """End the log with the main score of each task, and what to do next."""
    names, results = cfg.DATASETS.TEST, results or {}
    for name, scores in ({names[0]: results} if len(names) == 1 else results).items():
        found = [
            f"{task} {key} {value[key]:.1f}" for task, value in scores.items() for key in _MAIN_SCORES if key in value
        ]
        if found:
            log.info("%s on %s. Next: gw-detectron report %s", ", ".join(found), name, shlex.quote(cfg.OUTPUT_DIR))
