"""Export a detector, or with --backbone its backbone, and compare the exported file with the model.

A detector is a Faster R-CNN, Mask R-CNN or RetinaNet with FPN: the file takes images of any size and needs neither
Detectron2 nor this package. The folder --output gets the file and parity.json (differences from the model).
docs/export.md shows how to load the file. An earlier export in the same format is replaced.
"""

import argparse
import os
from typing import Any

from detectron2.config import CfgNode

from ...config import read_config
from ...errors import ConfigError
from ...weights import (
    Checkpoint,
    check_recorded_config,
    detector_file,
    load_model,
    open_start_weights,
    trained_classes,
)
from ..console import check_folder
from ..dataset.source import class_metadata, classes_of
from ..export import FORMATS, Normalization, export_backbone, export_detector, read_image_for
from .parsers import RunParser, new_parser

_OF_BACKBONES = ("no_fpn", "pixels")
_OF_DETECTORS = ("one_image", "paste_masks", "image")


def get_parser() -> argparse.ArgumentParser:
    parser = new_parser(
        __doc__,
        "output/mydata --output detector --format onnx",
        "output/mydata --output detector --one-image --paste-masks",
        "output/mydata/model_final.pth --output backbone --backbone --pixels",
        kind=RunParser,
    )
    add = parser.add_argument
    add(
        "--config-file",
        metavar="FILE",
        help="config of the model; default: config.yaml beside RUN's weights",
    )
    add(
        "--output",
        default="exported",
        metavar="DIR",
        help="folder to create, default: %(default)s",
    )
    add("--format", choices=FORMATS, default="pt2", help="default: pt2 (torch.export)")
    add("--backbone", action="store_true", help="export only the backbone")
    group = parser.add_argument_group("detectors")
    add = group.add_argument
    add(
        "--one-image",
        action="store_true",
        help="take one image in its original size, and resize it as in evaluation",
    )
    add(
        "--paste-masks",
        action="store_true",
        help="with --one-image: binary masks as large as the image",
    )
    add(
        "--image",
        metavar="FILE",
        help="image for the comparison, with many objects; default: drawn shapes",
    )
    group = parser.add_argument_group("with --backbone")
    add = group.add_argument
    add("--no-fpn", action="store_true", help="export the ResNet below the FPN")
    add(
        "--pixels",
        action="store_true",
        help="the file normalizes its input, pixels of 0 to 255",
    )
    parser.add_argument(
        "opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config keys to change"
    )
    return parser


def main(args: argparse.Namespace) -> None:
    for name in _OF_DETECTORS if args.backbone else _OF_BACKBONES:
        if getattr(args, name):
            use = "without" if args.backbone else "with"
            raise ConfigError(
                f"--{name.replace('_', '-')}: only works {use} --backbone. Fix: leave it out."
            )
    check_folder(args.output)  # before minutes of work
    if args.run:
        weights = detector_file(args.run)
        args.opts = ["MODEL.WEIGHTS", weights, *args.opts]
        args.config_file = args.config_file or os.path.join(
            os.path.dirname(weights), "config.yaml"
        )
    cfg = read_config(args.config_file or "", args.opts)
    checkpoint = open_start_weights(cfg.MODEL.WEIGHTS).checkpoint()
    check_recorded_config(cfg, checkpoint)
    report = (_export_backbone if args.backbone else _export_detector)(args, cfg, checkpoint)
    print(f"Weights: {cfg.MODEL.WEIGHTS}")
    if args.backbone:
        print(
            f"Features differ from the model's by at most {report['worst_relative']:.1e} of their largest value."
        )
    else:
        worst = ", ".join(f"{name} {value:.1e}" for name, value in report["worst"].items())
        count = f"{report['detections_compared']} detections compared, {report['unmatched']} without counterpart"
        print(f"Largest differences from the model: {worst}; {count}.")
    print(
        f"{args.output}/{report['file']} agrees with the model; docs/export.md shows how to load it."
    )


def _export_backbone(
    args: argparse.Namespace, cfg: CfgNode, checkpoint: Checkpoint | None
) -> dict[str, Any]:
    needed = "backbone.bottom_up." if args.no_fpn else "backbone."
    model = load_model(cfg, needed, checkpoint=checkpoint)
    return export_backbone(
        model.backbone,
        args.output,
        Normalization.from_config(cfg, inside=args.pixels),
        file_format=args.format,
        fpn=not args.no_fpn,
        source={"config": args.config_file, "weights": cfg.MODEL.WEIGHTS},
    )


def _export_detector(
    args: argparse.Namespace, cfg: CfgNode, checkpoint: Checkpoint | None
) -> dict[str, Any]:
    model = load_model(cfg, checkpoint=checkpoint)
    return export_detector(
        model,
        args.output,
        file_format=args.format,
        image=read_image_for(cfg, args.image, resize=not args.one_image)
        if args.image
        else None,
        sides=(cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST),
        percentiles=cfg.INPUT.PERCENTILES,
        one_image=args.one_image,
        paste_masks=args.paste_masks,
        classes=classes_of(class_metadata(cfg, trained_classes(checkpoint))),
        source={"config": args.config_file, "weights": cfg.MODEL.WEIGHTS},
    )
