"""``convert_norms`` on models of torch, torchvision and Detectron2, against models built with the norm."""

import contextlib
import copy
import functools
import pickle
import warnings
from collections import Counter

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from detectron2.layers import CycleBatchNormList, FrozenBatchNorm2d
from detectron2.modeling import build_model
from torch import nn
from torch.nn.utils import prune

from gw_detectron import convert_norms
from gw_detectron.config import changed_config, read_config
from gw_detectron.errors import ConfigError, NormError
from gw_detectron.layers import (
    BatchWhitening2d,
    FrozenBatchWhitening2d,
    GroupWhitening2d,
)
from gw_detectron.norms import norm_rows, norms_at, resolve_norm
from gw_detectron.norms.conversion import ConversionReport

GW8 = "GW:groups=8,iters=5,eps=1e-05,solver=newton"


IMAGE = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def small(norm=nn.BatchNorm2d, **options) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        norm(16, **options),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        norm(16, **options),
    )


def changed_layers(report: ConversionReport) -> list[str]:
    return [row.layer for row in report.layers if row.after != row.before]


def trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def trained(model: nn.Module) -> nn.Module:
    """Give norms random parameters and statistics."""
    generator = torch.Generator().manual_seed(1)
    for row in norm_rows(model):
        layer = model.get_submodule(row.layer)
        for name, tensor in layer.state_dict().items():
            lowest = 0.5 if "var" in name else 0.1
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + lowest)
    return model


def assert_equal_networks(model: nn.Module, built: nn.Module) -> None:
    state = model.state_dict()
    assert list(state) == list(built.state_dict())

    built.load_state_dict(state)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(model(x), built(x))


