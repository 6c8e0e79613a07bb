"""Convert, verify and describe weight files."""

import argparse
import os
from collections.abc import Callable
from typing import Any

from ...weights import convert_file, detector_file
from ...weights.network import PREPROCESSING
from ...weights.records import describe_checkpoint, format_config, format_description
from ...weights.verify import verify
from ..images.samples import sample_images
from .parsers import new_parser

_NORM = "norm of the layers without running statistics, e.g. GW, GW:groups=32 or GN; needed if %s does not record it"


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    parser = new_parser(
        __doc__,
        "convert resnet50_gw.pth R-50-GW.pkl --norm GW",
        "verify R-50-GW.pkl --source resnet50_gw.pth --norm GW",
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
        help="a .pkl file to write, for MODEL.WEIGHTS; the config it needs goes beside it",
    )
    add("--norm", help=_NORM % "SRC")
    add(
        "--preprocessing",
        choices=PREPROCESSING,
        help="images of the training, if the file does not record it",
    )
    add("--force", action="store_true", help="overwrite DST")

    text = "Compare torchvision's ResNet and Detectron2's after each stage; exit with 1 if they differ"
    add = _add_action(actions, "verify", _verify, text)
    add("weights", metavar="WEIGHTS", help="converted weights, or a gw:// address")
    add(
        "--source",
        metavar="FILE",
        help="the file WEIGHTS was converted from, to verify the conversion",
    )
    add("--norm", help=_NORM % "the source")

    add = _add_action(
        actions, "describe", _describe, "Show what a checkpoint or weight file records"
    )
    add("file", metavar="FILE", help="checkpoint, weight file or run folder")
    add("--config", action="store_true", help="print only the config of the run, a yaml file")
    return parser


def _add_action(
    actions: Any, name: str, run: Callable[..., Any], text: str
) -> Callable[..., Any]:
    parser = actions.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser.add_argument


def main(args: argparse.Namespace) -> bool | None:
    """Run the chosen action; return False if verified networks differ."""
    return args.run(args)


def _convert(args: argparse.Namespace) -> None:
    conversion = convert_file(
        args.source,
        args.target,
        norm=args.norm,
        preprocessing=args.preprocessing,
        overwrite=args.force,
    )
    network, norms, count = (
        conversion.architecture.name,
        conversion.positions,
        len(conversion.tensors),
    )
    dropped = len(conversion.source_tensors) - count
    print(
        f"{args.target}: {count} tensors of {network} with {norms}; {dropped} of the classifier or counters left out. "
        "The .yaml beside it has their config keys."
    )


def _verify(args: argparse.Namespace) -> bool:
    result = verify(args.weights, sample_images(), source=args.source, norm=args.norm)
    print(result)
    return result.agrees


def _describe(args: argparse.Namespace) -> None:
    description = describe_checkpoint(
        detector_file(args.file) if os.path.isdir(args.file) else args.file
    )
    print(format_config(description) if args.config else format_description(description))
