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
from gw_detectron.modeling import ConvNormReLU, GWFastRCNNConvFCHead, GWMaskRCNNConvUpsampleHead
from gw_detectron.modeling.resnet import GWBasicBlock, GWBasicStem, GWBottleneckBlock, set_norms
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
        GWBasicBlock, BasicBlock, {"in_channels": 8, "out_channels": 16, "stride": 2}, "norm", 1
    ),
    "bottleneck": Component(
        GWBottleneckBlock,
        BottleneckBlock,
        {"in_channels": 8, "out_channels": 8, "bottleneck_channels": 8},
        "norm",
        2,
    ),
    "box head": Component(
        GWFastRCNNConvFCHead, FastRCNNConvFCHead, HEAD | {"fc_dims": [16]}, "conv_norm", 3
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


def images(channels: int = 8) -> torch.Tensor:
    return torch.randn(2, channels, 7, 7, generator=torch.Generator().manual_seed(0))


def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module.layers(x) if isinstance(module, MaskRCNNConvUpsampleHead) else module(x)


def block(norm: str = "GW", *, stock: bool = False) -> nn.Module:
    torch.manual_seed(0)
    module = BottleneckBlock(8, 8, bottleneck_channels=8, norm=NORMS.get(norm, norm))
    return module if stock else set_norms(module, NORMS.get(norm, norm))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("component", COMPONENTS)
def test_it_is_the_stock_component(component, norm, fused):
    kind = COMPONENTS[component]
    torch.manual_seed(0)
    if kind.norm == "norm":  # blocks of a ResNet
        ours = set_norms(kind.stock(**kind.arguments, norm="BN"), NORMS[norm])
    else:
        ours = kind.ours(**kind.arguments, **{kind.norm: NORMS[norm]})
    assert type(ours) is kind.ours
    drawn = torch.get_rng_state()
    torch.manual_seed(0)
    stock = kind.stock(**kind.arguments, **{kind.norm: NORMS[norm]})
    assert torch.equal(drawn, torch.get_rng_state()), "no random number more or less"
    assert list(ours.state_dict()) == list(stock.state_dict())
    results = []
    for module in (ours, stock):
        leaf = images().requires_grad_()
        y = run(module, leaf)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(
            y.square().sum(), [leaf, *parameters], allow_unused=True
        )
        results.append([y.detach(), *gradients])
    assert len(fused) == (kind.relus if norm == "GW" else 0)
    assert torch.equal(results[0][0], results[1][0])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("positions", ["S1-B1", "S1-B2", "S1-B3", "S1-B12", "ALL"])
def test_only_norms_before_a_relu_apply_it(positions, fused):
    """A sum follows the third norm and that of the shortcut."""
    convs = whitened_convs(positions)
    module = set_norms(
        BottleneckBlock(8, 16, bottleneck_channels=8, norm="BN"), "BN", NORMS["GW"], positions
    )
    for name, part in module.named_modules():
        part.name = name
    module(images())
    assert fused == [f"{name}.norm" for name in ("conv1", "conv2") if name in convs]


@pytest.mark.parametrize("norm", ["GW", "BN"])
def test_converting_and_freezing_keep_the_relu(norm):
    expected = block(norm, stock=True).eval()
    x = images()
    with torch.no_grad():
        expected = expected(x)
        assert torch.equal(block(norm).eval()(x), expected)
        # convert_frozen_batchnorm takes the running statistics, which are those of evaluation
        for change in (
            FrozenBatchNorm2d.convert_frozen_batchnorm,
            lambda module: module.freeze(),
        ):
            torch.testing.assert_close(change(block(norm)).eval()(x), expected)
        in_sync = nn.SyncBatchNorm.convert_sync_batchnorm(
            block(norm)
        )  # which runs on GPUs alone
        assert any(isinstance(layer, nn.SyncBatchNorm) for layer in in_sync.modules()) == (
            norm == "BN"
        )
        assert [type(layer) for layer in (in_sync.conv1, in_sync.conv2)] == [
            ConvNormReLU,
            ConvNormReLU,
        ]


def test_each_activation_is_applied(fused):
    class Shifted(nn.ReLU):
        def forward(self, x):
            return super().forward(x - 1)

    conv, x = block().conv1, images()
    y = conv.norm(F.conv2d(x, conv.weight))
    for activation in (
        nn.ReLU(),
        nn.ReLU(inplace=True),
        nn.SiLU(),
        nn.LeakyReLU(0.1),
        Shifted(),
        None,
    ):
        conv.activation = activation
        expected = activation(y.clone()) if activation else y
        assert torch.equal(conv(x), expected)
    assert len(fused) == 2
    conv.norm, conv.activation = None, nn.SiLU()
    assert torch.equal(conv(x), F.silu(F.conv2d(x, conv.weight)))


COPIES = {
    "pickle": lambda module, x: pickle.loads(pickle.dumps(module)),
    "deepcopy": lambda module, x: copy.deepcopy(module),
    "torch.compile": lambda module, x: torch.compile(module, backend="eager", fullgraph=True),
    "torch.export": lambda module, x: torch.export.export(module, (x,)).module(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("norm", ["GW", "FrozenBN"])
@pytest.mark.parametrize("way", COPIES)
def test_copies_and_graphs_compute_the_same(way, norm):
    module, x = block(norm).eval(), images()
    with torch.no_grad():
        expected = block(norm, stock=True).eval()(x)
        torch.testing.assert_close(COPIES[way](module, x)(x), expected)


@pytest.mark.parametrize("fuses", [False, True])
def test_a_subclass_with_its_own_forward_is_fused_only_if_it_says_so(fuses):
    class Shifted(GroupWhitening2d):
        def forward(self, x, relu=False):
            assert relu is fuses
            return super().forward(x) - 1

    class Fusing(Shifted):
        fuses_relu = True

    norm = (Fusing if fuses else Shifted)(8, 4)
    conv = ConvNormReLU(3, 8, 3, norm=norm, activation=nn.ReLU())
    y = conv(torch.randn(2, 3, 6, 6))
    assert bool(y.min() < 0) is fuses  # a fused norm's output is final
