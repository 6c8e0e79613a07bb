"""A run small enough for a test.

As a script, ``tiny_run.py SCRIPT ARGS``, it starts another script on the small dataset in the folder $SHAPES.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

from detectron2.config import CfgNode

from gw_detectron.workbench.commands.train import get_parser
from gw_detectron.workbench.run import RunRequest, prepare

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "quick_schedules" / "mask_rcnn_R_18_FPN_BN_GW_demo.yaml"
OPTS = {
    "MODEL.DEVICE": "cpu",
    "MODEL.FPN.OUT_CHANNELS": 32,
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN": 60,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 30,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 30,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 10,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 16,
    "MODEL.ROI_BOX_HEAD.NUM_CONV": 1,
    "MODEL.ROI_BOX_HEAD.CONV_DIM": 32,
    "MODEL.ROI_BOX_HEAD.FC_DIM": 32,
    "MODEL.ROI_MASK_HEAD.NUM_CONV": 1,
    "MODEL.ROI_MASK_HEAD.CONV_DIM": 32,
    "INPUT.MIN_SIZE_TRAIN": "(64,)",
    "INPUT.MIN_SIZE_TEST": 64,
    "DATALOADER.NUM_WORKERS": 0,
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.BASE_LR": 0.005,
    "SOLVER.MAX_ITER": 3,
    "SOLVER.STEPS": "(2,)",
    "SOLVER.WARMUP_ITERS": 1,
    "SOLVER.CHECKPOINT_PERIOD": 2,
    "TEST.EVAL_PERIOD": 0,
    "SEED": 7,
}
RETINANET = {
    "MODEL__META_ARCHITECTURE": "GWRetinaNet",
    "MODEL__MASK_ON": False,
    "MODEL__BACKBONE__NAME": "build_gw_retinanet_resnet_fpn_backbone",
    "MODEL__RESNETS__OUT_FEATURES": "['res3', 'res4', 'res5']",
    "MODEL__FPN__IN_FEATURES": "['res3', 'res4', 'res5']",
    "MODEL__RETINANET__NUM_CLASSES": 6,
}


def key_words(values: Mapping[str, object]) -> list[str]:
    """Config keys and their values, as words of a command line."""
    return [str(word) for pair in values.items() for word in pair]


def words(output: Path, *flags: str, **overrides: object) -> list[str]:
    """The words after ``train_net.py``; overrides are written with ``__`` for the dot."""
    opts = {**OPTS, "OUTPUT_DIR": output}
    for name, value in overrides.items():
        opts[name.replace("__", ".")] = value
    return ["--config-file", str(CONFIG), *flags, *key_words(opts)]


def arguments(output: Path, *flags: str, **overrides: object) -> argparse.Namespace:
    return get_parser().parse_args(words(output, *flags, **overrides))


def config_of(args: argparse.Namespace) -> CfgNode:
    """Return the config of a run with parsed flags."""
    return prepare(RunRequest.from_flags(args)).cfg


def environment(**variables: str) -> dict[str, str]:
    """The environment of a subprocess that runs this file, which needs SHAPES, or imports the package."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
        **variables,
    }


if __name__ == "__main__":
    from tests.shapes import register_shapes

    register_shapes(Path(os.environ["SHAPES"]))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
