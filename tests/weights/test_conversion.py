"""Tensors keep their values, networks their features; norms come from records, proofs or a statement, never a guess."""

import functools

import pytest
import torch
from torch import nn

from gw_detectron.errors import UnknownNormError, WeightsError
from gw_detectron.weights import convert, to_torchvision
from gw_detectron.weights.verify import config_for, detectron2_backbone

from .synthetic import BLOCK_NORMS, authors_state, make_network, stages, training_checkpoint

PUBLISHED = [
    pytest.param(
        name,
        positions,
        marks=[] if name == "R-50" or positions == "S1-B12" else pytest.mark.slow,
    )
    for name in ("R-50", "R-101", "X-50-32x4d", "X-101-32x8d")
    for positions in ("S1", "S1-B1", "S1-B3", "S1-B12")
]


def _assert_same_features(model, conversion):
    images = torch.randn(1, 3, 96, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = (
            stages(model, images),
            detectron2_backbone(conversion, config_for(conversion))(images),
        )
    for stage, reference in expected.items():
        assert reference.std() > 1e-3  # a network of zeros would agree with anything
        assert (found[stage] - reference).abs().max() <= 1e-4 * reference.abs().max(), stage


@pytest.mark.parametrize(("name", "positions"), PUBLISHED)
def test_features_and_round_trip_of_published_architectures(name, positions):
    model = make_network(name, positions)
    source = authors_state(model)
    conversion = convert(training_checkpoint(source), norm="GW:eps=0")
    assert conversion.architecture.name == name
    assert conversion.positions == ("BN", "GW:groups=64,iters=5,eps=0,solver=newton", positions)
    _assert_same_features(model, conversion)
    back = to_torchvision(conversion.tensors)
    kept = {
        key
        for key in source
        if not key.startswith("fc.") and not key.endswith("num_batches_tracked")
    }
    assert back.keys() == kept
    assert all(
        torch.equal(back[key].view_as(source[key]), source[key]) for key in kept
    )  # (C,), (1, C, 1, 1)


@pytest.mark.parametrize(
    ("name", "positions", "norm"),
    [
        ("R-50", "S1-B2", "BN"),
        ("R-50", "ALL", "BN"),
        ("R-50", "", "BN"),
        ("R-50", "", "GN"),
        ("R-18", "S1-B12", "BN"),
    ],
)
def test_other_norms_and_positions(name, positions, norm):
    model = make_network(name, positions, norm=norm)
    conversion = convert(
        authors_state(model), norm={"GN": "GN"}.get(norm, "GW" if positions else None)
    )
    assert conversion.architecture.name == name and conversion.positions.positions == positions
    _assert_same_features(model, conversion)


@pytest.mark.parametrize(
    "wrap", [lambda s: s, lambda s: {"model": s}, lambda s: {"state_dict": {"model": s}}]
)
@pytest.mark.parametrize(
    "prefix", ["", "module.", "module._orig_mod.", "_orig_mod.module.module."]
)
def test_wrappings(r18, wrap, prefix, caplog):
    content = wrap({prefix + key: value for key, value in r18.items()})
    halved = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in r18.items()
    }
    widened = convert(halved, norm="GW").tensors["stem.conv1.weight"]
    assert widened.dtype == torch.float32 and torch.equal(
        widened, halved["conv1.weight"].float()
    )
    found, plain = convert(content, norm="GW"), convert(r18, norm="GW")
    assert found.tensors.keys() == plain.tensors.keys()
    assert all(torch.equal(found.tensors[key], value) for key, value in plain.tensors.items())
    averaged = {f"module.{key}": value + 1 for key, value in r18.items()} | {
        "n_averaged": torch.tensor(3)
    }
    both = convert({"model": r18, "model_ema": averaged}, norm="GW").tensors[
        "stem.conv1.weight"
    ]
    assert (
        torch.equal(both, r18["conv1.weight"])
        and "model_ema: averaged weights are left out" in caplog.text
    )
    assert torch.equal(
        convert(averaged, norm="GW").tensors["stem.conv1.weight"], both + 1
    )  # the fix
    with pytest.raises(WeightsError, match="both hold weights"):
        convert({"model": content, "state_dict": content})


def _without(start):
    return lambda state: {
        key: value for key, value in state.items() if not key.startswith(start)
    }


