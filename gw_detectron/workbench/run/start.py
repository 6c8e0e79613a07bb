"""Start a run: lock its folder, open its weights, check it, and only then write to the folder."""

import contextlib
import hashlib
import logging
import os
import shlex
import sys
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from detectron2.utils.collect_env import collect_env_info
from detectron2.utils.env import seed_all_rng

from ...atomic import atomic_write
from ...config import changed_config
from ...errors import ConfigError, PreflightReport
from ...weights import LazyCheckpoint, open_start_weights
from ...weights.opening import local_file
from ..dataset.datasets_yaml import record_datasets
from ..dataset.source import registered_datasets
from .config_checks import preflight
from .folder import check_output, clear_output, lock_output
from .logs import log_to
from .processes import in_all_processes

log = logging.getLogger(__name__)


def start_run(
    cfg: CfgNode,
    *,
    eval_only: bool = False,
    resume: bool | None = False,
    overwrite: bool = False,
    allow_partial: bool = False,
    ignore_preflight: bool = False,
    own_evaluator: bool = False,
) -> tuple[LazyCheckpoint, contextlib.ExitStack, list[Path]]:
    """Check a run, and write its log, ``config.yaml`` and ``datasets.yaml``.

    If it refuses the run, the folder of an earlier run is unchanged. An evaluation writes to its folder ``inference``,
    without a lock. Arguments and errors as for :class:`.trainer.Trainer`. Returns the weights, the lock and, with
    ``overwrite``, what is to be removed when the training starts.
    """
    is_main, folder, earlier = comm.is_main_process(), cfg.OUTPUT_DIR, list[Path]()
    with contextlib.ExitStack() as lock:
        with in_all_processes():
            may_resume = resume is None and not overwrite
            locks, exists = is_main and not eval_only, os.path.isdir(folder)
            if (
                locks and exists
            ):  # now: another training could write a newer checkpoint than is opened
                lock.enter_context(lock_output(folder))
            weights = open_start_weights(
                cfg.MODEL.WEIGHTS, folder if resume or may_resume else ""
            )
            report = PreflightReport()
            if is_main:
                keeps = not (eval_only or overwrite)
                check_output(
                    folder, weights, report, resume=resume, keeps=keeps, best=cfg.TEST.BEST
                )
                options = {"allow_partial": allow_partial, "own_evaluator": own_evaluator}
                preflight(cfg, weights, report, eval_only=eval_only, **options)
            if not ignore_preflight:
                report.raise_errors()
            weights.checkpoint()  # fetches remote weights, raises the error of opening it
            if locks and not exists:
                lock.enter_context(lock_output(folder))
            if is_main:
                new = not (eval_only or weights.resumed)
                earlier = clear_output(
                    folder,
                    metrics=new,
                    everything=overwrite,
                    needed=local_file(weights.address),
                )
        with in_all_processes():
            _write_record(cfg, weights, eval_only=eval_only)
        for warning in report.errors + report.warnings:
            log.warning(warning)
        return weights, lock.pop_all(), earlier


def _write_record(cfg: CfgNode, weights: LazyCheckpoint, *, eval_only: bool) -> None:
    """Set up logging, as Detectron2's ``default_setup``; write ``config.yaml`` and ``datasets.yaml``."""
    rank, folder = (
        comm.get_rank(),
        os.path.join(cfg.OUTPUT_DIR, "inference") if eval_only else cfg.OUTPUT_DIR,
    )
    os.makedirs(folder, exist_ok=True)
    log_to(folder)
    log.info("run folder: '%s'; log.txt in it has more than the screen", folder)
    log.debug(
        "Process %d of %d. Environment:\n%s", rank, comm.get_world_size(), collect_env_info()
    )
    log.debug("Command: %s", shlex.join(sys.argv))
    if eval_only and weights.resumed:  # for the record beside the results
        cfg = changed_config(cfg, {"MODEL.WEIGHTS": weights.address})
    if comm.is_main_process():
        with atomic_write(Path(folder, "config.yaml")) as temporary:
            temporary.write_text(cfg.dump())
        record_datasets(
            registered_datasets(cfg.DATASETS.TRAIN, cfg.DATASETS.TEST), folder, cfg.OUTPUT_DIR
        )
    if eval_only:  # a training has its own seeds
        seed_all_rng(None if cfg.SEED < 0 else cfg.SEED + rank)
    torch.backends.cudnn.benchmark = (
        cfg.CUDNN_BENCHMARK
        and not eval_only
        and not torch.are_deterministic_algorithms_enabled()
    )


def check_same_start(model: torch.nn.Module, start: LazyCheckpoint, iteration: int = 0) -> None:
    """Require that all processes start with the same weights: each loads its own file."""
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
                f"different weights, in the iterations {[first for first, _ in starts]}. Fix: share the files of the "
                "first machine."
            )
