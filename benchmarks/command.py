"""Measure time and memory of Group Whitening and its alternatives side by side.

`layer` measures one layer at the sizes of a detector, `model` whole training iterations, `detector` the predictions of
trained detectors, and `kernels` each Triton kernel of a layer on a GPU. Rows are written to --output with .csv as they
come; at the end the table is printed and plotted to .png. Compare the ratios of two runs, not their milliseconds.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from gw_detectron.errors import check_minimum
from gw_detectron.workbench.commands.parsers import new_parser

from .environment import describe, select_device
from .kernel_benchmark import SHAPES as KERNEL_SHAPES
from .kernel_benchmark import measure_kernels
from .layer_benchmark import MEMORY, SHAPES, measure_layers, parse_shape
from .network_benchmark import (
    MODELS,
    OPTIONAL_MODELS,
    measure_detectors,
    measure_networks,
)
from .networks import Sizes
from .providers import MODES, OPTIONAL, PRECISIONS, PROVIDERS, Case
from .table import Row, Table, plot, summary, write_csv


def get_parser() -> argparse.ArgumentParser:
    """Build the parser of this tool."""
    parser = new_parser(
        __doc__, "layer --device cpu", "detector output/mine output/other"
    )
    kinds = parser.add_subparsers(
        dest="kind", required=True, metavar="layer|model|detector|kernels"
    )
    layer = kinds.add_parser(
        "layer",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="one layer and its alternatives",
    )
    layer.epilog = "providers:\n" + "\n".join(
        f"  {name:18}{text}" for name, (text, _) in PROVIDERS.items()
    )
    default = [name for name in PROVIDERS if name not in OPTIONAL]
    modes = [*MODES, MEMORY]
    layer.add_argument(
        "--providers", nargs="+", default=default, choices=PROVIDERS, metavar="NAME"
    )
    layer.add_argument(
        "--batch-scale",
        type=int,
        default=1,
        metavar="K",
        help="multiply the samples of each shape",
    )
    layer.add_argument(
        "--modes",
        nargs="+",
        default=modes,
        choices=modes,
        metavar="MODE",
        help=" ".join(modes),
    )
    model = kinds.add_parser(
        "model", help="training iterations, as multiples of the network with BN"
    )
    model.add_argument(
        "--models",
        nargs="+",
        default=[name for name in MODELS if name not in OPTIONAL_MODELS],
        choices=MODELS,
        metavar="NAME",
        help=f"{' '.join(MODELS)}; default: all but {', '.join(OPTIONAL_MODELS)}",
    )
    model.add_argument(
        "--variants",
        nargs="+",
        metavar="NAME",
        help="default: all; BN is always measured",
    )
    model.add_argument(
        "--dtype",
        default="fp32",
        choices=("fp32", "bf16", "fp16"),
        help="bf16, fp16: autocast",
    )
    for name, value in vars(Sizes()).items():
        model.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=value,
            metavar="N",
            help="%(default)s",
        )
    detector = kinds.add_parser(
        "detector", help="predictions, as multiples of the first detector's"
    )
    detector.add_argument(
        "detectors", nargs="+", metavar="MODEL", help="run folder or checkpoint"
    )
    detector.add_argument(
        "--image", default="", metavar="FILE", help="default: a drawn scene"
    )
    kernels = kinds.add_parser(
        "kernels", help="each Triton kernel, beside a copy of as many bytes"
    )
    tune_help = "also measure other tile sizes, warps and stages, one number at a time"
    kernels.add_argument("--tune", action="store_true", help=tune_help)
    kernels.add_argument(
        "--channels-last", action="store_true", help="memory format of the input"
    )
    kernels.add_argument(
        "--compile-only",
        type=int,
        metavar="CAPABILITY",
        help="for a GPU that is not there, e.g. 90; nothing is timed",
    )
    for sub, dtypes in ((layer, ["fp32"]), (kernels, ["fp32", "bf16"])):
        sub.add_argument(
            "--shapes",
            nargs="+",
            type=parse_shape,
            metavar="NxCxHxW",
            help="default: those of a detector",
        )
        sub.add_argument(
            "--dtypes",
            nargs="+",
            default=dtypes,
            choices=PRECISIONS,
            help="bf16 and fp16 use autocast",
        )
        sub.add_argument(
            "--groups", type=int, default=64, metavar="g", help="default: %(default)s"
        )
        sub.add_argument(
            "--iters", type=int, default=5, metavar="T", help="default: %(default)s"
        )
    for kind, sub in kinds.choices.items():
        output = Path("output", "benchmark", kind)
        sub.add_argument(
            "--device", choices=("cpu", "cuda"), help="default: cuda if there is one"
        )
        sub.add_argument(
            "--repeats",
            type=int,
            default=20,
            metavar="N",
            help="timed rounds, default: %(default)s",
        )
        sub.add_argument(
            "--output",
            type=Path,
            default=output,
            metavar="FILE",
            help="without suffix: %(default)s",
        )
    return parser


def main(args: argparse.Namespace) -> None:
    """Measure, and write each row as it comes; print and plot the table."""
    for name in ("repeats", "groups", "iters", "batch_scale"):
        check_minimum(f"--{name.replace('_', '-')}", getattr(args, name, 1))
    command = f"python tools/benchmark.py {shlex.join(sys.argv[1:])}"
    compiling = getattr(args, "compile_only", None)
    device = torch.device("meta") if compiling else select_device(args.device)
    header = describe(
        device, getattr(args, "dtypes", [getattr(args, "dtype", "fp32")]), command
    )
    if args.kind in ("layer", "kernels"):
        header["settings"] = f"groups={args.groups} iters={args.iters}" + (
            f" sm_{compiling}" if compiling else ""
        )
    table = Table(args.kind, header, rows := [])
    for row in _rows(args, device):
        rows.append(row)
        write_csv(table, args.output.with_suffix(".csv"))
    print(summary(table))
    plot(table, args.output.with_suffix(".png"))
    print(f"\nWrote {args.output.with_suffix('.csv')} and .png.")


def _rows(args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    if args.kind == "detector":
        return measure_detectors(args.detectors, args.image, args.repeats, device)
    if args.kind == "model":
        sizes = Sizes(**{name: getattr(args, name) for name in vars(Sizes())})
        return measure_networks(
            args.models, args.variants, args.dtype, sizes, args.repeats, device
        )
    if args.kind == "kernels":
        numbers = (args.groups, args.iters, args.repeats)
        options = (args.compile_only, args.tune, args.channels_last)
        return measure_kernels(
            args.shapes or KERNEL_SHAPES, args.dtypes, *numbers, device, *options
        )
    cases = [
        Case(
            (n * args.batch_scale, *sides), dtype, mode, device, args.groups, args.iters
        )
        for dtype in args.dtypes
        for mode in args.modes
        for n, *sides in args.shapes or SHAPES
    ]
    return measure_layers(cases, args.providers, args.repeats)
