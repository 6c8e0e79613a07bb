from pathlib import Path

import pytest
import torch
from detectron2.config import CfgNode, get_cfg
from torch import Tensor

from gw_detectron import add_gw_config
from gw_detectron.weights import register_weights

from .synthetic import authors_norms, authors_state, make_network


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
    cfg = get_cfg()
    add_gw_config(cfg)
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.BACKBONE.NAME = "build_gw_resnet_fpn_backbone"
    cfg.MODEL.RESNETS.DEPTH = 18
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 64
    cfg.MODEL.RESNETS.NORM = "FrozenBN"
    cfg.MODEL.RESNETS.WHITEN_POSITIONS = "S1-B1"
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res2", "res3", "res4", "res5"]
    cfg.MODEL.RESNETS.STRIDE_IN_1X1 = False
    cfg.MODEL.FPN.IN_FEATURES = ["res2", "res3", "res4", "res5"]
    cfg.MODEL.FPN.OUT_CHANNELS = 16
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[32], [64], [128], [256], [512]]
    cfg.MODEL.RPN.IN_FEATURES = ["p2", "p3", "p4", "p5", "p6"]
    cfg.MODEL.ROI_HEADS.NAME = "StandardROIHeads"
    cfg.MODEL.ROI_HEADS.IN_FEATURES = ["p2", "p3", "p4", "p5"]
    cfg.MODEL.ROI_BOX_HEAD.NAME = "GWFastRCNNConvFCHead"
    cfg.MODEL.ROI_BOX_HEAD.NUM_FC = 1
    cfg.MODEL.ROI_BOX_HEAD.FC_DIM = 16
    cfg.MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION = 7
    return cfg