@contextlib.contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("key", ["*", nn.BatchNorm2d, "ALL"])
def test_a_torchvision_network_equals_the_one_built_with_the_norm(key):
    """All norms; their parameters are 1 and 0."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50()
    norm = functools.partial(GroupWhitening2d, num_groups=8)
    built = torchvision.models.resnet50(norm_layer=norm)

    report = convert_norms(model, {key: "GW:groups=8"})

    assert {row[1:] for row in report.layers} == {("BN", GW8)}
    assert_equal_networks(model, built)


@pytest.mark.parametrize(
    ("positions", "count"),
    [("S1", 1), ("S1-B1", 17), ("S1-B2", 17), ("S1-B12", 33), ("ALL", 53)],
)
def test_positions_are_those_of_the_configs(positions, count):
    changes = {
        "MODEL.DEVICE": "cpu",
        "MODEL.RESNETS.NORM": "BN",
        "MODEL.BACKBONE.FREEZE_AT": 0,
    }
    cfg = read_config("COCO-Detection/faster_rcnn_R_50_FPN_4conv1fc_1x_GW.yaml")
    cfg = changed_config(cfg, changes)
    cfg.MODEL.RESNETS.WHITEN_POSITIONS = positions
    built = build_model(cfg)
    cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
    model = build_model(cfg)

    report = convert_norms(model, positions)

    assert len(changed_layers(report)) == count
    assert norm_rows(model) == norm_rows(built)
    assert list(model.state_dict()) == list(built.state_dict())


@pytest.mark.parametrize("name", ["fasterrcnn_resnet50_fpn", "retinanet_resnet50_fpn"])
def test_torchvisions_detectors_train_with_two_norms(name):
    build = getattr(torchvision.models.detection, name)
    model = build(weights=None, weights_backbone=None, min_size=64)

    report = convert_norms(model, {"S1-B2": "GW:groups=32", "*": "GN"})

    kinds = Counter(row.after.partition(":")[0] for row in report.layers)
    assert kinds == {"GW": 17, "GN": 53 - 17}

    picture = torch.rand(3, 64, 64)
    target = {
        "boxes": torch.tensor([[8.0, 8.0, 40.0, 40.0]]),
        "labels": torch.tensor([1]),
    }
    losses = model.train()([picture], [target])
    loss = sum(losses.values())
    loss.backward()
    assert loss.isfinite()
    last_norm = model.backbone.body.layer4[2].bn2
    assert last_norm.weight.grad.any()


@pytest.mark.parametrize(
    ("name", "norm", "norm_layer"),
    [
        ("resnet18", "GW:groups=8", resolve_norm("GW:groups=8")),
        ("resnext50_32x4d", "GW:groups=8", resolve_norm("GW:groups=8")),
        ("seresnet50", "GW:groups=8", resolve_norm("GW:groups=8")),
        # a layer with its activation takes timm's norms only
        ("densenet121", "GN", "groupnorm"),
    ],
)
def test_a_timm_network_equals_the_one_built_with_the_norm(name, norm, norm_layer):
    built = timm.create_model(name, norm_layer=norm_layer, num_classes=3)
    model = timm.create_model(name, num_classes=3)

    convert_norms(model, {"*": norm})

    assert_equal_networks(model, built)


def test_scale_shift_dtype_mode_and_frozen_parameters_stay():
    model = trained(small()).double().eval()
    model[1].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())

    with pytest.warns(
        UserWarning, match=r"2 layers \(1, ...\) lose their running statistics"
    ):
        convert_norms(model, {"*": "GW:groups=8"})

    after = model.state_dict()
    for name in ("1.weight", "1.bias", "4.weight", "4.bias"):
        assert torch.equal(after[name], before[name])
    first, second = model[1], model[4]
    assert first.weight.dtype == torch.float64
    assert not first.training
    assert not first.weight.requires_grad
    assert second.weight.requires_grad


@pytest.mark.parametrize("norm", ["SyncBN", "FrozenBN", "BN"])
def test_running_statistics_stay_where_both_have_them(norm):
    model = trained(small(FrozenBatchNorm2d if norm == "BN" else nn.BatchNorm2d)).eval()
    variance = model[1].running_var.clone()
    expected = model(IMAGE)

    with no_warnings():
        convert_norms(model, {"*": norm})

    assert torch.equal(model[1].running_var, variance)
    assert model[4].weight.requires_grad == (norm != "FrozenBN")
    if norm != "SyncBN":  # torch's needs a GPU
        assert torch.allclose(model(IMAGE), expected, atol=1e-6)


def test_no_norm_and_no_affine():
    model = small(nn.BatchNorm2d, affine=False)

    convert_norms(model, {"1": "", "4": "BW:channels=8"})

    assert isinstance(model[1], nn.Identity)
    assert isinstance(model[4], BatchWhitening2d)
    assert model[4].weight is None
    assert model(IMAGE).isfinite().all()


def test_an_activation_inside_a_norm_stays():
    model = small(timm.layers.BatchNormAct2d, act_layer=nn.SiLU)
    names = [name for name in model.state_dict() if name.endswith(("weight", "bias"))]
    x = torch.randn(2, 16, 5, 5)
    whitened = GroupWhitening2d(16, 8)(x)
    normalized = nn.GroupNorm(4, 16)(x)

    convert_norms(model, {"*": "GW:groups=8"})

    assert list(model.state_dict()) == names
    copied = copy.deepcopy(model)
    unpickled = pickle.loads(pickle.dumps(model))
    for network in (model, copied, unpickled):
        assert torch.equal(network[1](x), F.silu(whitened))

    convert_norms(model, {"*": "GN:groups=4"})

    assert torch.equal(model[1](x), F.silu(normalized))


class BNAndReLU(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


class Keeps(nn.Module):
    def __init__(self, parts) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)
        object.__setattr__(self, "parts", parts(self.norm))


class GroupNormSiLU(nn.GroupNorm):
    act = staticmethod(F.silu)  # no module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(x))


class LayerNormByFormat(nn.Module):
    """ConvNeXt's, with channels first or last."""

    def __init__(self, normalized_shape: int, channels_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))
        self.normalized_shape = (normalized_shape,)
        self.channels_first = channels_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.channels_first:
            x = x.movedim(1, -1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias)
        return x.movedim(-1, 1) if self.channels_first else x


class RootMeanSquareNorm(nn.Module):
    """That of language models: channels last, without the attribute ``normalized_shape``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * x.square().mean(-1, keepdim=True).rsqrt()


class AdaptiveLayerNorm(nn.LayerNorm):
    """Takes a second input."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * scale


def with_forward_of_its_own() -> nn.Sequential:
    model = nn.Sequential(nn.BatchNorm2d(8))
    model[0].forward = lambda x: x.relu()
    return model


def test_positions_are_those_of_the_network_with_blocks():
    norm = nn.BatchNorm2d(64)
    head = nn.ModuleDict({"conv1": nn.Conv2d(3, 64, 3), "bn1": norm})
    backbone = torchvision.models.resnet18()
    model = nn.ModuleDict({"backbone": backbone, "head": head})

    report = convert_norms(model, "S1")

    assert changed_layers(report) == ["backbone.bn1"]


