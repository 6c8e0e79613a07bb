"""Train a small Group Whitening Mask R-CNN on synthetic images, evaluate it and draw its predictions."""

import argparse

from ..cli import new_parser
from ..demo import run_demo
from ..model_zoo import get_config_file

_CONFIG = "quick_schedules/mask_rcnn_R_18_FPN_BN_GW_demo.yaml"


def get_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__, "", "SOLVER.MAX_ITER 50 OUTPUT_DIR output/short_demo")
    parser.add_argument(
        "--config-file",
        default=get_config_file(_CONFIG),
        metavar="FILE",
        help=f"config to train (default: {_CONFIG})",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a run in OUTPUT_DIR that is not a demo")
    parser.add_argument(
        "opts",
        nargs=argparse.REMAINDER,
        metavar="KEY VALUE",
        help="config keys to change, e.g. SOLVER.MAX_ITER 50",
    )
    return parser


def main(args: argparse.Namespace) -> None:
    """Run the demo."""
    run_demo(args)
