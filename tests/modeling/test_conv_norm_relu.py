"""A fused ReLU changes the number of passes over memory and nothing else."""

import copy
import functools
import pickle
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from detectron2.layers import FrozenBatchNorm2d, ShapeSpec
from detectron2.modeling.backbone.resnet import BasicBlock, BasicStem, BottleneckBlock
from detectron2.modeling.roi_heads import FastRCNNConvFCHead, MaskRCNNConvUpsampleHead
from torch import nn

from gw_detectron.layers import BatchWhitening2d, GroupWhitening2d
from gw_detectron.modeling import (
    ConvNormReLU,
    GWFastRCNNConvFCHead,
    GWMaskRCNNConvUpsampleHead,
)
from gw_detectron.modeling.resnet import (
    GWBasicBlock,
    GWBasicStem,
    GWBottleneckBlock,
    set_norms,
)
from gw_detectron.norms import whitened_convs

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
    norm: str  # the argument that takes the norm
    relus: int  # ReLUs behind norms


COMPONENTS = {
    "stem": Component(
        GWBasicStem, BasicStem, {"in_channels": 8, "out_channels": 16}, "norm", 1
    ),
    "basic": Component(
        GWBasicBlock,
        BasicBlock,
        {"in_channels": 8, "out_channels": 16, "stride": 2},
        "norm",
        1,
    ),
    "bottleneck": Component(
        GWBottleneckBlock,
        BottleneckBlock,
        {"in_channels": 8, "out_channels": 8, "bottleneck_channels": 8},
        "norm",
        2,
    ),
    "box head": Component(
        GWFastRCNNConvFCHead,
        FastRCNNConvFCHead,
        HEAD | {"fc_dims": [16]},
        "conv_norm",
        3,
    ),
    "mask head": Component(
        GWMaskRCNNConvUpsampleHead,
        MaskRCNNConvUpsampleHead,
        HEAD | {"num_classes": 2},
        "conv_norm",
        2,
    ),
}


@pytest.fixture
def fused(monkeypatch) -> list[str]:
    """Names of the modules, as far as a test gives them, that were called with ``relu=True``."""
    calls = []
    forward = GroupWhitening2d.forward

    def record(self, x, relu=False):
        if relu:
            calls.append(getattr(self, "name", ""))
        return forward(self, x, relu=relu)

    monkeypatch.setattr(GroupWhitening2d, "forward", record)
    return calls


IMAGES = torch.randn(2, 8, 7, 7, generator=torch.Generator().manual_seed(0))


def block(norm: str = "GW", *, stock: bool = False) -> nn.Module:
    layer = NORMS.get(norm, norm)
    torch.manual_seed(0)
    module = BottleneckBlock(8, 8, bottleneck_channels=8, norm=layer)
    return module if stock else set_norms(module, layer)


def output_and_gradients(module: nn.Module) -> list[torch.Tensor | None]:
    """Return the output on the images, and the gradients of its squares."""
    leaf = IMAGES.clone().requires_grad_()
    forward = module.layers if isinstance(module, MaskRCNNConvUpsampleHead) else module
    y = forward(leaf)
    parameters = [
        parameter for parameter in module.parameters() if parameter.requires_grad
    ]
    gradients = torch.autograd.grad(
        y.square().sum(), [leaf, *parameters], allow_unused=True
    )
    return [y.detach(), *gradients]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("component", COMPONENTS)
def test_it_is_the_stock_component(component, norm, fused):
    kind = COMPONENTS[component]
    torch.manual_seed(0)
    if kind.norm == "norm":  # blocks of a ResNet
        ours = set_norms(kind.stock(**kind.arguments, norm="BN"), NORMS[norm])
    else:
        ours = kind.ours(**kind.arguments, conv_norm=NORMS[norm])
    drawn = torch.get_rng_state()
    torch.manual_seed(0)
    stock = kind.stock(**kind.arguments, **{kind.norm: NORMS[norm]})

    assert torch.equal(drawn, torch.get_rng_state()), "no random number more or less"
    assert type(ours) is kind.ours
    assert list(ours.state_dict()) == list(stock.state_dict())

    y, *gradients = output_and_gradients(ours)
    expected, *expected_gradients = output_and_gradients(stock)

    assert len(fused) == (kind.relus if norm == "GW" else 0)
    assert torch.equal(y, expected)
    torch.testing.assert_close(gradients, expected_gradients)