def test_a_global_response_norm_is_no_norm():
    """It adds to its input, and its scale starts at 0."""
    model = timm.create_model("convnextv2_atto")

    report = convert_norms(model, {"*": "GN:groups=1"})

    names = [row.layer for row in report.layers]
    assert names
    assert not any(".grn" in name for name in names)


@pytest.mark.parametrize(
    ("norm", "exact"),
    [
        ("BW", True),
        ("FrozenBW:channels=6", True),
        ("BW:running=covariance,solver=zca", True),
        ("BN:rotation=cayley,channels=6", True),
        ("BRN", True),
        ("BW:running=covariance", False),
    ],
)
def test_batch_whitening_starts_with_the_function_of_bn(norm, exact):
    model = small(nn.BatchNorm2d, eps=0.01)
    trained(model).eval()
    expected = model(IMAGE)

    with no_warnings() if exact else pytest.warns(UserWarning, match="low accuracy"):
        convert_norms(model, {"*": norm})

    output = model(IMAGE)
    assert torch.allclose(output, expected, atol=1e-5) == exact


def test_batch_whitening_keeps_its_own_statistics():
    model = small(BatchWhitening2d)
    model(torch.randn(4, 3, 12, 12))
    expected = model.eval()(IMAGE)

    with no_warnings():
        convert_norms(model, {"*": "FrozenBW"})

    assert torch.equal(model(IMAGE), expected)
    with pytest.warns(UserWarning, match="low accuracy"):
        convert_norms(model, {"*": "BN"})


def test_the_activation_of_a_layer_survives_its_freezing():
    norm = timm.layers.BatchNormAct2d(8, act_layer=nn.PReLU, inplace=False)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm).eval()
    convert_norms(model, {"*": "BW"})
    nn.init.constant_(model[1].act.weight, 0.1)
    expected = model(IMAGE)

    FrozenBatchWhitening2d.convert(model)

    frozen = model[1]
    assert isinstance(frozen, FrozenBatchWhitening2d)
    assert not trains(frozen)
    assert torch.equal(model(IMAGE), expected)


def test_the_rotation_of_a_frozen_norm_is_frozen():
    model = nn.Sequential(nn.BatchNorm2d(8))

    convert_norms(model, {"*": "FrozenBW:channels=4,rotation=cayley"})

    assert not trains(model)


def test_values_that_are_their_own_statistics_are_a_warning():
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8))
    for layer in model[1:]:
        nn.init.uniform_(layer.running_mean)

    with pytest.warns(UserWarning, match=r"1 layers \(1, ...\) mix in the image's"):
        convert_norms(model, {"1": "MixBN", "2": "MixBN:alpha=0"})


def test_one_value_per_group_is_a_warning():
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8))

    with pytest.warns(
        UserWarning, match=r"1 layers \(1, ...\) get one channel per group"
    ):
        convert_norms(model, {"*": "GW"})

    vectors = torch.randn(5, 3)
    assert not model(vectors).any()


