"""Tensors keep their values, networks their features; norms are recorded, proven or stated."""

import functools

import pytest
import torch
from torch import nn

from gw_detectron.errors import UnknownNormError, WeightsError
from gw_detectron.weights import convert, to_torchvision
from gw_detectron.weights.network_record import PREPROCESSING, TORCHVISION

from .oracle import TOLERANCE, feature_error
from .synthetic import BLOCK_NORMS, authors_state, make_network, training_checkpoint

PUBLISHED = [
    pytest.param(
        name,
        positions,
        marks=[] if name == "R-50" or positions == "S1-B12" else pytest.mark.slow,
    )
    for name in ("R-50", "R-101", "X-50-32x4d", "X-101-32x8d")
    for positions in ("S1", "S1-B1", "S1-B3", "S1-B12")
]


@pytest.mark.parametrize(("name", "positions"), PUBLISHED)
def test_features_and_round_trip_of_published_architectures(name, positions):
    model = make_network(name, positions)
    source = authors_state(model)

    conversion = convert(training_checkpoint(source), norm="GW")

    assert conversion.architecture.name == name
    assert conversion.positions == (
        "BN",
        "GW:groups=64,iters=5,eps=1e-05,solver=newton",
        positions,
    )
    assert feature_error(model, conversion) < TOLERANCE

    back = to_torchvision(conversion.tensors)
    kept = {
        key for key in source if not key.startswith("fc.") and "num_batches" not in key
    }
    assert back.keys() == kept
    for key in kept:  # (C,), (1, C, 1, 1)
        assert torch.equal(back[key].view_as(source[key]), source[key])


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
    stated = "GN" if norm == "GN" else "GW"

    conversion = convert(
        authors_state(model), norm=stated if positions or norm == "GN" else None
    )

    assert conversion.architecture.name == name
    assert conversion.positions.positions == positions
    assert feature_error(model, conversion) < TOLERANCE


@pytest.mark.parametrize("preprocessing", sorted(PREPROCESSING))
def test_each_preprocessing_gives_the_features_of_its_training(preprocessing):
    model = make_network("R-50")
    conversion = convert(model.state_dict(), preprocessing=preprocessing)
    assert feature_error(model, conversion) < TOLERANCE


def test_the_oracle_reveals_a_wrong_norm_and_a_wrong_tensor():
    """The tensors of GN and GW look alike."""
    model = make_network("R-18", norm="GN")
    assert feature_error(model, convert(model.state_dict(), norm="GW")) > 1e-3

    conversion = convert(model.state_dict(), norm="GN")
    tensors = conversion.tensors
    first, second = "res2.0.conv1.weight", "res2.0.conv2.weight"
    tensors[first], tensors[second] = tensors[second], tensors[first]
    assert feature_error(model, conversion) > 1e-3


@pytest.mark.parametrize(
    "wrap",
    [lambda s: s, lambda s: {"model": s}, lambda s: {"state_dict": {"model": s}}],
)
@pytest.mark.parametrize(
    "prefix", ["", "module.", "module._orig_mod.", "_orig_mod.module.module."]
)
def test_wrappings(r18, wrap, prefix):
    content = wrap({prefix + key: value for key, value in r18.items()})
    plain = convert(r18, norm="GW").tensors

    unwrapped = convert(content, norm="GW").tensors

    assert unwrapped.keys() == plain.keys()
    assert all(torch.equal(unwrapped[key], plain[key]) for key in plain)
    with pytest.raises(WeightsError, match="both hold weights"):
        convert({"model": content, "state_dict": content})


def test_averaged_weights_are_converted_by_themselves(r18, caplog):
    averaged = {f"module.{key}": value + 1 for key, value in r18.items()}
    averaged["n_averaged"] = torch.tensor(3)

    trained = convert({"model": r18, "model_ema": averaged}, norm="GW").tensors
    assert torch.equal(trained["stem.conv1.weight"], r18["conv1.weight"])
    assert "model_ema" in caplog.text

    alone = convert(averaged, norm="GW").tensors  # the fix
    assert torch.equal(alone["stem.conv1.weight"], r18["conv1.weight"] + 1)


def test_half_precision_becomes_float32(r18):
    halves = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in r18.items()
    }
    weight = convert(halves, norm="GW").tensors["stem.conv1.weight"]
    assert weight.dtype == torch.float32
    assert torch.equal(weight, halves["conv1.weight"].float())


