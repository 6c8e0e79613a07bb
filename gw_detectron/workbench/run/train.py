"""A run from flags to results.

:func:`main` reads the config, :class:`Trainer` checks the run (:mod:`.start`) and builds it, and its hooks train and
evaluate. A script that uses :class:`Trainer` does the same without flags.
"""

import argparse
import logging
import os
import shlex

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, Metadata, MetadataCatalog
from detectron2.evaluation import verify_results
from detectron2.utils import comm

from ...config import find_config_file, given_keys, read_config
from ...errors import ConfigError
from ...norms.listing import norm_summary
from ...weights import detector_file, load_model
from ..dataset.recipe import apply_recipe
from .processes import in_all_processes
from .run_datasets import use_datasets
from .start import check_same_start, start_run
from .trainer import Trainer

log = logging.getLogger(__name__)


def main(args: argparse.Namespace) -> dict | None:
    """Train, or evaluate with ``--eval-only``, in this process; return the last results on the main process."""
    with in_all_processes():
        cfg = run_config(args)
        reasons = use_recipe(cfg, args)
    if args.deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS reads it at its first use
        torch.use_deterministic_algorithms(True)
    options = {
        name: getattr(args, name) for name in ("resume", "allow_partial", "ignore_preflight")
    }
    if args.eval_only:
        results: dict | None = evaluate(cfg, **options)
    else:
        trainer = Trainer(cfg, overwrite=args.overwrite, **options)
        for line in reasons.values():
            log.info(line)
        trainer.resume_or_load(args.resume)
        results = trainer.train()
    if results:
        names = ", ".join(cfg.DATASETS.TEST)
        log.info(
            "Evaluated on %s. Next: gw-detectron report %s", names, shlex.quote(cfg.OUTPUT_DIR)
        )
    return results


def run_config(args: argparse.Namespace) -> CfgNode:
    """Read the config of a run without writing anything.

    ``--num-gpus 0`` sets ``MODEL.DEVICE cpu``. Datasets of the user are registered, see :func:`use_datasets`. The
    name of a config becomes the path of its file in ``args``. The config is frozen.
    """
    if args.overwrite and (args.resume or args.eval_only):
        other = "--resume, which continues" if args.resume else "--eval-only, which keeps"
        raise ConfigError(
            f"--overwrite: given together with {other} the earlier run. Fix: give one of the two."
        )
    if run := getattr(args, "run", None):
        weights = detector_file(run)
        folder = os.path.dirname(weights) or "."
        args.config_file = args.config_file or os.path.join(folder, "config.yaml")
        args.opts = [
            "OUTPUT_DIR",
            folder,
            *(["MODEL.WEIGHTS", weights] if args.eval_only else []),
            *(args.opts or []),
        ]
    if args.auto and not args.config_file:
        args.config_file = f"Own-Data/own_mask_rcnn_R_{50 if args.num_gpus else 18}_FPN_GW.yaml"
    args.config_file = find_config_file(args.config_file)
    cfg = read_config(args.config_file, args.opts or [])
    record = os.path.join(cfg.OUTPUT_DIR, "config.yaml")
    if args.auto and (args.resume or args.eval_only) and os.path.isfile(record):
        args.config_file, args.auto = (
            record,
            False,
        )  # with the recipe of the run, also if its data have grown
        cfg = read_config(record, args.opts or [])
    elif args.auto and args.eval_only:
        raise ConfigError(
            f"--auto: no run in OUTPUT_DIR ('{cfg.OUTPUT_DIR}') to evaluate. Fix: give the run's folder."
        )
    if "SOLVER.MAX_ITER" in (args.opts or []) and "SOLVER.STEPS" not in args.opts:
        _scale_steps(cfg, read_config(args.config_file).SOLVER.MAX_ITER)
    if args.track:
        cfg.TRACKER = args.track
    if args.num_gpus == 0 and "MODEL.DEVICE" not in (args.opts or []):
        cfg.MODEL.DEVICE = "cpu"
    elif args.num_gpus and cfg.MODEL.DEVICE == "cpu" and torch.cuda.is_available():
        log.warning(
            "MODEL.DEVICE ('cpu'): the GPU of --num-gpus is not used. Fix: add MODEL.DEVICE cuda."
        )
    use_datasets(
        cfg,
        args,
        os.path.join(cfg.OUTPUT_DIR, "inference") if args.eval_only else cfg.OUTPUT_DIR,
    )
    cfg.freeze()
    return cfg


def use_recipe(cfg: CfgNode, args: argparse.Namespace) -> dict[str, str]:
    """Set keys by the training data (``--auto``), or only the schedule (``--epochs``); return the reasons.

    Keys of the command line and of the user's own yaml keep their values, but ``--epochs`` wins over a yaml.
    """
    if args.eval_only or not (args.auto or args.epochs is not None):
        return {}
    files = {
        name: MetadataCatalog.get(name) for name in cfg.DATASETS.TRAIN if name in DatasetCatalog
    }
    unknown = [
        name for name in cfg.DATASETS.TRAIN if not files.get(name, Metadata()).get("json_file")
    ]
    if unknown or not files:
        raise ConfigError(
            f"--auto: no COCO file to train on ({', '.join(unknown) or 'no dataset'}). Fix: give --train-json."
        )
    given = given_keys(args.config_file, args.opts or [])
    if args.epochs is not None:
        given -= {
            "SOLVER.MAX_ITER",
            *(["SOLVER.STEPS"] if cfg.SOLVER.STEPS else []),
        }.difference(args.opts or [])
    cfg.defrost()
    reasons = apply_recipe(
        cfg,
        {each.json_file: each.image_root for each in files.values()},
        epochs=args.epochs,
        given=given,
        schedule_only=not args.auto,
    )
    cfg.freeze()
    return reasons


def _scale_steps(cfg: CfgNode, max_iter: int) -> None:
    """Move the drops of the learning rate with a shortened schedule, which was ``max_iter`` long, if one is lost."""
    steps = cfg.SOLVER.STEPS
    if cfg.SOLVER.MAX_ITER <= max(steps, default=0) < max_iter:
        scaled = {step * cfg.SOLVER.MAX_ITER // max_iter for step in steps}
        cfg.SOLVER.STEPS = tuple(sorted(scaled - {0}))
        log.warning(
            "SOLVER.STEPS %s: scaled to %s with SOLVER.MAX_ITER", steps, cfg.SOLVER.STEPS
        )


def evaluate(
    cfg: CfgNode,
    *,
    resume: bool = False,
    allow_partial: bool = False,
    ignore_preflight: bool = False,
) -> dict:
    """Build the model, load its weights and evaluate it on ``DATASETS.TEST``; arguments as of :class:`Trainer`."""
    start, *_ = start_run(
        cfg,
        eval_only=True,
        resume=resume,
        allow_partial=allow_partial,
        ignore_preflight=ignore_preflight,
    )
    model = load_model(
        cfg, checkpoint=start.checkpoint(), device=cfg.MODEL.DEVICE, allow_partial=allow_partial
    )
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
