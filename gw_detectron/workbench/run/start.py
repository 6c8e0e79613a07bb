"""Start a run: lock its folder, open its weights, check it, and only then write to the folder."""

import contextlib
import hashlib
import logging
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from detectron2.utils.collect_env import collect_env_info
from detectron2.utils.env import seed_all_rng

from ...atomic import remove_unfinished, write_text
from ...config import changed_config
from ...errors import CheckReport, ConfigError
from ...weights import LazyCheckpoint, open_start_weights
from ...weights.opening import local_file
from ..dataset.registration import record_datasets
from ..dataset.source import sources_of
from .checks import check_run
from .folder import check_output, lock_output, remove_files, stale_output
from .logs import log_to
from .processes import in_all_processes
from .run_datasets import record_sources

log = logging.getLogger(__name__)


@dataclass
class OpenRun:
    """A checked run that holds its folder, before it writes more than its log."""

    cfg: CfgNode
    weights: LazyCheckpoint
    # closing it lets another run start in the folder
    lock: contextlib.ExitStack
    # files of an earlier run or evaluation
    stale: list[Path]

    def begin(self) -> None:
        """Remove stale files, then write ``config.yaml``, ``datasets.yaml`` and derived datasets."""
        folder = self.cfg.OUTPUT_DIR
        with in_all_processes():
            if comm.is_main_process():
                remove_files(self.stale)
                for part in ("", "datasets", "inference"):
                    remove_unfinished(os.path.join(folder, part))
                _write_record(self.cfg, folder, replaces=not self.weights.resumed)
        with in_all_processes():  # another machine may not share the folder
            for source in sources_of(self.cfg).values():
                source.write()


def open_run(
    cfg: CfgNode,
    *,
    eval_only: bool = False,
    resume: bool | None = False,
    overwrite: bool = False,
    allow_partial: bool = False,
    ignore_preflight: bool = False,
    own_evaluator: bool = False,
) -> OpenRun:
    """Lock the folder of a run, check the run and open its log. A training writes the rest when it begins.

    Until :meth:`OpenRun.begin` the folder of an earlier run is unchanged, but for its log. An evaluation begins at
    once, and writes the folder ``inference``, as trainings do. Arguments and errors as for :class:`.trainer.Trainer`.
    """
    output = cfg.OUTPUT_DIR
    folder = os.path.join(output, "inference") if eval_only else output
    is_main = comm.is_main_process()
    may_resume = resume or (resume is None and not overwrite)
    with contextlib.ExitStack() as lock:
        with in_all_processes():
            # An earlier folder is locked first: another training could write a newer checkpoint than is opened.
            # A new one is made after the checks, so that a refused run leaves none.
            is_new = not os.path.isdir(output)
            if is_main and not is_new:
                lock.enter_context(lock_output(output))
            weights = open_start_weights(
                cfg.MODEL.WEIGHTS, output if may_resume else ""
            )
            report = _check(
                cfg,
                weights,
                resume=resume,
                keeps=not (eval_only or overwrite),
                ignore_preflight=ignore_preflight,
                eval_only=eval_only,
                allow_partial=allow_partial,
                own_evaluator=own_evaluator,
            )
            weights.checkpoint()  # fetches remote weights, raises the error of opening it
            if is_main and is_new:
                lock.enter_context(lock_output(output))

            stale: list[Path] = []
            if is_main:
                is_first = not (eval_only or weights.resumed)
                origins = [source.labels.path for source in sources_of(cfg).values()]
                stale = stale_output(
                    output,
                    metrics=is_first,
                    best=bool(resume) and is_first,
                    everything=overwrite,
                    needed=filter(None, [local_file(weights.address), *origins]),
                )
        with in_all_processes():
            _log_to_folder(cfg, folder, eval_only=eval_only)
            if eval_only:
                _begin_evaluation(cfg, weights, stale)
        for warning in report.errors + report.warnings:
            log.warning(warning)
        return OpenRun(cfg, weights, lock.pop_all(), stale)


def _check(
    cfg: CfgNode,
    weights: LazyCheckpoint,
    *,
    resume: bool | None,
    keeps: bool,
    ignore_preflight: bool,
    **run: bool,
) -> CheckReport:
    """Check folder and ``run`` on the main process; raise the errors unless they are ignored."""
    report = CheckReport()
    if comm.is_main_process():
        output, best = cfg.OUTPUT_DIR, cfg.TEST.BEST
        check_output(output, weights, report, resume=resume, keeps=keeps, best=best)
        if ignore_preflight:
            # only --overwrite may replace finished work
            report.raise_errors()
        check_run(cfg, weights, report, **run)
    if not ignore_preflight:
        report.raise_errors()
    return report


def _log_to_folder(cfg: CfgNode, folder: str, *, eval_only: bool) -> None:
    """Set up logging, as Detectron2's ``default_setup``."""
    os.makedirs(folder, exist_ok=True)
    log_to(folder)
    rank, processes = comm.get_rank(), comm.get_world_size()
    log.info("run folder: '%s'; log.txt in it has more than the screen", folder)
    log.debug("Process %d of %d. Environment:\n%s", rank, processes, collect_env_info())
    log.debug("Command: %s", shlex.join(sys.argv))

    is_deterministic = torch.are_deterministic_algorithms_enabled()
    may_tune = cfg.CUDNN_BENCHMARK and not eval_only and not is_deterministic
    torch.backends.cudnn.benchmark = may_tune


def _begin_evaluation(cfg: CfgNode, weights: LazyCheckpoint, stale: list[Path]) -> None:
    # a training has its own seeds
    seed_all_rng(None if cfg.SEED < 0 else cfg.SEED + comm.get_rank())
    if not comm.is_main_process():
        return
    remove_files(stale)
    if weights.resumed:  # for the record beside the results
        cfg = changed_config(cfg, {"MODEL.WEIGHTS": weights.address})
    _write_record(cfg, os.path.join(cfg.OUTPUT_DIR, "inference"), replaces=True)


def _write_record(cfg: CfgNode, folder: str, *, replaces: bool) -> None:
    """Write the record of a run into its folder, or of an evaluation into the folder ``inference``.

    ``config.yaml`` is the last file: without it, nothing takes the others for a run. A run that ``replaces`` another
    config removes it first.
    """
    config = Path(folder, "config.yaml")
    if replaces:
        config.unlink(missing_ok=True)
    record_datasets(cfg, folder, cfg.OUTPUT_DIR)
    record_sources(cfg, folder)
    write_text(config, cfg.dump())


def check_same_start(
    model: torch.nn.Module, start: LazyCheckpoint, iteration: int = 0
) -> None:
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
