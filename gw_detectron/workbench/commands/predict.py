"""Predict on images, folders and videos with a trained detector.

The folder --output gets predictions.json (COCO results), images.json (their images and
categories), counts.csv (objects of each class in each image) and pictures/ with the objects drawn.
RUN is a run folder (OUTPUT_DIR of a training) or a checkpoint. With --preview, the annotations of
a dataset are drawn instead.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from ...errors import ConfigError, first_line, printable, summarize_names
from ...weights import detector_file
from ...weights.opening import BEST_CHECKPOINT
from .. import predict as prediction
from ..console import check_folder
from ..predict.results_folder import not_read_note, usual_tile
from ..predict.tiled_predictor import STATISTICS
from ..run.processes import spare_core
from .parsers import MixedParser, add_statistics_flags, new_parser

_BEST = "best"


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    parser = new_parser(
        __doc__,
        "output/mydata photos --output predictions",
        "output/mydata 'photos/**/*.jpg' clip.mp4 --output predictions --score-threshold 0.7",
        "--preview annotations.json photos --output preview",
        "--preview yolo/data.yaml --output preview",
        kind=MixedParser,
        note="The exit status is 1 if a file cannot be read or needs too much memory; the others "
        "are predicted.",
    )

    add = parser.add_argument
    add(
        "model",
        metavar="RUN",
        nargs="?",
        default="",
        help="run folder or checkpoint; with --preview of a json the folder of images",
    )
    add(
        "inputs",
        metavar="INPUT",
        nargs="*",
        help="image, folder of images, pattern in quotes, or video (with OpenCV)",
    )
    add(
        "--output",
        required=True,
        metavar="DIR",
        help="folder to create; replaces earlier predictions",
    )
    add(
        "--config-file",
        metavar="FILE",
        help="config of a checkpoint; default: config.yaml beside it",
    )

    add(
        "--score-threshold",
        type=_threshold,
        default=0.5,
        metavar="S",
        help="keep scores above S, default: %(default)s; best: those of the highest F1 by the report of RUN",
    )

    add(
        "--preview",
        metavar="JSON",
        help="draw up to 50 images with these labels: a COCO json, or a folder as for --train-json",
    )

    add(
        "--tiles",
        type=int,
        metavar="N",
        help="predict large images in overlapping tiles of N pixels, e.g. 1024",
    )
    add(
        "--overlap",
        type=int,
        metavar="N",
        help="pixels that neighboring tiles share, default: an eighth of N",
    )
    add(
        "--statistics",
        choices=STATISTICS,
        help="GW and GN see the whole image (default), or each tile (faster)",
    )

    add_statistics_flags(parser, "predict with")
    add("--no-pictures", action="store_true", help="draw no pictures")

    add("--device", metavar="D", help="cpu or cuda; default: a GPU, if there is one")
    add(
        "--class-names",
        metavar="A,B,...",
        help="class names of a checkpoint; default: from its record or config",
    )
    add(
        "--opts",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="KEY VALUE",
        help="config keys to change; comes last",
    )
    return parser


def _threshold(text: str) -> float | str:
    return text if text == _BEST else float(text)


def _best_threshold(detector: str) -> float:
    """Read the threshold of the best F1 from the report of these weights, and print where it is from."""
    report = Path(detector).with_name("report") / "report.json"
    try:
        numbers = json.loads(report.read_text())
        summary = numbers["summary"]
        if Path(summary["weights"]).name != Path(detector).name:
            raise ValueError(f"it is of {summary['weights']}")
        if report.stat().st_mtime < Path(detector).stat().st_mtime:
            raise ValueError("it is older than the weights")
        threshold = float(numbers["errors"]["best_threshold"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"--score-threshold best: '{report}' tells none ({first_line(error)}). Fix: gw-detectron report RUN, or "
            "give a number."
        ) from None
    print(f"Score threshold {threshold:.3g}: the best F1 on {summary['dataset']}.")
    return threshold


def main(args: argparse.Namespace) -> bool:
    """Return whether all inputs were predicted."""
    if args.tiles is not None and args.adapt:
        raise ConfigError(
            "--tiles: not with --adapt, which shrinks whole photos. Fix: leave one out, or give --mix 0.5 in place of "
            "--adapt."
        )
    if args.tiles is None and (args.overlap is not None or args.statistics is not None):
        raise ConfigError(
            "--overlap, --statistics: only for tiles. Fix: give --tiles, e.g. 1024."
        )
    check_folder(args.output)
    if args.preview:
        _preview(args)
        return True
    if not args.model:
        raise ConfigError("RUN: not given. Fix: give a run folder or a checkpoint.")

    sources = prediction.find_sources(args.inputs)
    prediction.check_output(args.output, sources)  # before seconds of loading
    detector = detector_file(args.model)
    threshold = args.score_threshold
    if threshold == _BEST:
        threshold = _best_threshold(detector)
    # with a GPU, a thread less hardly matters
    with spare_core(args.device or "cpu"):
        predictor = _open_predictor(args, detector, threshold)
        summary = prediction.write_predictions(
            predictor, sources, args.output, pictures=not args.no_pictures
        )

    for line in _notes(summary, predictor):
        print(printable(line), file=sys.stderr)
    speed = summary.images / summary.seconds
    print(
        f"{summary.images} images, {summary.detections} objects with a score above "
        f"{threshold:.3g}, {speed:.1f} images per second."
    )
    is_best = detector.endswith(BEST_CHECKPOINT)
    print(f"Detector: {detector}{' (the best one by TEST.BEST)' if is_best else ''}")
    print(f"Predictions: {args.output}")
    return not summary.failed


def _notes(
    summary: prediction.PredictionSummary,
    predictor: prediction.Predictor | prediction.TiledPredictor,
) -> Iterator[str]:
    """Say which images were not predicted, or not whole, or not at their size."""
    for name, reason in summary.failed.items():
        yield f"{name}: {reason}"
    if summary.not_read:
        yield not_read_note(summary.not_read)

    if summary.shrunk:
        names = summarize_names(summary.shrunk)
        tile = usual_tile(predictor)
        yield (
            f"shrunk more than twice as much as the training images: {names}. Fix: if objects have as many pixels as "
            f"in training, give --tiles {tile}; if they fill as much of the image, change nothing."
        )

    if summary.full:
        limit = predictor.cfg.TEST.DETECTIONS_PER_IMAGE
        is_tiled = isinstance(predictor, prediction.TiledPredictor)
        tiles = "smaller --tiles" if is_tiled else "--tiles"
        yield (
            f"as many objects as the detector gives ({limit}), so perhaps not all: {summarize_names(summary.full)}. "
            f"Fix: add --opts TEST.DETECTIONS_PER_IMAGE {2 * limit} as the last words, or give {tiles}."
        )

    if summary.images and not summary.detections:
        yield (
            "no object has a score above --score-threshold. Fix: give a lower one, or best: the one of "
            "the highest F1, which `gw-detectron report RUN` finds."
        )


def _preview(args: argparse.Namespace) -> None:
    """Draw annotations; refuse flags of the prediction."""
    parser = get_parser()
    given = {
        name
        for name, value in vars(args).items()
        if value and value != parser.get_default(name)
    }
    others = given - {"model", "output", "preview"}
    if others:
        raise ConfigError(
            f"--preview: takes no {', '.join(sorted(others))}. Fix: give only the folder of images."
        )

    count = prediction.write_preview(args.preview, args.model, args.output)
    print(
        f"{count} images with their annotations, and the number of objects in all images: "
        f"{args.output}"
    )


def _open_predictor(
    args: argparse.Namespace, detector: str, threshold: float
) -> prediction.Predictor | prediction.TiledPredictor:
    names = None
    if args.class_names:
        names = [name.strip() for name in args.class_names.split(",")]
    predictor = prediction.open_predictor(
        detector,
        config_file=args.config_file,
        opts=args.opts,
        score_threshold=threshold,
        device=args.device,
        class_names=names,
        mix=args.mix,
        adapt=args.adapt,
    )
    if args.tiles is None:
        return predictor

    overlap = args.tiles // 8 if args.overlap is None else args.overlap
    statistics = args.statistics or "image"
    return prediction.TiledPredictor(predictor, args.tiles, overlap, statistics)
