"""Train a small Group Whitening Mask R-CNN on synthetic images, evaluate it and draw its predictions."""

import argparse
import time
from pathlib import Path

from ..cli import new_parser
from ..engine.flags import get_parser as get_training_parser
from ..engine.train import run_config
from ..engine.trainer import Trainer
from ..errors import ConfigError
from ..installation import require_packages
from ..model_zoo import get_config_file
from ..report import PAGE, write_report

_CONFIG = "quick_schedules/mask_rcnn_R_18_FPN_BN_GW_demo.yaml"


def get_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__, "", "SOLVER.MAX_ITER 50 OUTPUT_DIR output/short_demo")
    add = parser.add_argument
    add("--config-file", default=get_config_file(_CONFIG), metavar="FILE", help=f"config to train; default: {_CONFIG}")
    add("--overwrite", action="store_true", help="replace the run in OUTPUT_DIR")
    add("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config keys to change, e.g. SOLVER.MAX_ITER 50")
    return parser


def main(args: argparse.Namespace) -> None:
    """Train, evaluate, and write the report to ``OUTPUT_DIR``."""
    require_packages("demo", "cv2")  # before minutes of work
    flags = get_training_parser().parse_args(["--config-file", args.config_file, *args.opts])
    cfg = run_config(flags)
    folder = Path(cfg.OUTPUT_DIR)
    if len(cfg.DATASETS.TEST) != 1:  # several have results of their own, which no table here shows
        raise ConfigError(f"DATASETS.TEST ({list(cfg.DATASETS.TEST)}): the demo evaluates one dataset. Fix: name one.")
    trainer = Trainer(cfg, resume=False, overwrite=args.overwrite)
    trainer.resume_or_load(resume=False)
    begin = time.perf_counter()
    evaluation = trainer.train() or {}
    seconds = time.perf_counter() - begin
    write_report(folder)
    print(f"\nTrained {cfg.SOLVER.MAX_ITER} iterations and evaluated in {seconds:.0f} s.")
    print(", ".join(f"{task} AP {found['AP']:.1f}" for task, found in evaluation.items() if "AP" in found))
    print(f"Report, with curves and pictures: {folder / 'report' / PAGE}")
    print(f"Model: {folder / 'model_final.pth'}")
