"""Detectron2's architectures: expected norms of the configs, and the changes that make them small."""

import argparse
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from detectron2.layers import DeformConv
from torch import nn

from gw_detectron import GroupWhitening2d

from .tiny_run import OPTS, ROOT, arguments

#: config -> its GW layers by place; all other norms of the backbone are FrozenBN
BACKBONE = {"stem": 1, "conv2": 16}
FPN = BACKBONE | {"fpn": 8}
RCNN = FPN | {"box_head": 4}
MASK = RCNN | {"mask_head": 4}
ARCHITECTURES: dict[str, dict[str, int]] = {
    "COCO-Detection/retinanet_R_50_FPN_1x_GW": BACKBONE | {"fpn": 6, "subnet": 8},
    "COCO-Detection/faster_rcnn_R_50_C4_1x_GW": BACKBONE,
    "COCO-Detection/faster_rcnn_R_50_DC5_1x_GW": BACKBONE,
    "COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x_GW": RCNN,
    "COCO-PanopticSegmentation/panoptic_fpn_R_50_1x_GW": MASK | {"sem_seg_head": 7},
    "Misc/cascade_mask_rcnn_R_50_FPN_1x_GW": MASK | {"box_head": 12},
    "Misc/mask_rcnn_R_50_FPN_1x_dconv_c3-c5_GW": MASK,
    "Misc/semantic_R_50_FPN_1x_GW": FPN | {"sem_seg_head": 7},
}


def skip_without_operators(name: str) -> None:
    """Skip a test of a deformable network where Detectron2 has no such convolutions."""
    if "dconv" not in name:
        return
    try:
        DeformConv(4, 4, 3)
    except ImportError as error:
        pytest.skip(f"this Detectron2 was not compiled: {error}")


def gw_places(model: nn.Module) -> dict[str, int]:
    """Count the GW layers of a model by place."""
    places: Counter = Counter()
    for name, module in model.named_modules():
        if isinstance(module, GroupWhitening2d):
            place = re.search(
                r"stem|fpn|box_head|mask_head|sem_seg_head|subnet|conv\d", name
            )
            places[place[0]] += 1
    return places


#: a ResNet-50 with an eighth of the channels, on images of 64 pixels
_THIN: dict[str, Any] = {
    "MODEL.WEIGHTS": "",
    "MODEL.BACKBONE.FREEZE_AT": 0,
    "MODEL.RESNETS.STEM_OUT_CHANNELS": 16,
    "MODEL.RESNETS.RES2_OUT_CHANNELS": 32,
    "MODEL.RESNETS.WIDTH_PER_GROUP": 8,
    "MODEL.RETINANET.NUM_CLASSES": 6,
    "MODEL.ROI_HEADS.NUM_CLASSES": 6,
    "MODEL.RPN.BATCH_SIZE_PER_IMAGE": 2048,  # all anchors, so that every level is in the loss
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 8,
    "MODEL.ROI_BOX_HEAD.FC_DIM": 32,
    "MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS": "(16, 16)",
    "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS": 4,
    "MODEL.SEM_SEG_HEAD.NUM_CLASSES": 2,
    "MODEL.SEM_SEG_HEAD.CONVS_DIM": 16,
    "TEST.KEYPOINT_OKS_SIGMAS": [0.1] * 4,
    "TEST.DETECTIONS_PER_IMAGE": 20,
}
_PYRAMID_SIZES = [[8], [16], [24], [32], [40]]
_NORM_KEYS = (
    "FPN.NORM",
    "ROI_BOX_HEAD.NORM",
    "ROI_MASK_HEAD.NORM",
    "RETINANET.NORM",
    "SEM_SEG_HEAD.NORM",
)


def small_norms(norm: str) -> dict[str, str]:
    """Options that put GW or a rival at every place of a small detector.

    Args:
        norm: ``GW`` at the places of the configs beside BN, or ``GN`` everywhere.
    """
    spec = f"{norm}:groups=8"
    places = {f"MODEL.{key}": spec for key in _NORM_KEYS}
    if norm == "GW":
        return {"MODEL.RESNETS.NORM": "BN", "MODEL.RESNETS.WHITEN_NORM": spec, **places}
    return {"MODEL.RESNETS.NORM": spec, "MODEL.RESNETS.WHITEN_POSITIONS": "", **places}


def small_arguments(
    name: str, norm: str, folder: Path, **changes: object
) -> argparse.Namespace:
    """The flags of a run of a config of :data:`ARCHITECTURES`, small enough for a test, on the synthetic dataset.

    Args:
        name: of the config.
        norm: as for :func:`small_norms`.
        folder: the output folder.
        changes: other options, written with ``__`` for the dot.
    """
    places = ARCHITECTURES[name]
    suffix = "_panoptic_separated" if "sem_seg_head" in places else ""
    has_pyramid = not name.endswith(("C4_1x_GW", "DC5_1x_GW"))

    # the configs choose the number of convolutions
    options = {
        key: value for key, value in OPTS.items() if not key.endswith("NUM_CONV")
    }
    options |= _THIN | small_norms(norm)
    if "box_head" not in places:
        options["MODEL.ROI_BOX_HEAD.NORM"] = ""
    options |= {
        "MODEL.ANCHOR_GENERATOR.SIZES": _PYRAMID_SIZES
        if has_pyramid
        else [[8, 16, 32]],
        "DATASETS.TRAIN": f"('gw_synthetic_train{suffix}',)",
        "DATASETS.TEST": f"('gw_synthetic_val{suffix}',)",
        "OUTPUT_DIR": folder,
    }
    for key, value in changes.items():
        options[key.replace("__", ".")] = value

    args = arguments(folder)
    args.config_file = str(ROOT / "configs" / f"{name}.yaml")
    args.opts = [str(word) for pair in options.items() for word in pair]
    return args
