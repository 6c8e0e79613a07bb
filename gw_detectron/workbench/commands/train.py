"""Train or evaluate a detector from a yaml, with Detectron2's flags or under torchrun."""

import argparse

from detectron2.engine import default_argument_parser
from detectron2.engine.launch import DEFAULT_TIMEOUT

from ..run import train as runs
from ..run.processes import launch_from_args
from ..run.request import RunRequest
from .parsers import RunParser, add_statistics_flags, new_parser

_NOTE = "Evaluation writes to OUTPUT_DIR/inference and leaves the training's log.txt and config.yaml untouched."
_EXAMPLES = (
    "--num-gpus 8 --config-file COCO-Detection/faster_rcnn_R_50_FPN_4conv1fc_1x_GW.yaml",
    "--num-gpus 0 --auto --train-json data.json --train-images photos --val-fraction 0.2 OUTPUT_DIR output/mine",
    "output/mine --num-gpus 0 --resume",
)
_EVALUATION_EXAMPLES = (
    "output/mine --num-gpus 0",
    "output/mine --num-gpus 0 --val-json more.json --val-images more --dataset more",
)
#: in place of Detectron2's own texts, which also describe LazyConfigs
_HELP = {
    "config_file": "config: a yaml file, or a name that `gw-detectron list configs` prints",
    "resume": "continue from the last checkpoint in OUTPUT_DIR, or evaluate it",
    "num_gpus": "number of GPUs per machine; 0 runs on the CPU (default: %(default)s)",
    "opts": "config keys to change, as KEY VALUE; they come last",
}
_TRAINING_ONLY = ("eval_only", "overwrite", "auto", "epochs", "minutes")
_SWITCHES = {
    "ignore-preflight": "start even if the pre-run checks fail; print their messages as warnings",
    "auto": "set image size, anchors, limits, learning rate, length and other keys from the training json, and print "
    "why; keys that you give win. Default of --config-file: a detector for your own data",
    "overwrite": "replace an earlier run in OUTPUT_DIR: its checkpoints and results go when the new one begins",
    "allow-partial": "accept MODEL.WEIGHTS that lack a part of the backbone, which is then randomly initialized, and "
    "weights that were trained with other norms",
    "deterministic": "use only deterministic operations of torch: the same bits each time on the same machine; slower. "
    "Equal runs also need an equal SEED. Without SEED a random one is used, which gw-detectron weights describe prints",
}
_DATASETS = {
    "train-json": (
        "FILE",
        "labels to train on: a COCO json, YOLO's data.yaml, or a folder of Pascal VOC, YOLO or masks",
    ),
    "train-images": (
        "DIR",
        "the folder of the photos, to which file_name in a json is relative",
    ),
    "val-json": ("FILE", "labels to evaluate on; default: val of a data.yaml"),
    "val-images": ("DIR", "the folder of the photos of --val-json"),
    "dataset": (
        "NAME",
        "the datasets are named NAME_train and NAME_val (default: custom)",
    ),
    "datasets": ("FILE", "a yaml with any number of datasets, in place of these flags"),
}


def get_parser(*, evaluation: bool = False) -> argparse.ArgumentParser:
    """Create Detectron2's parser with this package's flags; ``evaluation`` sets --eval-only and hides the others."""
    parser = new_parser(
        "RUN: a run folder or a checkpoint, in place of --config-file and, to evaluate, MODEL.WEIGHTS.",
        *(_EVALUATION_EXAMPLES if evaluation else _EXAMPLES),
        note=_NOTE,
        kind=RunParser,
        parents=[default_argument_parser()],
        conflict_handler="resolve",
    )
    for name, text in _SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument(
        "--dist-timeout",
        type=int,
        default=int(DEFAULT_TIMEOUT.total_seconds()),
        metavar="SECONDS",
        help="end the run if a process waits longer for another one; raise it if evaluations take longer "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--epochs",
        type=float,
        metavar="N",
        help="train for N passes over the images, not for the yaml's MAX_ITER",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="train and evaluate for about N minutes: some steps are timed, then the length is chosen",
    )
    add_statistics_flags(parser, "evaluate a second time, with")
    add_dataset_flags(parser)

    for action in parser._actions:
        action.help = _HELP.get(action.dest, action.help)
        if evaluation and action.dest in _TRAINING_ONLY:
            action.help = argparse.SUPPRESS
        if action.dest in ("mix", "adapt") and not evaluation:
            action.help = argparse.SUPPRESS
    parser.set_defaults(eval_only=evaluation)
    return parser


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the user's own data, a :class:`.DatasetFlags`."""
    own = parser.add_argument_group(
        "your own data",
        "photos with labels; they set DATASETS and NUM_CLASSES, see docs/your_data.md",
    )
    for name, (metavar, text) in _DATASETS.items():
        own.add_argument(f"--{name}", metavar=metavar, help=text)
    text = (
        "without --val-json: evaluate on this share of --train-json, by the hash of file names, "
        "and train on the others"
    )
    own.add_argument("--val-fraction", type=float, metavar="F", help=text)


def main(args: argparse.Namespace) -> None:
    """Run the training or evaluation in the processes that the flags ask for."""
    launch_from_args(run_here, args)


def run_here(args: argparse.Namespace) -> dict | None:
    """Run the training or evaluation in this process; return its results."""
    return runs.main(RunRequest.from_flags(args))
