"""Measure time and memory of Group Whitening and its alternatives side by side.

`layer` measures one layer at the sizes of a detector, `model` measures whole training iterations, `detector` the
predictions of a trained detector and of its exported files, and `kernels` each Triton kernel of a layer on a GPU. The
table is printed and written to --output with .csv and .png at the end; an interrupted run writes nothing. With
--compare the ratios are compared with an earlier table; the exit status is 1 if they are worse by more than
--tolerance.
"""

import argparse
import shlex
import sys
from pathlib import Path

import torch

from gw_detectron.cli import new_parser

from . import detector_benchmark, kernel_benchmark, layer_benchmark, network_benchmark
from .comparison import TOLERANCE, compare
from .detector_benchmark import DetectorSettings
from .environment import machine_name, select_device
from .kernel_benchmark import KernelSettings
from .layer_benchmark import MEMORY, LayerSettings
from .network_benchmark import MODELS, NetworkSettings
from .networks import Sizes
from .plot import plot
from .providers import MODES, OPTIONAL, PRECISIONS, PROVIDERS
from .summary import summary
from .table import find_csv, read_csv, write_csv
from .validation import output_paths


def get_parser() -> argparse.ArgumentParser:
    """Build the parser of this tool."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = new_parser(__doc__, "layer --device cpu --loaded", "detector output/demo exported/model.onnx")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="layer|model|detector|kernels")
    layer = kinds.add_parser("layer", formatter_class=raw, description="Measure one layer and its alternatives.")
    layer.epilog = "providers:\n" + "\n".join(f"  {name:18}{text}" for name, (text, _) in PROVIDERS.items())
    layer.set_defaults(settings=layer_settings, plan=layer_benchmark.plan_layer, run=layer_benchmark.run_layer)
    _add_layer_flags(layer)
    model = kinds.add_parser("model", description="Measure training iterations, as multiples of the network with BN.")
    model.set_defaults(
        settings=model_settings, plan=network_benchmark.plan_networks, run=network_benchmark.run_networks
    )
    _add_model_flags(model)
    detector = kinds.add_parser("detector", description="Measure predictions, as multiples of the first detector's.")
    detector.set_defaults(
        settings=lambda args: DetectorSettings(select_device(args.device), args.detectors, args.image, args.repeats),
        plan=detector_benchmark.plan_detectors,
        run=detector_benchmark.run_detectors,
    )
    detector.add_argument("detectors", nargs="+", metavar="MODEL", help="run folder, checkpoint or exported file")
    detector.add_argument("--image", default="", metavar="FILE", help="default: a drawn scene")
    kernels = kinds.add_parser("kernels", description="Measure each Triton kernel beside a copy of as many bytes.")
    kernels.set_defaults(settings=kernel_settings, plan=kernel_benchmark.plan_kernels, run=kernel_benchmark.run_kernels)
    _add_kernel_flags(kernels)
    for sub, kind in ((layer, "layer"), (model, "model"), (detector, "detector"), (kernels, "kernels")):
        default = Path("output", "benchmark", kind)
        add = sub.add_argument
        add("--device", metavar="cpu|cuda", help="default: cuda if there is one")
        add("--repeats", type=int, default=20, metavar="N", help="timed rounds, default: %(default)s")
        add("--output", type=Path, default=default, metavar="FILE", help="path without suffix, default: %(default)s")
        compare_help = "an earlier table, or a folder with one of this machine; without a value: %(const)s"
        add("--compare", type=Path, nargs="?", const=Path("docs", "benchmark"), metavar="CSV", help=compare_help)
        tolerance_help = "accepted growth of a ratio, as a fraction; default: %(default)s"
        add("--tolerance", type=float, default=TOLERANCE, metavar="FRACTION", help=tolerance_help)
    return parser


def _add_layer_flags(parser: argparse.ArgumentParser) -> None:
    default = [name for name in PROVIDERS if name not in OPTIONAL]
    dtypes = f"of {' '.join(PRECISIONS)}; bf16 and fp16 use autocast; default: fp32"
    add = parser.add_argument
    add("--providers", nargs="+", default=default, metavar="NAME", help=f"default: {' '.join(default)}")
    add("--compiled", action="store_true", help=f"also measure {' '.join(OPTIONAL)}")
    add("--shapes", nargs="+", metavar="NxCxHxW", help="default: feature maps of a detector, see docs/performance.md")
    add("--batch-scale", type=int, default=1, metavar="K", help="multiply the samples of each shape by K")
    add("--dtypes", nargs="+", default=["fp32"], metavar="DTYPE", help=dtypes)
    modes = [*MODES, MEMORY]
    add("--modes", nargs="+", default=modes, metavar="MODE", help=f"default: {' '.join(modes)}")
    add("--loaded", action="store_true", help="measure times again beside as many busy processes as torch has threads")
    add("--groups", type=int, default=64, metavar="g", help="groups of whitening, default: %(default)s")
    add("--iters", type=int, default=5, metavar="T", help="Newton iterations of whitening, default: %(default)s")


def _add_kernel_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    sweep_help = "also measure other tile sizes, warps and stages, one number at a time"
    add("--shapes", nargs="+", metavar="NxCxHxW", help="default: feature maps of a detector, see docs/performance.md")
    add("--dtypes", nargs="+", default=["fp32", "bf16"], metavar="DTYPE", help="default: fp32 bf16")
    add("--groups", type=int, default=64, metavar="g", help="default: %(default)s")
    add("--iters", type=int, default=5, metavar="T", help="default: %(default)s")
    add("--sweep", action="store_true", help=sweep_help)
    add("--compile-only", type=int, metavar="CAPABILITY", help="for a GPU that is not there, e.g. 90; nothing is timed")


def kernel_settings(args: argparse.Namespace) -> KernelSettings:
    """Convert the flags of ``kernels``."""
    device = torch.device("meta") if args.compile_only is not None else select_device(args.device)
    capability = args.compile_only
    if capability is None:
        major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        capability = 10 * major + minor
    shapes = tuple(map(layer_benchmark.parse_shape, args.shapes)) if args.shapes else kernel_benchmark.SHAPES
    return KernelSettings(device, capability, shapes, args.dtypes, args.repeats, args.groups, args.iters, args.sweep)


def layer_settings(args: argparse.Namespace) -> LayerSettings:
    """Convert the flags of ``layer``."""
    shapes, memory_shapes = layer_benchmark.SHAPES, layer_benchmark.MEMORY_SHAPES
    if args.shapes:
        shapes, memory_shapes = tuple(map(layer_benchmark.parse_shape, args.shapes)), ()
    return LayerSettings(
        select_device(args.device),
        shapes,
        memory_shapes,
        args.dtypes,
        [*args.providers, *(OPTIONAL if args.compiled else ())],
        args.modes,
        args.repeats,
        args.groups,
        args.iters,
        args.batch_scale,
        args.loaded,
    )


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    sizes = Sizes()
    variants = f"default: all, {' '.join(network_benchmark.all_variants())}; the baseline is always measured"
    shorter = "their shorter side in pixels, default: %(default)s; the configs train with 800"
    add = parser.add_argument
    add("--models", nargs="+", metavar="NAME", help=f"of {' '.join(MODELS)}; default: all with one of the variants")
    add("--variants", nargs="+", metavar="NAME", help=variants)
    add("--dtype", default="fp32", help="fp32, bf16 or fp16 (autocast), default: %(default)s")
    add(
        "--batch-size",
        type=int,
        default=sizes.batch_size,
        metavar="N",
        help="images of a classifier, default: %(default)s",
    )
    add("--image-size", type=int, default=sizes.image_size, metavar="N", help="their side, default: %(default)s")
    add(
        "--detector-batch",
        type=int,
        default=sizes.detector_batch,
        metavar="N",
        help="images of a detector, default: %(default)s",
    )
    add("--detector-image", type=int, default=sizes.detector_image, metavar="N", help=shorter)


def model_settings(args: argparse.Namespace) -> NetworkSettings:
    """Convert the flags of ``model``."""
    sizes = Sizes(args.batch_size, args.image_size, args.detector_batch, args.detector_image)
    models = args.models or network_benchmark.models_with(args.variants)
    return NetworkSettings(select_device(args.device), models, args.variants, args.dtype, sizes, args.repeats)


def main(args: argparse.Namespace) -> bool:
    """Measure, print and write the table; return False if it is worse than the one to compare with."""
    settings = args.settings(args)
    if args.compare is not None and args.compare.is_dir():
        args.compare = find_csv(args.compare, args.kind, machine_name(settings.device))
    reference = None if args.compare is None else read_csv(args.compare)
    if reference is not None:  # fail before the measurement, not after
        compare(args.plan(settings), reference, args.tolerance)
    csv_path, plot_path = output_paths(args.output, args.compare)
    try:
        table = args.run(settings, f"python tools/benchmark.py {shlex.join(sys.argv[1:])}")
    except KeyboardInterrupt:
        print("\nInterrupted: no table is written.", file=sys.stderr)
        raise SystemExit(130) from None  # the exit status of a shell for Ctrl-C
    print(summary(table))
    write_csv(table, csv_path)
    plot(table, plot_path)
    print(f"\nWrote {csv_path} and {plot_path}.")
    if reference is None:
        return True
    comparison = compare(table, reference, args.tolerance)
    print(f"\nCompared with {args.compare}\n{comparison}")
    return not comparison.worse
