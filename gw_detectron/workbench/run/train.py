"""A run from its request to results.

:func:`prepare` reads the config and opens the datasets, :class:`Trainer` checks the run (:mod:`.start`) and builds it,
and its hooks train and evaluate. A script that uses :class:`Trainer` does the same without flags.
"""

import copy
import itertools
import logging
import math
import os
import shlex
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from detectron2.config import CfgNode
from detectron2.evaluation import verify_results
from detectron2.utils import comm

from ...config import changed_config, find_config_file, given_keys, read_config
from ...errors import ConfigError
from ...norms.listing import norm_summary
from ...weights import detector_file, load_model
from ...weights.opening import config_beside
from ..dataset.recipe import apply_recipe
from ..dataset.registration import open_dataset
from .bn_statistics import change_statistics
from .processes import in_all_processes, spare_core
from .request import RunRequest
from .run_datasets import use_datasets
from .start import check_same_start, open_run
from .timing import (
    budget_of,
    check_minutes,
    evaluation_seconds,
    few_passes,
    step_seconds,
)
from .trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedRun:
    """A request and what follows from it; nothing has been written."""

    request: RunRequest
    cfg: CfgNode  # frozen
    reasons: Mapping[str, str]  # a line for each key that the data has set


def main(request: RunRequest) -> dict | None:
    """Train, or evaluate, in this process; return the last results on the main process."""
    with in_all_processes():
        prepared = prepare(request)
    if request.deterministic:
        # cuBLAS reads it at its first use
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    with spare_core(prepared.cfg.MODEL.DEVICE):
        results = evaluate(prepared) if request.eval_only else _train(prepared)
    if results:
        names = ", ".join(prepared.cfg.DATASETS.TEST)
        folder = shlex.quote(prepared.cfg.OUTPUT_DIR)
        log.info("Evaluated on %s. Next: gw-detectron report %s", names, folder)
    return results


def _train(prepared: PreparedRun) -> dict | None:
    request = prepared.request
    trainer = Trainer(
        prepared.cfg,
        resume=request.resume,
        overwrite=request.overwrite,
        allow_partial=request.allow_partial,
        ignore_preflight=request.ignore_preflight,
    )

    reasons = prepared.reasons
    if request.minutes is not None:
        reasons = {**reasons, **_fit_into_minutes(trainer, prepared)}
    for line in reasons.values():
        log.info(line)

    trainer.resume_or_load()
    return trainer.train()


def _fit_into_minutes(trainer: Trainer, prepared: PreparedRun) -> dict[str, str]:
    """Time some steps of a trainer, and build it anew for the iterations that the time allows."""
    request = prepared.request
    log.info("--minutes: timing some steps and an evaluation ...")
    # photos of several sizes take several times, whose sum counts
    step = step_seconds({"": trainer}, statistics.fmean)[""]
    evaluation = evaluation_seconds(trainer) * (2 if prepared.cfg.TEST.LOSS else 1)
    budget = budget_of(request.minutes or 0.0, step, evaluation)
    epoch = trainer.iterations_per_epoch
    usual = prepared.cfg.SOLVER.MAX_ITER if request.auto else 0
    warning = epoch and few_passes(budget, step, evaluation, epoch, usual)
    if warning:
        log.warning(warning)

    length = {"SOLVER.MAX_ITER": budget.iterations}
    if not request.changes("TEST.EVAL_PERIOD"):
        period = math.ceil(budget.iterations / budget.evaluations)
        length["TEST.EVAL_PERIOD"] = period
    cfg = changed_config(prepared.cfg, length)
    opts = itertools.chain(request.opts, *length.items())
    reasons = _use_recipe(cfg, replace(request, auto=False, opts=tuple(opts)))
    for key, value in length.items():
        reasons[key] = f"--minutes: {key} {value}: {budget.reason}"
    cfg.freeze()
    trainer.rebuild(cfg)
    return reasons


def prepare(request: RunRequest) -> PreparedRun:
    """Read the config of a run, register the user's datasets, and apply the recipe."""
    request = _resolved(request)
    cfg = read_config(request.config_file, request.opts)
    if request.num_gpus == 0 and not request.changes("MODEL.DEVICE"):
        cfg.MODEL.DEVICE = "cpu"
    elif request.num_gpus and cfg.MODEL.DEVICE == "cpu" and torch.cuda.is_available():
        log.warning(
            "MODEL.DEVICE ('cpu'): the GPU of --num-gpus is not used. Fix: add MODEL.DEVICE cuda."
        )

    use_datasets(cfg, request)
    reasons = {}
    if not request.eval_only and (request.auto or request.epochs is not None):
        reasons = _use_recipe(cfg, request)
    cfg.freeze()
    return PreparedRun(request, cfg, reasons)


