"""Export a detector, or with --backbone its backbone, and compare the exported file with the model.

A detector is a Faster R-CNN, Mask R-CNN or RetinaNet with FPN: the file takes images of any size
and needs neither Detectron2 nor this package. The folder --output gets the file and parity.json
(differences from the model). docs/export.md shows how to load the file. An earlier export in the
same format is replaced.
"""

import argparse
from typing import Any

from torch import nn

from ...errors import ConfigError
from ...weights import Preprocessing, load_model, open_detector, trained_classes
from ...weights.loading import OpenDetector
from ..console import check_folder
from ..dataset.metadata import class_metadata, classes_of
from ..export import FORMATS, export_backbone, export_detector, read_image_for
from ..run.bn_statistics import change_statistics
from .parsers import RunParser, add_statistics_flags, new_parser

_WEIGHTS = "safetensors"
_OF_BACKBONES = ("no_fpn",)
_OF_DETECTORS = ("one_image", "paste_masks", "image")


def get_parser() -> argparse.ArgumentParser:
    parser = new_parser(
        __doc__,
        "output/mydata --output detector --format onnx",
        "output/mydata --output detector --one-image --paste-masks",
        "output/mydata/model_final.pth --output backbone --backbone",
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
    add(
        "--format",
        choices=(*FORMATS, _WEIGHTS),
        default="pt2",
        help=f"default: pt2 (torch.export); {_WEIGHTS}: with --backbone, for MODEL.WEIGHTS",
    )
    add("--backbone", action="store_true", help="export only the backbone")
    add_statistics_flags(parser, "export with")

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
    parser.add_argument(
        "opts",
        nargs=argparse.REMAINDER,
        metavar="KEY VALUE",
        help="config keys to change",
    )
    return parser


def main(args: argparse.Namespace) -> None:
    for name in _OF_DETECTORS if args.backbone else _OF_BACKBONES:
        if getattr(args, name):
            flag = name.replace("_", "-")
            use = "without" if args.backbone else "with"
            raise ConfigError(
                f"--{flag}: only works {use} --backbone. Fix: leave it out."
            )
    if args.format == _WEIGHTS and not args.backbone:
        raise ConfigError(
            f"--format {_WEIGHTS}: has the weights of a backbone. Fix: add --backbone."
        )
    check_folder(args.output)  # before minutes of work

    detector = open_detector(args.run or "", args.config_file or "", args.opts)
    print(
        "Exporting, and comparing the file with the model; on a CPU this may take minutes."
    )
    export = _export_backbone if args.backbone else _export_detector
    report = export(args, detector)
    print(f"Weights: {detector.cfg.MODEL.WEIGHTS}")
    print(_differences_of(report))
    print(
        f"{args.output}/{report['file']} agrees with the model; docs/export.md shows how to load it."
    )


def _differences_of(report: dict[str, Any]) -> str:
    if "worst_relative" in report:
        worst = f"{report['worst_relative']:.1e}"
        return f"Features differ from the model's by at most {worst} of their largest value."
    worst = ", ".join(f"{name} {value:.1e}" for name, value in report["worst"].items())
    return (
        f"Largest differences from the model: {worst}; {report['detections_compared']} detections "
        f"compared, {report['unmatched']} without counterpart."
    )


def _export_backbone(
    args: argparse.Namespace, detector: OpenDetector
) -> dict[str, Any]:
    cfg = detector.cfg
    needed = "backbone.bottom_up." if args.no_fpn else "backbone."
    model = _load(args, detector, needed)
    return export_backbone(
        model.backbone,
        args.output,
        Preprocessing.from_config(cfg),
        file_format=args.format,
        fpn=not args.no_fpn,
        source=_source(args, detector),
    )


def _source(args: argparse.Namespace, detector: OpenDetector) -> dict[str, str]:
    """Say where the weights come from, and by which flag their statistics were changed."""
    cfg, config_file, _ = detector
    source = {"config": config_file, "weights": cfg.MODEL.WEIGHTS}
    changed = {"mix": args.mix, "adapt": args.adapt}
    return source | {flag: value for flag, value in changed.items() if value}


def _load(
    args: argparse.Namespace, detector: OpenDetector, needed: str = ""
) -> nn.Module:
    cfg, _, checkpoint = detector
    model = load_model(cfg, needed, checkpoint=checkpoint)
    if args.mix or args.adapt:
        weights = cfg.MODEL.WEIGHTS
        change_statistics(model, cfg, mix=args.mix, adapt=args.adapt, weights=weights)
    return model


def _export_detector(
    args: argparse.Namespace, detector: OpenDetector
) -> dict[str, Any]:
    cfg, _, checkpoint = detector
    image = None
    if args.image:
        image = read_image_for(cfg, args.image, resize=not args.one_image)
    metadata = class_metadata(cfg, trained_classes(checkpoint))
    return export_detector(
        _load(args, detector),
        args.output,
        file_format=args.format,
        image=image,
        sides=(cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST),
        percentiles=cfg.INPUT.PERCENTILES,
        one_image=args.one_image,
        paste_masks=args.paste_masks,
        classes=classes_of(metadata),
        source=_source(args, detector),
    )
