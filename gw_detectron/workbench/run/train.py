"""A run from its request to results.

:func:`prepare` reads the config and opens the datasets, :class:`Trainer` checks the run (:mod:`.start`) and builds it,
and its hooks train and evaluate. A script that uses :class:`Trainer` does the same without flags.
"""

import copy
import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog
from detectron2.evaluation import verify_results
from detectron2.utils import comm

from ...config import find_config_file, given_keys, read_config
from ...errors import ConfigError
from ...norms.listing import norm_summary
from ...weights import detector_file, load_model
from ...weights.loading import mix_in_backbone
from ..dataset.recipe import apply_recipe
from ..dataset.registration import open_dataset
from .processes import in_all_processes
from .request import RunRequest
from .run_datasets import use_datasets
from .start import check_same_start, open_run
from .trainer import Trainer

log = logging.getLogger(__name__)


def main(request: RunRequest) -> dict | None:
    """Train, or evaluate, in this process; return the last results on the main process."""
    with in_all_processes():
        prepared = prepare(request)
    if request.deterministic:
        # cuBLAS reads it at its first use
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    results = evaluate(prepared) if request.eval_only else _train(prepared)
    if results:
        names = ", ".join(prepared.cfg.DATASETS.TEST)
        folder = shlex.quote(prepared.cfg.OUTPUT_DIR)
        log.info("Evaluated on %s. Next: gw-detectron report %s", names, folder)
    return results


def _train(prepared: "PreparedRun") -> dict | None:
    request = prepared.request
    trainer = Trainer(
        prepared.cfg,
        resume=request.resume,
        overwrite=request.overwrite,
        allow_partial=request.allow_partial,
        ignore_preflight=request.ignore_preflight,
    )
    for line in prepared.reasons.values():
        log.info(line)
    trainer.resume_or_load()
    return trainer.train()


@dataclass(frozen=True)
class PreparedRun:
    """A request and what follows from it; nothing has been written."""

    request: RunRequest
    cfg: CfgNode  # frozen
    reasons: Mapping[str, str]  # a line for each key that the data has set


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
    reasons = _use_recipe(cfg, request)
    cfg.freeze()
    return PreparedRun(request, cfg, reasons)


def _resolved(request: RunRequest) -> RunRequest:
    """Return a request with the path of its config, and with the keys that follow from its RUN."""
    if request.overwrite and (request.resume or request.eval_only):
        other = (
            "--resume, which continues"
            if request.resume
            else "--eval-only, which keeps"
        )
        raise ConfigError(
            f"--overwrite: given together with {other} the earlier run. Fix: give one of the two."
        )
    if request.mix and not request.eval_only:
        raise ConfigError(
            f"--mix ({request.mix!r}): only evaluates. Fix: give it to gw-detectron eval, or train with "
            "MODEL.RESNETS.WHITEN_NORM MixGW."
        )
    config_file, opts = request.config_file, request.opts
    if request.run:
        weights = detector_file(request.run)
        if request.eval_only:
            opts = ("MODEL.WEIGHTS", weights, *opts)
        if "://" not in weights:
            folder = os.path.dirname(weights) or "."
            config_file = config_file or os.path.join(folder, "config.yaml")
            opts = ("OUTPUT_DIR", folder, *opts)
    if request.auto and not config_file:
        detector = "R_50_FPN_zoo" if request.num_gpus else "R_18_FPN_GW"
        config_file = f"Own-Data/own_mask_rcnn_{detector}.yaml"
    request = replace(request, config_file=find_config_file(config_file), opts=opts)

    if request.auto and (request.resume or request.eval_only):
        # with the recipe of the run, also if its data have grown
        folder = read_config(request.config_file, opts).OUTPUT_DIR
        record = os.path.join(folder, "config.yaml")
        if os.path.isfile(record):
            return replace(request, config_file=record, auto=False)
        if request.eval_only:
            raise ConfigError(
                f"--auto: no run in OUTPUT_DIR ('{folder}') to evaluate. Fix: give the run's folder."
            )
    return request


def _use_recipe(cfg: CfgNode, request: RunRequest) -> dict[str, str]:
    """Set keys by the training data (``--auto``), or only the schedule (``--epochs``).

    Keys of the command line and of the user's own yaml keep their values, but ``--epochs`` wins over a yaml.
    """
    if request.eval_only or not (request.auto or request.epochs is not None):
        return {}
    names = [name for name in cfg.DATASETS.TRAIN if name in DatasetCatalog]
    opened = map(open_dataset, names)
    sources = [source for source in opened if source is not None]
    if not sources or len(sources) < len(cfg.DATASETS.TRAIN):
        listed = ", ".join(cfg.DATASETS.TRAIN) or "no dataset"
        flag = "--auto" if request.auto else "--epochs"
        raise ConfigError(
            f"{flag}: no COCO file to train on ({listed}). Fix: give --train-json."
        )

    given = given_keys(request.config_file, request.opts)
    if request.epochs is not None:
        schedule = {"SOLVER.MAX_ITER"}
        if cfg.SOLVER.STEPS:
            schedule.add("SOLVER.STEPS")
        given -= schedule.difference(request.opts)
    return apply_recipe(
        cfg, sources, epochs=request.epochs, given=given, schedule_only=not request.auto
    )


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

        mixed = None
        if request.mix:  # a wrong value is refused before hours of evaluation
            mixed = copy.deepcopy(model)
            mix_in_backbone(mixed, request.mix)

        results = Trainer.test(cfg, model)
        if mixed is not None:
            results.update(Trainer.test_as("mixed", cfg, mixed))
        if cfg.TEST.AUG.ENABLED:
            results.update(Trainer.test_with_TTA(cfg, model))

    if comm.is_main_process():
        verify_results(cfg, results)
    return results
