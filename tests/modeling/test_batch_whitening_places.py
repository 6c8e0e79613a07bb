"""Batch whitening in the frozen stages of a backbone."""

import pytest
import torch
from detectron2.layers import FrozenBatchNorm2d, ShapeSpec
from torch import nn

from gw_detectron.layers import BatchWhitening2d, FrozenBatchWhitening2d
from gw_detectron.modeling import build_gw_resnet_backbone

RGB = ShapeSpec(channels=3)
FAMILY = [
    "BW:channels=8",
    "BW:channels=24,solver=zca,running=covariance",  # 24 divides no channel count, so each last group is smaller
    "BW:channels=8,solver=zca_entropy",
    "BW:channels=8,solver=pivoted_cholesky,corr=true",
    "BW:channels=8,rotation=cayley",
    "BN:channels=8,rotation=cayley",
]


@pytest.mark.parametrize("spec", FAMILY)
@pytest.mark.parametrize("everywhere", [False, True])
def test_freeze_at_makes_frozen_twins(cfg, spec, everywhere):
    cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 18, 64
    cfg.MODEL.BACKBONE.FREEZE_AT = 2
    cfg.MODEL.RESNETS.WHITEN_NORM = spec
    cfg.MODEL.RESNETS.NORM = spec if everywhere else "BN"
    backbone = build_gw_resnet_backbone(cfg, RGB)
    for name, module in backbone.named_modules():
        if isinstance(module, (BatchWhitening2d, FrozenBatchNorm2d, nn.BatchNorm2d)):
            frozen = isinstance(module, (FrozenBatchWhitening2d, FrozenBatchNorm2d))
            assert frozen == name.startswith(("stem", "res2"))
            assert frozen != any(parameter.requires_grad for parameter in module.parameters())
    assert isinstance(backbone.stem.conv1.norm, FrozenBatchWhitening2d)
    assert isinstance(backbone.res2[0].conv2.norm, FrozenBatchWhitening2d)
    before = {
        name: value.clone()
        for name, value in backbone.state_dict().items()
        if name.startswith(("stem", "res2"))
    }
    backbone(torch.randn(2, 3, 64, 64))["res5"].sum().backward()
    after = backbone.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
