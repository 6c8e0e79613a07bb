#!/usr/bin/env python
"""Train a small Group Whitening Mask R-CNN on synthetic images, evaluate it and draw its predictions."""

import gw_detectron.needs_detectron2  # noqa: F401

# isort: split

import argparse

from gw_detectron.cli import errors_reported
from gw_detectron.engine.demo import run_demo
from gw_detectron.model_zoo import get_config_file


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--config-file",
        default=get_config_file("quick_schedules/mask_rcnn_R_18_FPN_GW_demo.yaml"),
        metavar="FILE",
        help="config to train (default: %(default)s)",
    )
    parser.add_argument(
        "opts",
        nargs=argparse.REMAINDER,
        metavar="KEY VALUE",
        help="config keys to change, e.g. SOLVER.MAX_ITER 50",
    )
    return parser


if __name__ == "__main__":
    with errors_reported():
        run_demo(get_parser().parse_args())
