"""Group whitening applies the ReLU behind it: that may change nothing but the number of passes over memory."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling.backbone.resnet import BasicBlock, BasicStem, BottleneckBlock
from detectron2.modeling.roi_heads import FastRCNNConvFCHead, MaskRCNNConvUpsampleHead
from torch import nn

from gw_detectron.layers import BatchWhitening2d, GroupWhitening2d
from gw_detectron.modeling import GWFastRCNNConvFCHead, GWMaskRCNNConvUpsampleHead, append_relu
from gw_detectron.modeling.resnet import GWBasicBlock, GWBasicStem, GWBottleneckBlock, whitened_convs

NORMS = {
    "GW": functools.partial(GroupWhitening2d, num_groups=4),
    "BW": functools.partial(BatchWhitening2d, channels_per_group=4),
    "GN": functools.partial(nn.GroupNorm, 4),
    "FrozenBN": "FrozenBN",
}
REGIONS = ShapeSpec(channels=8, height=7, width=7)
HEAD = {"input_shape": REGIONS, "conv_dims": [8, 8, 8]}


class Component(NamedTuple):
    ours: type[nn.Module]
    stock: type[nn.Module]
    arguments: dict[str, Any]
    norm: str  # the argument that takes it
    relus: int  # behind norms


COMPONENTS = {
    "stem": Component(GWBasicStem, BasicStem, {"in_channels": 8, "out_channels": 16}, "norm", 1),
    "basic": Component(GWBasicBlock, BasicBlock, {"in_channels": 8, "out_channels": 16, "stride": 2}, "norm", 1),
    "bottleneck": Component(
        GWBottleneckBlock, BottleneckBlock, {"in_channels": 8, "out_channels": 8, "bottleneck_channels": 8}, "norm", 2
    ),
    "box head": Component(GWFastRCNNConvFCHead, FastRCNNConvFCHead, HEAD | {"fc_dims": [16]}, "conv_norm", 3),
    "mask head": Component(
        GWMaskRCNNConvUpsampleHead, MaskRCNNConvUpsampleHead, HEAD | {"num_classes": 2}, "conv_norm", 2
    ),
}


def fused(module):
    return [name for name, norm in module.named_modules() if isinstance(norm, GroupWhitening2d) and norm.relu]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("component", COMPONENTS)
def test_it_is_the_stock_component(component, norm):
    kind = COMPONENTS[component]
    ours, stock = (build(**kind.arguments, **{kind.norm: NORMS[norm]}) for build in (kind.ours, kind.stock))
    assert len(fused(ours)) == (kind.relus if norm == "GW" else 0)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(2, 8, 7, 7, generator=torch.Generator().manual_seed(0))
    results = []
    for module in (ours, stock):
        leaf = x.clone().requires_grad_()
        y = module.layers(leaf) if component == "mask head" else module(leaf)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(y.square().sum(), [leaf, *parameters], allow_unused=True)
        results.append([y.detach(), *gradients])
    assert torch.equal(results[0][0], results[1][0])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("positions", ["S1-B1", "S1-B2", "S1-B3", "S1-B12", "ALL"])
def test_only_norms_before_a_relu_apply_it(positions):
    """Behind the third one and the shortcut's there is a sum."""
    convs = whitened_convs(positions)
    block = GWBottleneckBlock(8, 16, bottleneck_channels=8, norm="BN", whiten_norm=NORMS["GW"], whiten_convs=convs)
    assert fused(block) == [f"{name}.norm" for name in ("conv1", "conv2") if name in convs]
    assert [getattr(block, name).activation is None for name in ("conv1", "conv2")] == [
        name in convs for name in ("conv1", "conv2")
    ]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("component", ["box head", "mask head"])
def test_a_hook_sees_what_the_norm_gave(component, norm):
    """The stock heads' ReLU leaves the output of a norm as it is, which full backward hooks depend on."""
    kind = COMPONENTS[component]
    module = kind.ours(**kind.arguments, **{kind.norm: NORMS[norm]})
    seen = []
    for conv in module.conv_norm_relus:
        conv.norm.register_forward_hook(lambda _, __, output: seen.append(output))
        conv.norm.register_full_backward_hook(lambda *_: None)
    x = torch.randn(2, 8, 7, 7, requires_grad=True)
    (module.layers(x) if component == "mask head" else module(x)).sum().backward()
    assert seen
    assert all((output.min() < 0) == (norm != "GW") for output in seen)


def test_without_group_whitening_a_backbone_can_be_scripted():
    """As Detectron2's own."""
    block = GWBottleneckBlock(8, 16, bottleneck_channels=8, norm="FrozenBN").eval()
    stem = GWBasicStem(3, 8, norm="").eval()
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(torch.jit.script(block)(torch.jit.script(stem)(x)), block(stem(x)))


def test_a_norm_that_is_replaced_afterwards():
    block = GWBottleneckBlock(8, 8, bottleneck_channels=8, norm=NORMS["GW"])
    stock = BottleneckBlock(8, 8, bottleneck_channels=8, norm=NORMS["GW"])
    stock.load_state_dict(block.state_dict())
    for each in (block, stock):
        each.conv2.norm = NORMS["GN"](8)
    append_relu(block.conv2)
    x = torch.randn(2, 8, 7, 7)
    assert torch.equal(block(x), stock(x))