def _without(start):
    return lambda state: {key: state[key] for key in state if not key.startswith(start)}


def _with(name, change):
    return lambda state: {**state, name: change(state.get(name))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("layer2.0.conv2.weight"), "1 missing: layer2.0.conv2.weight"),
        (_without("layer4.0.bn2.running_var"), "1 missing: layer4.0.bn2.running_var"),
        (
            _with("layer1.0.se.weight", lambda _: torch.ones(3)),
            "1 unexpected: layer1.0.se",
        ),
        (
            lambda state: {
                **_without("conv1.weight")(state),
                "bn1.bias": torch.ones(2),
            },
            "(?s)missing: conv1.*bn1.bias",
        ),
        (
            _with("conv1.weight", lambda w: w[:, :1]),
            r"shape \(64, 1, 7, 7\), expected \(64, 3, 7, 7\): conv1.weight",
        ),
        (
            _with("layer1.0.bn2.weight", lambda w: w.view(1, -1, 1, 1)),
            "shape .*layer1.0.bn2",
        ),
        (_with("bn1.weight", lambda w: w.view(-1, 1, 1, 1)), "shape .*bn1.weight"),
        (_with("conv1.weight", lambda w: w.int()), "type.*conv1.weight"),
        (_with("conv1.weight", lambda w: w.to_sparse()), "conv1.weight"),
        (
            _with("conv1.weight", lambda w: w * float("nan")),
            "NaN or infinite: conv1.weight",
        ),
        (_with("conv1.weight", lambda w: w.numpy()), "conv1.weight"),
        (
            _with("layer1.0.bn2.running_var", lambda v: -v),
            "negative .*layer1.0.bn2.running_var",
        ),
        (_without("layer2.0.bn2.running"), "positions S1, S1-B1"),
        (_without("layer3.1."), r"\(2, 2, 1, 2\)"),
    ],
)
def test_errors_name_the_tensor(r18, change, message):
    with pytest.raises(ValueError, match=message):
        convert(change(r18), norm="GW")


@pytest.mark.parametrize("name", ["R-18", "R-50"])
def test_other_networks_and_names_are_refused(name):
    tensors = make_network(name).state_dict()
    converted = convert(tensors).tensors
    resnet_d = {
        key.replace("layer2.0.downsample.1", "layer2.0.downsample.2"): value
        for key, value in tensors.items()
    }
    detector = {f"backbone.bottom_up.{key}": value for key, value in converted.items()}
    caffe2 = {"conv1_w": torch.ones(1), "res2_0_branch2a_w": torch.ones(1)}

    with pytest.raises(WeightsError, match=r"layer2.0.downsample"):
        convert(resnet_d)
    for content in (detector, caffe2):
        with pytest.raises(WeightsError, match="MODEL.WEIGHTS to the file itself"):
            convert(content)
    with pytest.raises(WeightsError, match=r"\(fpn_lateral2.weight\)"):
        to_torchvision({**converted, "fpn_lateral2.weight": torch.ones(1)})


def test_detectron2_names_do_not_show_the_preprocessing():
    tensors = convert(make_network("R-18").state_dict()).tensors
    with pytest.raises(WeightsError, match="--preprocessing.* detectron2-msra"):
        convert(tensors)
    with pytest.raises(WeightsError, match="'BGR'"):
        convert(tensors, preprocessing="BGR")


def test_the_author_torchvision_of_detectron2s_tool_shows_the_preprocessing():
    tensors = convert(make_network("R-18").state_dict()).tensors
    content = {"model": tensors, "__author__": "torchvision"}
    assert convert(content).preprocessing == TORCHVISION


def caffe_weights(variance=1.0, first="bn1"):
    """Return torchvision's names with BN's statistics in its scale, from a stage on."""
    tensors = make_network("R-50").state_dict()
    for name, value in tensors.items():
        if name.endswith(("mean", "var")) and name >= first:
            value.fill_(variance if name.endswith("var") else 0)
    return tensors


