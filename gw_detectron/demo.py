"""The demo: a short run from data to pictures."""

import argparse
import json
import time
from math import isnan, nan
from pathlib import Path

from detectron2.config import CfgNode
from tabulate import tabulate

from .atomic import check_replaceable
from .checkpoint import StartWeights
from .engine.flags import get_parser
from .engine.train import prepare, run_config
from .engine.trainer import Trainer
from .errors import ConfigError
from .export import Normalization, export_backbone
from .export.report_files import REPORT_FILES
from .installation import require_packages
from .report import PAGE, write_report

_RESULT = "result.json"


def run_demo(args: argparse.Namespace) -> dict:
    """Train from scratch, evaluate, export the backbone and draw the results.

    Writes to ``OUTPUT_DIR``: ``result.json`` (box and mask AP in percent, seconds of training and evaluation),
    ``report/`` (:func:`.write_report`), ``model_final.pth``, ``config.yaml`` and ``backbone/`` (the exported backbone
    with FPN).

    Args:
        args: ``config_file``, ``overwrite`` and ``opts`` (key, value, ...). An earlier demo is overwritten anyway.

    Returns:
        The content of ``result.json``.

    Raises:
        UserError: see :func:`gw_detectron.engine.train.prepare` and :meth:`Trainer.train`.
    """
    require_packages("demo", "cv2")  # before minutes of work
    flags = get_parser().parse_args(["--config-file", args.config_file, *args.opts])
    cfg = run_config(flags)
    _check_results_can_be_written(cfg)
    flags.overwrite = args.overwrite or _holds_a_demo(Path(cfg.OUTPUT_DIR))
    run = prepare(flags)
    with run.lock:
        return _train_and_draw(run.cfg, run.start)


def _train_and_draw(cfg: CfgNode, start: StartWeights) -> dict:
    folder = Path(cfg.OUTPUT_DIR)
    trainer = Trainer(cfg)
    trainer.load_start_weights(start)
    begin = time.perf_counter()
    evaluation = trainer.train() or {}
    seconds = round(time.perf_counter() - begin, 1)
    # without any prediction, as after a very short run, AP is NaN, which JSON does not have
    evaluation = {task: found for task, found in evaluation.items() if "AP" in found}
    scores = {task: {"AP": None if isnan(found["AP"]) else found["AP"]} for task, found in evaluation.items()}
    backbone = folder / "backbone"
    parity = export_backbone(trainer.model.backbone, backbone, Normalization.from_config(cfg))
    result = {**scores, "seconds": seconds, "export": {"format": "pt2", "worst_relative": parity["worst_relative"]}}
    (folder / _RESULT).write_text(json.dumps(result, indent=2) + "\n")
    write_report(folder)
    columns = ("AP", "AP50", "AP75", "APs", "APm")  # small images have no large objects
    rows = [[task, *(found.get(column, nan) for column in columns)] for task, found in evaluation.items()]
    print(f"\nTrained {cfg.SOLVER.MAX_ITER} iterations and evaluated in {seconds:.0f} s.")
    print(tabulate(rows, headers=["", *columns], floatfmt=".1f"))
    print(
        f"\nThe exported backbone {backbone / parity['file']} differs from the trained one by at most "
        f"{parity['worst_relative']:.1e} of a feature map's largest value (both in plain operations)."
    )
    print(f"Report, with curves and pictures: {folder / 'report' / PAGE}")
    print(f"Numbers: {folder / _RESULT}; model: {folder / 'model_final.pth'}")
    return result


def _holds_a_demo(folder: Path) -> bool:
    """Tell whether the last training in a folder was a demo, which writes its result after its checkpoints."""
    result = folder / _RESULT
    return result.is_file() and all(
        path.stat().st_mtime_ns <= result.stat().st_mtime_ns for path in folder.glob("model_*.pth")
    )


def _check_results_can_be_written(cfg: CfgNode) -> None:
    """Refuse configs and folders that would stop the export or the pictures."""
    if len(cfg.DATASETS.TEST) != 1:  # several have results of their own, which no table here shows
        raise ConfigError(
            f"DATASETS.TEST ({list(cfg.DATASETS.TEST)}): the demo evaluates one dataset. Fix: name exactly one."
        )
    check_replaceable(Path(cfg.OUTPUT_DIR, "backbone"), ("backbone.pt2", *REPORT_FILES))