@pytest.mark.parametrize("positions", ["S1-B1", "S1-B2", "S1-B3", "S1-B12", "ALL"])
def test_only_norms_before_a_relu_apply_it(positions, fused):
    """A sum follows the third norm and that of the shortcut."""
    module = BottleneckBlock(8, 16, bottleneck_channels=8, norm="BN")
    set_norms(module, "BN", NORMS["GW"], positions)
    for name, part in module.named_modules():
        part.name = name

    module(IMAGES)

    whitened = whitened_convs(positions)
    assert fused == [f"{name}.norm" for name in ("conv1", "conv2") if name in whitened]


# convert_frozen_batchnorm takes the running statistics, which are those of evaluation
@pytest.mark.parametrize(
    "change",
    [FrozenBatchNorm2d.convert_frozen_batchnorm, lambda module: module.freeze()],
)
@pytest.mark.parametrize("norm", ["GW", "BN"])
def test_freezing_keeps_the_relu(norm, change):
    stock = block(norm, stock=True).eval()
    ours = block(norm).eval()
    with torch.no_grad():
        expected = stock(IMAGES)
        assert torch.equal(ours(IMAGES), expected)

        frozen = change(ours).eval()
        torch.testing.assert_close(frozen(IMAGES), expected)


def test_synchronizing_keeps_the_fused_convolutions():
    """Torch's synchronized BN runs on GPUs only."""
    module = nn.SyncBatchNorm.convert_sync_batchnorm(block("BN"))

    for conv in (module.conv1, module.conv2):
        assert type(conv) is ConvNormReLU
        assert isinstance(conv.norm, nn.SyncBatchNorm)


class Shifted(nn.ReLU):
    def forward(self, x):
        return super().forward(x - 1)


@pytest.mark.parametrize(
    ("activation", "count"),
    [
        (nn.ReLU(), 1),
        (nn.ReLU(inplace=True), 1),
        (nn.SiLU(), 0),
        (nn.LeakyReLU(0.1), 0),
        (Shifted(), 0),
        (None, 0),
    ],
)
def test_each_activation_is_applied(fused, activation, count):
    conv = block().conv1
    y = conv.norm(F.conv2d(IMAGES, conv.weight))
    conv.activation = activation

    output = conv(IMAGES)

    expected = y if activation is None else activation(y)
    assert torch.equal(output, expected)
    assert len(fused) == count


def test_a_convolution_without_norm_is_activated():
    conv = block().conv1
    conv.norm = None
    conv.activation = nn.SiLU()

    output = conv(IMAGES)

    assert torch.equal(output, F.silu(F.conv2d(IMAGES, conv.weight)))


COPIES = {
    "pickle": lambda module, x: pickle.loads(pickle.dumps(module)),
    "deepcopy": lambda module, x: copy.deepcopy(module),
    "torch.compile": lambda module, x: torch.compile(
        module, backend="eager", fullgraph=True
    ),
    # strict, as in torch 2.7, takes the weight of Weight Standardization itself
    "torch.export": lambda module, x: torch.export.export(
        module, (x,), strict=False
    ).module(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("norm", ["GW", "FrozenBN"])
@pytest.mark.parametrize("way", COPIES)
def test_copies_and_graphs_compute_the_same(way, norm):
    module = block(norm).eval()
    stock = block(norm, stock=True).eval()
    with torch.no_grad():
        copied = COPIES[way](module, IMAGES)
        torch.testing.assert_close(copied(IMAGES), stock(IMAGES))


@pytest.mark.parametrize("fuses", [False, True])
def test_a_subclass_with_its_own_forward_is_fused_only_if_it_says_so(fuses):
    class ShiftedNorm(GroupWhitening2d):
        def forward(self, x, relu=False):
            assert relu is fuses
            return super().forward(x) - 1

    class FusingNorm(ShiftedNorm):
        fuses_relu = True

    norm = FusingNorm(8, 4) if fuses else ShiftedNorm(8, 4)
    conv = ConvNormReLU(3, 8, 3, norm=norm, activation=nn.ReLU())

    y = conv(torch.randn(2, 3, 6, 6))

    has_negative_values = bool(y.min() < 0)
    assert has_negative_values is fuses  # a fused norm's output is final