def test_none_keeps_a_layer_and_a_second_name_is_found():
    model = small()
    model.alias = model[4]

    report = convert_norms(model, {"1": None, "alias": "GN:groups=4"})

    assert isinstance(model[1], nn.BatchNorm2d)
    assert isinstance(model[4], nn.GroupNorm)
    assert model.alias is model[4]  # a shared layer stays shared
    assert changed_layers(report) == ["4"]


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (
            small,
            {"nowhere.*": "GW"},
            r"plan \('nowhere.\*'\): fits none of 2 norm layers. Fix: .*\['1', '4'\]",
        ),
        (small, "S1-B2", "no norms named as in a ResNet"),
        (
            torchvision.models.resnet18,
            "S1-B3",
            "blocks of ResNet-18 and -34 have only two norms",
        ),
        (small, {"1": "BW", "4": "GX"}, r"convert_norms, 4 \('GX'\): unknown norm"),
        (
            small,
            {"1": "BW", "4": "GN:groups=5"},
            r"convert_norms, 4 \('GN:groups=5'\): .*does not divide 16 channels. Fix: choose one of",
        ),
        (
            small,
            {"*": "GN", "4": "GW"},
            r"plan \('4'\): earlier keys fit all of its layers. Fix: put it before",
        ),
        (
            lambda: nn.Sequential(nn.RMSNorm(8)),
            {"0": "GW"},
            "its channels are the last dimension",
        ),
        *(
            (
                functools.partial(nn.Sequential, layer),
                {"0": "GW"},
                "its channels are the last dimension",
            )
            for layer in (
                nn.LayerNorm(8),
                LayerNormByFormat(2, channels_first=False),
                RootMeanSquareNorm(8),
                AdaptiveLayerNorm(8),
            )
        ),
        (
            lambda: timm.create_model("vit_tiny_patch16_224", img_size=64),
            {"*": "GN"},
            r"start the plan with {'blocks.\*.norm1': None, 'blocks.\*.norm2': None, 'norm': None}.* the 25 such",
        ),
        (lambda: nn.BatchNorm2d(8), {"*": "GW"}, "the model is a norm layer itself"),
        (lambda: nn.DataParallel(small()), {"*": "GW"}, "shares its parameters"),
        *(
            (make, {"*": "GW"}, f"convert_norms, {name}: is scripted or traced")
            for make, name in (
                (lambda: torch.jit.script(small()), "the model"),
                (lambda: torch.jit.trace(small(), IMAGE), "the model"),
                (lambda: nn.Sequential(torch.jit.script(small())), "0"),
            )
        ),
        (
            small,
            "GW",
            r"plan \('GW'\): fits none of 2 norm layers. Fix: .*{'\*': 'GW'}",
        ),
        (small, GroupWhitening2d, "neither positions nor a dict. Fix: .*{'[*]': 'GW'}"),
        (small, ["*"], r"plan \(\['\*'\]\): neither positions nor a dict"),
        (
            small,
            {(nn.BatchNorm2d, nn.GroupNorm): "GW"},
            "neither a string nor a layer class. Fix: give each its own key",
        ),
        (
            lambda: nn.Sequential(
                prune.l1_unstructured(nn.BatchNorm2d(8), "weight", 2)
            ),
            {"*": "GW"},
            "0 .*is pruned. Fix: .*torch.nn.utils.prune.remove",
        ),
        (
            small,
            {"*": functools.partial(nn.BatchNorm2d, groups=3)},
            r"convert_norms, 1 \(.*keyword argument 'groups'",
        ),
        (small, {"*": nn.GroupNorm}, "does not fit 16 channels"),
        (
            lambda: timm.create_model("resnetv2_50d_evos"),
            {"*": "GN"},
            r"contains an activation with parameters \(v\)",
        ),
        (
            lambda: small(BNAndReLU),
            {"*": "GW:groups=4"},
            r"1 \('BNAndReLU'\): has a forward of its own",
        ),
        (
            lambda: nn.Sequential(GroupNormSiLU(2, 8)),
            {"*": "GW:groups=4"},
            "has a forward of its own",
        ),
        (
            with_forward_of_its_own,
            {"*": "GW:groups=4"},
            r"0 \('BatchNorm2d'\): has a forward of its own",
        ),
        (
            lambda: Keeps(lambda norm: [norm]),
            {"*": "BRN"},
            r"norm: parts \(a plain list\) .* Fix: use torch.nn.Modu",
        ),
        (
            lambda: Keeps(lambda norm: norm),
            {"*": "BRN"},
            r"norm: parts \(a plain BatchNorm2d\) holds it too",
        ),
        (
            lambda: Keeps(lambda norm: {"a": ([norm], 1)}),
            {"*": "BRN"},
            r"norm: parts \(a plain dict\) holds it too",
        ),
        (
            lambda: nn.Sequential(nn.GroupNorm(2, 8)),
            {"*": "FrozenBN"},
            "statistics of its own, which FrozenBN needs",
        ),
        (
            lambda: small(GroupWhitening2d),
            {"*": torchvision.ops.FrozenBatchNorm2d},
            "has no running statistics",
        ),
        (
            lambda: nn.Sequential(nn.InstanceNorm2d(8, affine=True)),
            {"*": "FrozenBW"},
            "has no running statistics",
        ),
        (
            lambda: nn.Sequential(CycleBatchNormList(2, num_features=8)),
            {"0": "BN"},
            "has no running statistics of",
        ),
        (
            lambda: nn.Sequential(nn.BatchNorm1d(8)),
            {"*": "FrozenBN"},
            r"not \(N, C, H, W\), which FrozenBN needs",
        ),
        (
            lambda: nn.Sequential(nn.BatchNorm3d(8)),
            {"*": "BRN"},
            r"not \(N, C, H, W\), which BRN needs",
        ),
        (
            lambda: nn.Sequential(nn.InstanceNorm1d(8, affine=True)),
            {"*": "BN"},
            r"not \(N, C, H, W\), which BN needs",
        ),
    ],
)
def test_bad_input_changes_nothing(model, plan, message):
    made = model()
    before = list(made.modules())

    with pytest.raises(ConfigError, match=message):
        convert_norms(made, plan)

    assert list(made.modules()) == before


