"""The demo: one short run from data to pictures."""

import argparse
import json
import time
from math import isnan
from pathlib import Path

from tabulate import tabulate

from ..export import Normalization, export_backbone
from .plots import plot_curves, plot_predictions
from .trainer import Trainer, checked_setup, get_parser


def run_demo(args: argparse.Namespace) -> dict:
    """Trains from scratch, evaluates, and leaves the outcome in the config's ``OUTPUT_DIR``.

    ``result.json`` (AP of boxes and masks in percent, seconds of training and evaluation), ``curves.png``,
    ``predictions.png``, ``model_final.pth``, ``config.yaml``, and ``backbone/``, backbone and FPN exported.

    Args:
        args: ``config_file`` and ``opts`` (key, value, ...).

    Returns:
        What ``result.json`` holds.

    Raises:
        The errors of :func:`gw_detectron.engine.checked_setup` and of training.
    """
    cfg = checked_setup(get_parser().parse_args(["--config-file", args.config_file, *args.opts]))
    folder = Path(cfg.OUTPUT_DIR)
    metrics_file = folder / "metrics.json"
    metrics_file.unlink(missing_ok=True)  # the trainer appends, and this is a new run
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=False)
    start = time.perf_counter()
    evaluation = trainer.train() or {}
    seconds = round(time.perf_counter() - start, 1)
    # no AP without a single prediction, as of a run cut short: NaN, which json does not have
    scores = {task: {"AP": None if isnan(found["AP"]) else found["AP"]} for task, found in evaluation.items()}
    backbone = folder / "backbone"
    parity = export_backbone(trainer.model.backbone, backbone, Normalization.from_config(cfg))
    result = {**scores, "seconds": seconds, "export": {"format": "pt2", "worst_relative": parity["worst_relative"]}}
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    plot_curves(metrics_file, folder / "curves.png")
    plot_predictions(cfg, trainer.model, cfg.DATASETS.TEST[0], folder / "predictions.png")
    columns = ("AP", "AP50", "AP75", "APs", "APm")  # by the COCO rules there are no large objects in small images
    rows = [[task, *(found[column] for column in columns)] for task, found in evaluation.items()]
    print(f"\nTrained {cfg.SOLVER.MAX_ITER} iterations and evaluated in {seconds:.0f} s.")
    print(tabulate(rows, headers=["", *columns], floatfmt=".1f"))
    print(
        f"\nThe exported backbone {backbone / parity['file']} differs from the trained one, both in plain operations, "
        f"by at most {parity['worst_relative']:.1e} of a feature map's largest value."
    )
    print(f"Look at {folder / 'predictions.png'} and {folder / 'curves.png'};")
    print(f"numbers are in {folder / 'result.json'}, the model is {folder / 'model_final.pth'}.")
    return result
