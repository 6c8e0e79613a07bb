"""Export the backbone of a detector to a file that other programs load, and check its numbers.

The folder --output gets the file, parity.json (differences from the model) and README.md (code that loads the file).
An earlier export in the same format is replaced.
"""

import argparse
import json

from tabulate import tabulate

from ..cli import new_parser
from ..export import FORMATS, LAYOUTS, Normalization, export_backbone, load_model
from .export_flags import add_export_flags, read_model_config, requested_card


def get_parser() -> argparse.ArgumentParser:
    parser = new_parser(
        __doc__,
        "--config-file output/config.yaml --weights output/model_final.pth --output backbone",
        "--config-file output/config.yaml --weights output/model_final.pth --output onnx --format onnx --pixels",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="pt2",
        help="pt2 (torch.export, the default), onnx, torchscript (deprecated by torch), safetensors (weights only)",
    )
    parser.add_argument(
        "--fpn",
        action=argparse.BooleanOptionalAction,
        help="with or without FPN, default: as in the config",
    )
    parser.add_argument(
        "--pixels",
        action="store_true",
        help="the file takes pixels of 0 to 255 and normalizes them, instead of normalized images",
    )
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="detectron2",
        help="tensor names of a safetensors file, default: %(default)s; the others need --no-fpn",
    )
    add_export_flags(parser)
    return parser


def main(args: argparse.Namespace) -> None:
    cfg = read_model_config(args)
    model = load_model(cfg, needed="backbone." if args.fpn is not False else "backbone.bottom_up.")
    report = export_backbone(
        model.backbone,
        args.output,
        Normalization.from_config(cfg, inside=args.pixels),
        file_format=args.format,
        fpn=args.fpn,
        layout=args.layout,
        source={"config": args.config_file, "weights": cfg.MODEL.WEIGHTS},
        card=requested_card(args, cfg),
    )
    if args.json:
        print(json.dumps(report, indent=2))
        return
    rows = []
    for name, shape in report["outputs"].items():
        levels = [case["levels"][name] for case in report["cases"]]
        differences = (max(level[kind] for level in levels) for kind in ("max_abs", "relative"))
        rows.append([name, shape["channels"], shape["stride"], *(f"{value:.1e}" for value in differences)])
    print(
        tabulate(
            rows, headers=["output", "channels", "stride", "largest difference", "relative"], disable_numparse=True
        )
    )
    print(f"{args.output}/{report['file']} agrees with the model; {args.output}/README.md shows how to load it.")