def _resolved(request: RunRequest) -> RunRequest:
    """Return a request with the path of its config, its own one or the one of its RUN, and with the RUN's keys."""
    request.check_flags()
    if request.minutes is not None:
        check_minutes(request.minutes)

    config_file, opts = request.config_file, request.opts
    if request.run:
        weights = detector_file(request.run)
        if request.eval_only:
            opts = ("MODEL.WEIGHTS", weights, *opts)
        if "://" not in weights:
            folder = os.path.dirname(weights) or "."
            config_file = config_file or config_beside(weights)
            opts = ("OUTPUT_DIR", folder, *opts)

    if request.auto and not config_file:
        detector = "R_50_FPN_zoo" if request.num_gpus else "R_18_FPN_GW"
        config_file = f"Own-Data/own_mask_rcnn_{detector}.yaml"
    request = replace(request, config_file=find_config_file(config_file), opts=opts)

    is_derived = request.auto or request.minutes is not None
    if is_derived and (request.resume or request.eval_only):
        return _with_recorded_config(request)
    return request


def _with_recorded_config(request: RunRequest) -> RunRequest:
    """Return a request with the recipe and the length that its run has recorded, also if its data have grown."""
    folder = read_config(request.config_file, request.opts).OUTPUT_DIR
    record = os.path.join(folder, "config.yaml")
    if os.path.isfile(record):
        return replace(request, config_file=record, auto=False, minutes=None)
    if request.eval_only:
        raise ConfigError(
            f"--auto: no run in OUTPUT_DIR ('{folder}') to evaluate. Fix: give the run's folder."
        )
    return request


def _use_recipe(cfg: CfgNode, request: RunRequest) -> dict[str, str]:
    """Set keys by the training data (``--auto``), or only the schedule (``--epochs``, ``--minutes``).

    Keys of the command line and of the user's own yaml keep their values, but the length wins over a yaml.
    """
    flag = "--minutes" if request.minutes is not None else "--epochs"
    if request.auto:
        flag = "--auto"
    opened = map(open_dataset, cfg.DATASETS.TRAIN)
    sources = [source for source in opened if source is not None]
    if not sources or len(sources) < len(cfg.DATASETS.TRAIN):
        listed = ", ".join(cfg.DATASETS.TRAIN) or "no dataset"
        raise ConfigError(
            f"{flag}: no COCO file to train on ({listed}). Fix: give --train-json."
        )

    given = given_keys(request.config_file, request.opts)
    if request.epochs is not None or request.minutes is not None:
        schedule = {"SOLVER.MAX_ITER"}
        if cfg.SOLVER.STEPS:
            schedule.add("SOLVER.STEPS")
        given -= schedule.difference(request.opts)
    return apply_recipe(cfg, sources, epochs=request.epochs, given=given, flag=flag)


def _effects(
    plain: Mapping, changed: Mapping, name: str, place: str = ""
) -> Iterator[str]:
    """Yield a text for each AP of an evaluation, and of the second one, whose keys end in ``_NAME``."""
    for key, scores in plain.items():
        if isinstance(scores, Mapping):
            inner = changed.get(f"{key}_{name}", changed.get(key, {}))
            yield from _effects(scores, inner, name, f"{place}{key} ")
        elif key == "AP":
            yield f"{place}AP {scores:.1f} -> {changed['AP']:.1f}"


def evaluate(prepared: PreparedRun) -> dict:
    """Build the model, load its weights and evaluate it on ``DATASETS.TEST``."""
    request = prepared.request
    cfg = prepared.cfg
    run = open_run(
        cfg,
        eval_only=True,
        resume=request.resume,
        allow_partial=request.allow_partial,
        ignore_preflight=request.ignore_preflight,
    )
    with run.lock:
        model = load_model(
            cfg,
            checkpoint=run.weights.checkpoint(),
            device=cfg.MODEL.DEVICE,
            allow_partial=request.allow_partial,
        )
        log.info("norms: %s", norm_summary(model))
        if not request.allow_partial:
            check_same_start(model, run.weights)
        if cfg.MODEL.COMPILE:
            model.get_submodule("backbone").compile()

        changed = None
        mix, adapt = request.mix, request.adapt
        if mix or adapt:  # wrong values are refused before hours of evaluation
            changed = copy.deepcopy(model)
            weights = run.weights.address
            change_statistics(changed, cfg, mix=mix, adapt=adapt, weights=weights)

        results = Trainer.test(cfg, model)
        if changed is not None:
            plain = dict(results)
            name = "mixed" if mix else "adapted"
            results.update(Trainer.test_as(name, cfg, changed))
            effects = ", ".join(_effects(plain, results, name))
            flag = f"--mix {mix}" if mix else f"--adapt {adapt}"
            log.info("%s: %s", flag, effects)
        if cfg.TEST.AUG.ENABLED:
            results.update(Trainer.test_with_TTA(cfg, model))

    if comm.is_main_process():
        verify_results(cfg, results)
    return results