def _with(name, change):
    return lambda state: {**state, name: change(state.get(name))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("layer2.0.conv2.weight"), "1 missing: layer2.0.conv2.weight"),
        (_without("layer4.0.bn2.running_var"), "1 missing: layer4.0.bn2.running_var"),
        (
            _with("layer1.0.se.weight", lambda _: torch.ones(3)),
            "1 unexpected: layer1.0.se.weight",
        ),
        (
            lambda state: {**_without("conv1.weight")(state), "bn1.bias": torch.ones(2)},
            "(?s)missing: conv1.*bn1.bias",
        ),
        (
            _with("conv1.weight", lambda w: w[:, :1]),
            r"wrong shape, expected \(64, 3, 7, 7\).*\(64, 1, 7, 7\)",
        ),
        (_with("layer1.0.bn2.weight", lambda w: w.view(1, -1, 1, 1)), "wrong shape"),
        (_with("bn1.weight", lambda w: w.view(-1, 1, 1, 1)), "wrong shape"),
        (_with("conv1.weight", lambda w: w.int()), "wrong type.*conv1.weight.*int32"),
        (
            _with("conv1.weight", lambda w: w.to_sparse()),
            "'conv1.weight' is not a dense tensor",
        ),
        (_with("conv1.weight", lambda w: w * float("nan")), "NaN or infinite: conv1.weight"),
        (_with("conv1.weight", lambda w: w.numpy()), "'conv1.weight' is not a dense tensor"),
        (
            _with("layer1.0.bn2.running_var", lambda v: -v),
            "negative variance: layer1.0.bn2.running_var",
        ),
        (_without("layer2.0.bn2.running"), "none of the positions S1, S1-B1"),
        (_without("layer3.1."), r"not the weights of a known ResNet: \(2, 2, 1, 2\)"),
    ],
)
def test_errors_name_the_tensor(r18, change, message):
    with pytest.raises(ValueError, match=message):
        convert(change(r18), norm="GW")


@pytest.mark.parametrize("name", ["R-18", "R-50"])
def test_other_networks_and_names_are_refused(name):
    tensors = make_network(name).state_dict()
    pooled = {
        key.replace("layer2.0.downsample.1", "layer2.0.downsample.2"): value
        for key, value in tensors.items()
    }
    with pytest.raises(WeightsError, match=r"layer2.0.downsample"):  # of a ResNet-D
        convert(pooled)
    detector = {
        f"backbone.bottom_up.{key}": value for key, value in convert(tensors).tensors.items()
    }
    for content in (detector, {"conv1_w": torch.ones(1), "res2_0_branch2a_w": torch.ones(1)}):
        with pytest.raises(WeightsError, match="Fix: set MODEL.WEIGHTS to the file itself"):
            convert(content)
    with pytest.raises(WeightsError, match=r"tensors \(fpn_lateral2.weight\)"):
        to_torchvision({**convert(tensors).tensors, "fpn_lateral2.weight": torch.ones(1)})


def test_standardized_weights_are_refused(r18):
    with pytest.raises(
        WeightsError, match=r"conv1 \('WS'\): Weight Standardization.*Fix: set MODEL.WEIGHTS"
    ):
        convert({"model": r18, "norms": {"bn1": "GW", "conv1": "WS"}})


@pytest.mark.parametrize("position", ["S1-B1", "S1-B2", "S1-B3"])
@pytest.mark.parametrize(
    "norm_layer",
    [functools.partial(nn.GroupNorm, 32), functools.partial(nn.InstanceNorm2d, affine=True)],
)
def test_norms_without_statistics_at_positions_must_be_stated(norm_layer, position):
    model = make_network("R-50")
    model.bn1 = norm_layer(64)
    for name, module in list(model.named_modules()):
        if name.startswith("layer") and name.endswith(BLOCK_NORMS[position]):
            model.set_submodule(name, norm_layer(module.num_features))
    state = {
        key: torch.ones_like(value) if "bn" in key else value
        for key, value in model.state_dict().items()
    }
    with pytest.raises(
        UnknownNormError, match=r"GN from GW for 17 of 53 .*\(bn1, .*--norm GW .*--norm GN"
    ):
        convert(state)
    assert convert(state, norm="GN").positions == ("BN", "GN:groups=32,eps=1e-05", position)


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (None, "Cannot tell GN from GW"),
        ("GN", "wrong shape.*bn1.weight"),  # scale and shift are the authors' whitening layer's
        ("BN", "missing: bn1.running_mean"),
        ("BW", "wrong shape.*bn1.weight|missing: bn1.running"),
        ("", "names no norm"),
        ("XX", r"norm \('XX'\): unknown norm"),
        ("GW:groups=48", "does not divide 64 channels"),
    ],
)
def test_statement_that_contradicts_the_tensors(r18, norm, message):
    with pytest.raises(ValueError, match=message):
        convert(r18, norm=norm)


def test_statistics_prove_batch_norm():
    state = make_network("R-18").state_dict()
    assert (
        convert(state).positions == convert(state, norm="FrozenBN").positions == ("BN", "", "")
    )
    with pytest.raises(ValueError, match=r"norm \('GW'\): the weights have BN"):
        convert(state, norm="GW")


@pytest.mark.parametrize(
    "content",
    [
        *({"provenance": value} for value in (3, "text", [1], {"architecture": "R-50"})),
        *(
            {"preprocessing": value}
            for value in (3, {}, {"pixel_mean": 1, "pixel_std": 2}, {"pixel_mean": "abc"})
        ),
        *({"norms": value} for value in (None, [1, 2], {"a": 1}, {1: "GW"})),
    ],
)
def test_damaged_records(r18, content):
    with pytest.raises(WeightsError, match="record of the file: damaged.*Fix: "):
        convert({"model": r18, **content})
    with pytest.raises(WeightsError, match="the file lists none for bn1"):
        convert({"model": r18, "norms": {"other": "GW"}})