@pytest.mark.parametrize(
    "norm",
    [LayerNormByFormat(16, channels_first=True), timm.layers.LayerNorm2d(16)],
    ids=lambda norm: type(norm).__name__,
)
def test_a_layer_norm_with_channels_first_is_replaced(norm):
    model = nn.Sequential(nn.Conv2d(3, 16, 3), norm)
    norm.weight.data.fill_(2)

    convert_norms(model, {"*": "GW:groups=8"})

    assert isinstance(model[1], GroupWhitening2d)
    assert (model[1].weight == 2).all()
    assert model(IMAGE).isfinite().all()


def numbered(network: nn.Module) -> nn.Module:
    """The children without the classifier, as in lerobot's encoder."""
    return nn.Sequential(*list(network.children())[:-2])


def with_nested_stem(network: nn.Module) -> nn.Module:
    children = list(network.children())
    stem = nn.Sequential(*children[:3])
    return nn.Sequential(stem, *children[3:8])


def with_named_stem(network: nn.Module) -> nn.Module:
    children = dict(network.named_children())
    stem = nn.Sequential(*[children.pop(name) for name in ("conv1", "bn1", "act1")])
    return nn.ModuleDict({"layer0": stem, **children})


def under_a_head(network: nn.Module) -> nn.Module:
    parts = nn.Sequential(numbered(network), nn.BatchNorm2d(8))
    return nn.ModuleDict({"encoder": parts})


@pytest.mark.parametrize(
    "rearranged", [numbered, with_nested_stem, with_named_stem, under_a_head]
)
@pytest.mark.parametrize("network", ["resnet18", "resnet50", "resnet50d"])
def test_positions_are_found_where_stages_have_no_names(network, rearranged):
    with torch.device("meta"):
        named = timm.create_model(network)
        model = rearranged(timm.create_model(network))
    before = [row.layer for row in norm_rows(named)]
    after = [row.layer for row in norm_rows(model)]

    for positions in ("S1", "S1-B1", "S1-B2", "S1-B12", "ALL"):
        expected = norms_at(positions, before)
        found = norms_at(positions, after)
        assert [after.index(name) for name in found] == [
            before.index(name) for name in expected
        ]


@pytest.mark.parametrize("norm", ["FrozenBN", "SyncBN", "BW:channels=8", "BRN"])
def test_bn_by_the_batch_only_has_no_statistics_to_keep(norm):
    model = small(nn.BatchNorm2d, track_running_stats=False)

    with pytest.raises(NormError, match="has no running statistics"):
        convert_norms(model, {"*": norm})

    convert_norms(model, {"*": "GN:groups=4"})


@pytest.mark.parametrize("norm", ["GN:groups=8", "GN"])
def test_a_norm_without_statistics_has_its_own_eps(norm):
    model = nn.Sequential(nn.BatchNorm2d(32, eps=0.1))

    convert_norms(model, {"*": norm})

    assert model[0].eps == 1e-5


def test_norms_of_other_shapes_stay_bn():
    several = CycleBatchNormList(2, num_features=8)
    model = nn.Sequential(nn.BatchNorm1d(8), several)

    convert_norms(model, {"0": "BN", "1": "GN:groups=4"})

    assert type(model[0]) is nn.BatchNorm1d
    assert type(model[1]) is nn.GroupNorm


@pytest.mark.parametrize(
    "norm", [torchvision.ops.FrozenBatchNorm2d, nn.SyncBatchNorm, "nnSyncBN"]
)
def test_a_class_states_no_eps_and_momentum_but_a_function_does(norm):
    model = small(nn.BatchNorm2d, eps=0.1, momentum=0.3)
    with_eps = functools.partial(nn.SyncBatchNorm, eps=0.2)

    convert_norms(model, {"1": norm, "4": with_eps})

    by_class, by_function = model[1], model[4]
    assert by_class.eps == 0.1
    assert getattr(by_class, "momentum", 0.3) == 0.3
    assert by_function.eps == 0.2


def test_a_norm_that_does_not_know_its_channels_yet_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.LazyBatchNorm2d())

    with pytest.raises(NormError, match="1 .LazyBatchNorm2d.* run the model once"):
        convert_norms(model, {"*": "GW"})

    model(torch.zeros(1, 3, 2, 2))
    convert_norms(model, {"*": "GW"})
