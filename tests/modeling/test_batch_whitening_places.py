"""Batch whitening in the frozen stages of a backbone."""

import copy

import pytest
import torch
from detectron2.layers import FrozenBatchNorm2d, ShapeSpec
from torch import nn

from gw_detectron.layers import BatchWhitening2d, FrozenBatchWhitening2d
from gw_detectron.modeling import build_gw_resnet_backbone

NORMS = (BatchWhitening2d, FrozenBatchNorm2d, nn.BatchNorm2d)
FROZEN = (FrozenBatchWhitening2d, FrozenBatchNorm2d)
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
def test_freeze_at_makes_frozen_twins(resnet18, spec, everywhere):
    model = resnet18.MODEL
    model.BACKBONE.FREEZE_AT = 2
    model.RESNETS.WHITEN_NORM = spec
    model.RESNETS.NORM = spec if everywhere else "BN"

    backbone = build_gw_resnet_backbone(resnet18, RGB)

    for name, module in backbone.named_modules():
        if isinstance(module, NORMS):
            in_frozen_stage = name.startswith(("stem", "res2"))
            trainable = [value.requires_grad for value in module.parameters()]
            assert isinstance(module, FROZEN) == in_frozen_stage
            assert any(trainable) != in_frozen_stage
    assert isinstance(backbone.stem.conv1.norm, FrozenBatchWhitening2d)
    assert isinstance(backbone.res2[0].conv2.norm, FrozenBatchWhitening2d)

    before = copy.deepcopy(backbone.state_dict())
    features = backbone(torch.randn(2, 3, 64, 64))
    features["res5"].sum().backward()
    for name, value in backbone.state_dict().items():
        if name.startswith(("stem", "res2")):
            assert torch.equal(value, before[name])
