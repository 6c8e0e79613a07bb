"""Oracle of conversions: torchvision's ResNet, in float64."""

import copy

import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from torch import nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.resnet import Bottleneck

from gw_detectron.config import changed_config, default_config
from gw_detectron.modeling import build_gw_resnet_backbone
from gw_detectron.modeling.resnet import STAGES
from gw_detectron.weights import Conversion

TOLERANCE = (
    1e-7  # relative: rounding stays far below it, and even a missing eps exceeds it
)


@torch.no_grad()
def feature_error(model: nn.Module, conversion: Conversion) -> float:
    """Return the largest relative difference of stage outputs from torchvision's network.

    Detectron2's network is built by the config of the conversion.
    """
    cfg = default_config()
    cfg.merge_from_other_cfg(CfgNode(conversion.config()))
    needed = conversion.preprocessing
    assert needed.input_format == cfg.INPUT.FORMAT
    assert [*needed.pixel_mean] == cfg.MODEL.PIXEL_MEAN
    assert [*needed.pixel_std] == cfg.MODEL.PIXEL_STD

    images = torch.randn(
        1, 3, 96, 64, generator=torch.Generator().manual_seed(1)
    ).double()
    expected = torchvision_stages(model, needed.stride_in_1x1)(images)
    outputs = detectron2_backbone(conversion, cfg)(images)

    errors = []
    for stage, reference in expected.items():
        assert reference.std() > 1e-3  # a network of zeros would agree with anything
        errors.append((outputs[stage] - reference).abs().max() / reference.abs().max())
    return max(errors).item()


def torchvision_stages(model: nn.Module, stride_in_1x1: bool) -> nn.Module:
    """Return torchvision's ResNet in float64, up to its stages, by Detectron2's names."""
    model = copy.deepcopy(model).double()
    for block in model.modules():
        if isinstance(block, Bottleneck) and stride_in_1x1:
            block.conv1.stride, block.conv2.stride = (
                block.conv2.stride,
                block.conv1.stride,
            )
    return IntermediateLayerGetter(
        model, {f"layer{i}": f"res{i + 1}" for i in range(1, 5)}
    )


def detectron2_backbone(conversion: Conversion, cfg: CfgNode) -> nn.Module:
    """Build the backbone of a config with converted weights, in float64 and evaluation mode."""
    every_stage = {
        "MODEL.BACKBONE.FREEZE_AT": 0,
        "MODEL.RESNETS.OUT_FEATURES": list(STAGES),
    }
    model = build_gw_resnet_backbone(
        changed_config(cfg, every_stage), ShapeSpec(channels=3)
    )
    model.load_state_dict(conversion.tensors)
    return model.double().eval()