@pytest.mark.parametrize("variance", [1.0, 1 - 1e-5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_caffe_weights_are_not_taken_for_torchvisions(variance, dtype):
    """They need BGR images, and often another stride: asked, not guessed."""
    tensors = {name: value.to(dtype) for name, value in caffe_weights(variance).items()}
    with pytest.raises(WeightsError, match="means are 0.*--preprocessing"):
        convert(tensors)
    config = convert(tensors, preprocessing="detectron2-msra").config()
    assert config["INPUT"]["FORMAT"] == "BGR"
    assert config["MODEL"]["RESNETS"]["STRIDE_IN_1X1"]


def test_some_norms_without_statistics_are_not_of_caffe():
    assert convert(caffe_weights(first="layer4")).preprocessing == TORCHVISION


@pytest.mark.parametrize("prefix", ["", "backbone.body.", "module.backbone.body."])
def test_a_backbone_of_maskrcnn_benchmark_is_asked_for_its_images(prefix):
    plain = convert(make_network("R-18").state_dict()).tensors
    theirs = {
        f"{prefix}{'' if name.startswith('layer') else 'stem.'}{name}": value
        for name, value in to_torchvision(plain).items()
    }
    with pytest.raises(WeightsError, match="maskrcnn-benchmark.*--preprocessing"):
        convert({"model": theirs})
    tensors = convert({"model": theirs}, preprocessing="detectron2-msra").tensors
    assert all(torch.equal(tensors[name], plain[name]) for name in plain)


def test_standardized_weights_are_refused(r18):
    with pytest.raises(WeightsError, match=r"conv1 \('WS'\)"):
        convert({"model": r18, "norms": {"bn1": "GW", "conv1": "WS"}})


@pytest.mark.parametrize("position", ["S1-B1", "S1-B2", "S1-B3"])
@pytest.mark.parametrize(
    "norm_layer",
    [
        functools.partial(nn.GroupNorm, 32),
        functools.partial(nn.InstanceNorm2d, affine=True),
    ],
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
        UnknownNormError, match=r"17 of 53 .*\(bn1, .*--norm GW .*--norm GN"
    ):
        convert(state)
    assert convert(state, norm="GN").positions == (
        "BN",
        "GN:groups=32,eps=1e-05",
        position,
    )


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (None, "Cannot tell GN from GW"),
        # scale and shift are the authors' whitening layer's
        (
            "GN",
            "shape.*bn1.weight",
        ),
        ("BN", "missing: bn1.running_mean"),
        ("BW", "shape.*bn1.weight|missing: bn1.running"),
        ("", "names no norm"),
        ("XX", "XX"),
        ("GW:groups=48", "64 channels"),
    ],
)
def test_statement_that_contradicts_the_tensors(r18, norm, message):
    with pytest.raises(ValueError, match=message):
        convert(r18, norm=norm)


def test_another_network_is_told_by_its_tensors_not_by_its_norms():
    """ResNet-D has a pooling before the convolution of a shortcut, so its norms have other names."""
    state = make_network("R-50").state_dict()
    for name in list(state):
        if ".downsample." in name:
            stage, _, part = name.partition(".downsample.")
            number, _, field = part.partition(".")
            state[f"{stage}.downsample.{int(number) + 1}.{field}"] = state.pop(name)

    with pytest.raises(ValueError, match=r"unexpected: layer1.0.downsample.2"):
        convert(state)


def test_statistics_prove_batch_norm():
    state = make_network("R-18").state_dict()
    assert convert(state).positions == ("BN", "", "")
    assert convert(state, norm="FrozenBN").positions == ("BN", "", "")
    with pytest.raises(ValueError, match=r"norm \('GW'\): the weights have BN"):
        convert(state, norm="GW")


RECORDS = [
    *({"provenance": value} for value in (3, "text", [1], {"architecture": "R-50"})),
    *({"preprocessing": value} for value in (3, {}, {"pixel_mean": 1, "pixel_std": 2})),
    {"preprocessing": {"input_format": ["RGB"], "pixel_mean": [1], "pixel_std": [1]}},
    *({"norms": value} for value in ([1, 2], {"a": 1}, {1: "GW"})),
]


@pytest.mark.parametrize("content", RECORDS)
def test_damaged_records(r18, content):
    with pytest.raises(WeightsError, match="record of the file: damaged"):
        convert({"model": r18, **content})


def test_a_record_must_list_every_norm(r18):
    with pytest.raises(WeightsError, match="lists none for bn1"):
        convert({"model": r18, "norms": {"other": "GW"}})
