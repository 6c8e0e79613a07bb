#!/usr/bin/env python
"""Measures time and memory of group whitening beside its alternatives, which take turns in one run.

`layer` times one layer at the sizes of a detector, `model` whole training iterations. The table is printed and written
as --output with .csv and .png when all of it is measured: a run that is interrupted leaves no files. With --compare its
ratios are held against an earlier table: the exit status is 1 if they have become worse by more than --tolerance.
"""

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks/ is not part of the package
from benchmarks import (
    MEMORY,
    MEMORY_SHAPES,
    MODELS,
    MODES,
    OPTIONAL,
    PRECISIONS,
    PROVIDERS,
    SHAPES,
    TOLERANCE,
    LayerSettings,
    ModelSettings,
    Sizes,
    benchmark_layer,
    benchmark_model,
    compare,
    draw,
    models_with,
    output_files,
    parse_shape,
    pick_device,
    planned_layer,
    planned_model,
    read_csv,
    scaled,
    summary,
    variants,
    write_csv,
)
from gw_detectron.engine.launch import errors_reported


def get_parser() -> argparse.ArgumentParser:
    """Returns the parser of this tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="layer|model")
    layer = kinds.add_parser("layer", formatter_class=argparse.RawDescriptionHelpFormatter)
    layer.description = "Times one layer beside its alternatives."
    layer.epilog = "providers:\n" + "\n".join(f"  {name:18}{what}" for name, what in PROVIDERS.items())
    layer.set_defaults(settings=layer_settings, planned=planned_layer, benchmark=benchmark_layer)
    _add_layer(layer)
    model = kinds.add_parser("model")
    model.description = "Times training iterations of whole networks, as multiples of the network with BN."
    model.set_defaults(settings=model_settings, planned=planned_model, benchmark=benchmark_model)
    _add_model(model)
    for sub, kind in ((layer, "layer"), (model, "model")):
        default = Path("output", "benchmark", kind)
        add = sub.add_argument
        add("--device", metavar="cpu|cuda", help="default: cuda if there is one")
        add("--repeats", type=int, default=20, metavar="N", help="rounds in which all take turns, default: %(default)s")
        add("--output", type=Path, default=default, metavar="FILE", help="without suffix, default: %(default)s")
        add("--compare", metavar="CSV", help="an earlier table of the same benchmark and device")
        what = "how much larger than before a ratio may be, as a part of it; default: %(default)s"
        add("--tolerance", type=float, default=TOLERANCE, metavar="PART", help=what)
    return parser


def _add_layer(parser: argparse.ArgumentParser) -> None:
    default = [name for name in PROVIDERS if name not in OPTIONAL]
    dtypes = f"of {' '.join(PRECISIONS)}; bf16 and fp16 are autocast; default: fp32"
    add = parser.add_argument
    add("--providers", nargs="+", default=default, metavar="NAME", help=f"default: {' '.join(default)}")
    add("--compiled", action="store_true", help=f"also {' '.join(OPTIONAL)}")
    add("--shapes", nargs="+", metavar="NxCxHxW", help="default: maps of a detector, see docs/performance.md")
    add("--batch-scale", type=int, default=1, metavar="K", help="K times as many samples in each shape")
    add("--dtypes", nargs="+", default=["fp32"], metavar="DTYPE", help=dtypes)
    add("--modes", nargs="+", default=[*MODES, MEMORY], metavar="MODE", help="default: %(default)s")
    add("--groups", type=int, default=64, metavar="g", help="of whitening, default: %(default)s")
    add("--iters", type=int, default=5, metavar="T", help="of whitening, default: %(default)s")


def layer_settings(args: argparse.Namespace) -> LayerSettings:
    """What the flags of ``layer`` ask for."""
    shapes, memory_shapes = SHAPES, MEMORY_SHAPES
    if args.shapes:
        shapes, memory_shapes = tuple(map(parse_shape, args.shapes)), ()
    return LayerSettings(
        pick_device(args.device),
        scaled(shapes, args.batch_scale),
        scaled(memory_shapes, args.batch_scale),
        args.dtypes,
        [*args.providers, *(OPTIONAL if args.compiled else ())],
        args.modes,
        args.repeats,
        args.groups,
        args.iters,
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    sizes = Sizes()
    which = f"default: all, {' '.join(variants())}; what they are divided by is always measured"
    shorter = "the shorter side in pixels, default: %(default)s; the configs train with 800"
    add = parser.add_argument
    add("--models", nargs="+", metavar="NAME", help=f"of {' '.join(MODELS)}; default: all with one of the variants")
    add("--variants", nargs="+", metavar="NAME", help=which)
    add("--dtype", default="fp32", help="fp32, bf16 or fp16 (autocast), default: %(default)s")
    add("--batch-size", type=int, default=sizes.batch, metavar="N", help="of classifiers, default: %(default)s")
    add("--image-size", type=int, default=sizes.image, metavar="N", help="of classifiers, default: %(default)s")
    add("--detector-batch", type=int, default=sizes.detector_batch, metavar="N", help="default: %(default)s")
    add("--detector-image", type=int, default=sizes.detector_image, metavar="N", help=shorter)


def model_settings(args: argparse.Namespace) -> ModelSettings:
    """What the flags of ``model`` ask for."""
    sizes = Sizes(args.batch_size, args.image_size, args.detector_batch, args.detector_image)
    models = args.models or models_with(args.variants)
    return ModelSettings(pick_device(args.device), models, args.variants, args.dtype, sizes, args.repeats)


def main(args: argparse.Namespace, command: str = "") -> bool:
    """Measures, prints and writes the table, and says whether it is no worse than the one to compare with."""
    settings = args.settings(args)
    reference = None if args.compare is None else read_csv(args.compare)
    if reference is not None:  # refused now, not after minutes of measuring
        compare(args.planned(settings), reference, args.tolerance)
    files = output_files(args.output, args.compare)
    try:
        table = args.benchmark(settings, command)
    except KeyboardInterrupt:
        print("\nInterrupted while measuring: no table is written.", file=sys.stderr)
        raise SystemExit(130) from None  # what a shell gives for Ctrl-C
    print(summary(table))
    write_csv(table, files[0])
    draw(table, files[1])
    print(f"\nWrote {files[0]} and {files[1]}.")
    if reference is None:
        return True
    comparison = compare(table, reference, args.tolerance)
    print(f"\nAgainst {args.compare}\n{comparison}")
    return not comparison.worse


if __name__ == "__main__":
    with errors_reported():
        words = f"python tools/benchmark.py {shlex.join(sys.argv[1:])}"
        sys.exit(0 if main(get_parser().parse_args(), words) else 1)
