"""Export a whole Faster R-CNN, Mask R-CNN or RetinaNet with FPN, and compare its detections with the model's.

The folder --output gets the file, parity.json (differences from the model) and README.md (code that loads the file).
The file takes images of any size and needs neither Detectron2 nor this package. Other detectors are refused; for their
backbones see gw-detectron export-backbone.
"""

import argparse
import json
import os

from tabulate import tabulate

from ..cli import new_parser, parse_names
from ..engine.run_datasets import use_recorded_datasets
from ..export import (
    DETECTOR_FORMATS,
    EvaluationImages,
    dataset_classes,
    export_detector,
    load_model,
    read_image_for,
)
from .export_flags import add_export_flags, read_model_config, requested_card


def get_parser() -> argparse.ArgumentParser:
    parser = new_parser(
        __doc__,
        "--config-file output/config.yaml --weights output/model_final.pth --output detector --format onnx",
        "--config-file output/config.yaml --weights output/model_final.pth --output detector --one-image --paste-masks",
    )
    parser.add_argument("--format", choices=DETECTOR_FORMATS, default="pt2", help="default: %(default)s")
    parser.add_argument(
        "--detections", type=int, metavar="K", help="detections per image, default: TEST.DETECTIONS_PER_IMAGE"
    )
    parser.add_argument(
        "--one-image",
        action="store_true",
        help="take one image in its original size, and resize it in the file as evaluation does",
    )
    parser.add_argument(
        "--paste-masks", action="store_true", help="with --one-image: binary masks as large as the image"
    )
    parser.add_argument(
        "--class-names",
        metavar="A,B,...",
        type=parse_names,
        help="class names in the file; default: those of the test dataset in the config",
    )
    parser.add_argument(
        "--image",
        metavar="FILE",
        help="image to compare on, best with many objects; default: one of --dataset, or drawn",
    )
    parser.add_argument("--dataset", metavar="NAME", help="compare the AP on this registered dataset")
    parser.add_argument(
        "--images", type=int, default=100, metavar="N", help="images of --dataset, default: %(default)s"
    )
    add_export_flags(parser)
    return parser


def main(args: argparse.Namespace) -> None:
    cfg = read_model_config(args)
    if args.dataset:
        use_recorded_datasets(cfg, args.config_file, os.path.dirname(args.config_file), needed=[args.dataset])
    model = load_model(cfg)
    evaluation = EvaluationImages.load(cfg, args.dataset, args.images) if args.dataset else None
    # after the annotations are read, which gives a dataset its class names
    names, ids = (args.class_names, None) if args.class_names else dataset_classes(cfg, args.config_file)
    report = export_detector(
        model,
        args.output,
        file_format=args.format,
        detections=args.detections,
        image=read_image_for(cfg, args.image, resize=not args.one_image) if args.image else None,
        evaluation=evaluation,
        sides=(cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST),
        one_image=args.one_image,
        paste_masks=args.paste_masks,
        class_names=names,
        category_ids=ids,
        source={"config": args.config_file, "weights": cfg.MODEL.WEIGHTS},
        card=requested_card(args, cfg),
    )
    if args.json:
        print(json.dumps(report, indent=2))
        return
    rows = [
        [name, f"{report['worst'][name]:.1e}", allowed]
        for name, allowed in report["tolerance"].items()
        if name in report["worst"]
    ]
    print(tabulate(rows, headers=["output", "largest difference", "allowed"], disable_numparse=True))
    print(f"{report['detections_compared']} detections compared, {report['unmatched']} without counterpart.")
    if accuracy := report.get("accuracy"):
        rows = [[task, accuracy["model"][task], accuracy["exported"][task]] for task in accuracy["model"]]
        print(f"AP on {accuracy['images']} images of {accuracy['dataset']}:")
        print(tabulate(rows, headers=["task", "model", "exported"], floatfmt=".4f"))
    print(f"{args.output}/{report['file']} agrees with the model; {args.output}/README.md shows how to load it.")
