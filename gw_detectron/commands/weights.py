"""Convert, verify and describe weight files."""

import argparse
import json
import os
from dataclasses import asdict

from ..checkpoint.records import describe_checkpoint, format_config, format_description
from ..cli import new_parser, print_page
from ..data import synthetic_images
from ..prediction import detector_file
from ..weights import convert_file
from ..weights.network import PREPROCESSING
from ..weights.verify import verify

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

    convert = actions.add_parser("convert", help="convert ImageNet weights for a Detectron2 backbone")
    convert.description = (
        "Convert weights of a ResNet or ResNeXt by the authors, torchvision or timm, and write the config they need. "
        "Nothing is written unless every tensor fits. The classifier is left out."
    )
    convert.add_argument("source", metavar="SRC", help="a .pth or .safetensors file")
    convert.add_argument("target", metavar="DST", help="a .pkl file to write, for MODEL.WEIGHTS")
    convert.add_argument("--norm", help=_NORM % "SRC")
    convert.add_argument("--preprocessing", choices=PREPROCESSING, help="of the training's images; if not recorded")
    convert.add_argument("--force", action="store_true", help="overwrite DST")
    convert.set_defaults(run=_convert)

    check = actions.add_parser("verify", help="compare the features of torchvision's ResNet and Detectron2's")
    check.description = "Compare the features of both networks after each stage. The exit status is 1 if they differ."
    check.add_argument("weights", metavar="WEIGHTS", help="converted weights, or a gw:// address")
    check.add_argument("--source", metavar="FILE", help="the file WEIGHTS was converted from, to verify the conversion")
    check.add_argument("--norm", help=_NORM % "the source")
    check.set_defaults(run=_verify)

    describe = actions.add_parser("describe", help="show what a checkpoint or weight file records")
    describe.description = "Show iteration, versions, config, seed, start weights, norms and tensors of a file."
    describe.add_argument("file", metavar="FILE", help="checkpoint, weight file or run folder")
    describe.add_argument("--config", action="store_true", help="print only the config of the run, a yaml file")
    describe.set_defaults(run=_describe)

    for action in (check, describe):
        action.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(args: argparse.Namespace) -> bool | None:
    """Run the chosen action; return False if verified networks differ."""
    return args.run(args)


def _convert(args: argparse.Namespace) -> None:
    conversion = convert_file(
        args.source, args.target, norm=args.norm, preprocessing=args.preprocessing, overwrite=args.force
    )
    network, norms, count = conversion.architecture.name, conversion.positions, len(conversion.tensors)
    dropped = len(conversion.source_tensors) - count
    print(
        f"{args.target}: {count} tensors of {network} with {norms}; {dropped} of the classifier or counters left out. "
        "The .yaml beside it has their config keys."
    )


def _verify(args: argparse.Namespace) -> bool:
    result = verify(args.weights, synthetic_images(), source=args.source, norm=args.norm)
    print(json.dumps(asdict(result) | {"agrees": result.agrees}, indent=2) if args.json else result)
    return result.agrees


def _describe(args: argparse.Namespace) -> None:
    description = describe_checkpoint(detector_file(args.file) if os.path.isdir(args.file) else args.file)
    if args.json:
        print_page(json.dumps(description, indent=2))
    else:
        print_page(format_config(description) if args.config else format_description(description))
