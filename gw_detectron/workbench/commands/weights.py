"""Convert and describe weight files."""

import argparse
import os
from collections.abc import Callable
from typing import Any

from ...weights import convert_file, detector_file
from ...weights.describing import describe_checkpoint, format_config, format_description
from ...weights.network_record import PREPROCESSING
from .parsers import new_parser


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    parser = new_parser(
        __doc__,
        "convert resnet50_gw.pth R-50-GW.pkl --norm GW",
        "describe output/model_final.pth",
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")

    add = _add_action(
        actions,
        "convert",
        _convert,
        "Convert ImageNet weights of a ResNet for a Detectron2 backbone",
    )
    add(
        "source",
        metavar="SRC",
        help="a .pth or .safetensors file by the authors, torchvision or timm",
    )
    add(
        "target",
        metavar="DST",
        help="a .pkl or .safetensors file to write, for MODEL.WEIGHTS; the config it needs goes beside it",
    )
    add(
        "--norm",
        help="norm of the layers without running statistics, e.g. GW, GW:groups=32 or GN; needed "
        "if SRC does not record it",
    )
    add(
        "--preprocessing",
        choices=PREPROCESSING,
        help="images of the training, if the file does not record it",
    )
    add("--force", action="store_true", help="overwrite DST")

    add = _add_action(
        actions, "describe", _describe, "Show what a checkpoint or weight file records"
    )
    add("file", metavar="FILE", help="checkpoint, weight file or run folder")
    add(
        "--config",
        action="store_true",
        help="print only the config of the run, a yaml file",
    )
    return parser


def _add_action(
    actions: Any, name: str, run: Callable[..., None], text: str
) -> Callable[..., Any]:
    parser = actions.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser.add_argument


def main(args: argparse.Namespace) -> None:
    """Run the chosen action."""
    args.run(args)


def _convert(args: argparse.Namespace) -> None:
    conversion = convert_file(
        args.source,
        args.target,
        norm=args.norm,
        preprocessing=args.preprocessing,
        overwrite=args.force,
    )
    print(
        f"{args.target}: {len(conversion.tensors)} tensors of {conversion.architecture.name} with "
        f"{conversion.positions}; a classifier is left out. The .yaml beside it has their config "
        "keys."
    )


def _describe(args: argparse.Namespace) -> None:
    file = detector_file(args.file) if os.path.isdir(args.file) else args.file
    description = describe_checkpoint(file)
    if args.config:
        print(format_config(description))
    else:
        print(format_description(description))
