#!/usr/bin/env python
"""Export a whole Faster or Mask R-CNN as a TorchScript trace, and check its numbers.

The folder --output gets model.ts, parity.json (differences from the model) and README.md (code that loads the file).
TorchScript is deprecated in torch, but no other format holds a detector; for backbones see tools/export_backbone.py.
"""

import gw_detectron.needs_detectron2  # noqa: F401

# isort: split

import argparse

from tabulate import tabulate

from gw_detectron.cli import check_folder, errors_reported
from gw_detectron.config import read_config
from gw_detectron.export import export_detector, load_model, read_image_for, worst_relative


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-file", required=True, metavar="FILE", help="config of the model")
    parser.add_argument("--weights", metavar="FILE", help="weights, default: MODEL.WEIGHTS of the config")
    parser.add_argument("--image", required=True, metavar="FILE", help="an image in which the detector finds something")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to create")
    parser.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config keys to change")
    return parser


def main(args: argparse.Namespace) -> None:
    opts = [*args.opts, *(["MODEL.WEIGHTS", args.weights] if args.weights else [])]
    check_folder(args.output)  # before minutes of work
    cfg = read_config(args.config_file, opts)
    model = load_model(cfg)
    source = {"config": args.config_file, "weights": cfg.MODEL.WEIGHTS}
    sides = (cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST)
    report = export_detector(model, args.output, read_image_for(cfg, args.image), sides=sides, source=source)
    rows = [
        [f"{case['width']} x {case['height']}", case["detections"], f"{worst_relative([case]):.1e}"]
        for case in report["cases"]
    ]
    print(tabulate(rows, headers=["image", "detections", "largest relative difference"], disable_numparse=True))
    print(f"{args.output}/{report['file']} agrees with the model; {args.output}/README.md shows how to load it.")


if __name__ == "__main__":
    with errors_reported():
        main(get_parser().parse_args())
