from pathlib import Path

import pytest
import torch
from detectron2.config import CfgNode
from torch import Tensor

from gw_detectron.config import read_config
from gw_detectron.weights import register_weights

from .synthetic import authors_norms, authors_state, make_network

SMALL = """
MODEL.RESNETS.NORM FrozenBN  MODEL.RESNETS.WHITEN_POSITIONS S1-B1  MODEL.BACKBONE.FREEZE_AT 2
MODEL.FPN.OUT_CHANNELS 16  MODEL.ROI_BOX_HEAD.NUM_CONV 0  MODEL.ROI_BOX_HEAD.FC_DIM 16
MODEL.MASK_ON False  MODEL.DEVICE cpu
"""


@pytest.fixture(scope="session")
def r18() -> dict[str, Tensor]:
    """Weights of a ResNet-18 with GW at S1-B1 in the authors' layout. Do not modify."""
    return authors_state(make_network("R-18", "S1-B1"))


@pytest.fixture(scope="session")
def r18_file(r18: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in a file that records their norms."""
    path = tmp_path_factory.mktemp("weights") / "r18.pth"
    torch.save({"model": r18, "norms": authors_norms(r18)}, path)
    return path


@pytest.fixture
def detector_cfg() -> CfgNode:
    """A small Faster R-CNN with FPN on a ResNet-18 with GW at S1-B1."""
    register_weights()
    cfg = read_config("quick_schedules/mask_rcnn_R_18_FPN_BN_GW_demo.yaml")
    cfg.merge_from_list(SMALL.split())
    cfg.merge_from_list(["MODEL.FPN.NORM", "", "MODEL.ROI_BOX_HEAD.NORM", ""])
    cfg.MODEL.WEIGHTS = ""
    return cfg
