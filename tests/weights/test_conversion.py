"""Conversion, compared with torchvision's network for every published architecture and position."""

import pytest
import torch

from gw_detectron.errors import WeightsError
from gw_detectron.weights import Architecture, convert, to_torchvision
from gw_detectron.weights.reference_networks import config_for, detectron2_classifier

from .synthetic import authors_state, make_network, stages, training_checkpoint

PUBLISHED = [
    pytest.param(name, positions, marks=[] if name == "R-50" or positions == "S1-B12" else pytest.mark.slow)
    for name in ("R-50", "R-101", "X-50-32x4d", "X-101-32x8d")
    for positions in ("S1", "S1-B1", "S1-B3", "S1-B12")
]


def _network(conversion):
    facts = conversion.provenance
    return facts.architecture, facts.positions, facts.norm


def _backbone(conversion):
    return detectron2_classifier(conversion, config_for(conversion.provenance))


def _assert_same_features(model, conversion):
    images = torch.randn(1, 3, 96, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = stages(model, images), _backbone(conversion)(images)
    for stage, reference in expected.items():
        assert reference.std() > 1e-3  # a network of zeros would agree with anything
        assert (found[stage] - reference).abs().max() <= 1e-4 * reference.abs().max(), stage


@pytest.mark.parametrize(("name", "positions"), PUBLISHED)
def test_features_and_round_trip_of_published_architectures(name, positions):
    model = make_network(name, positions)
    source = authors_state(model)
    conversion = convert(training_checkpoint(source), keep_fc=True)
    assert _network(conversion) == (name, positions, "BN")
    assert conversion.provenance.whiten_norm == "GW:groups=64,iters=5,eps=0,solver=newton"  # by the checkpoint's flags
    _assert_same_features(model, conversion)
    back = to_torchvision(conversion.tensors)
    kept = {key for key in source if not key.endswith("num_batches_tracked")}
    assert back.keys() == kept
    assert all(torch.equal(back[key].view_as(source[key]), source[key]) for key in kept)  # (C,), (1, C, 1, 1)


@pytest.mark.parametrize(
    ("name", "positions", "norm"),
    [
        ("R-50", "S1-B2", "BN"),
        ("R-50", "ALL", "BN"),
        ("R-50", "", "BN"),
        ("R-50", "", "GN"),
        ("R-18", "S1-B2", "BN"),
        ("R-18", "S1-B12", "BN"),
        ("R-18", "", "GN"),
    ],
)
def test_other_norms_and_positions(name, positions, norm):
    model = make_network(name, positions, norm=norm)
    conversion = convert(authors_state(model), norm={"GN": "GN"}.get(norm, "GW" if positions else None))
    assert _network(conversion) == (name, positions, norm)
    _assert_same_features(model, conversion)


def test_torchvision_loads_the_inverse(r18):
    back = to_torchvision(convert(r18, norm="GW", keep_fc=True).tensors)
    model = make_network("R-18", "S1-B1", seed=1)
    model.load_state_dict(back, strict=True)
    assert torch.equal(model.layer4[1].conv2.weight, back["layer4.1.conv2.weight"])


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"model": s}, lambda s: {"state_dict": {"model": s}}])
@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod.", "_orig_mod.module.module."])
def test_wrappings(r18, wrap, prefix):
    content = wrap({prefix + key: value for key, value in r18.items()})
    found, plain = convert(content, norm="GW"), convert(r18, norm="GW")
    assert found.tensors.keys() == plain.tensors.keys()
    assert all(torch.equal(found.tensors[key], value) for key, value in plain.tensors.items())


def test_every_source_tensor_has_a_row(r18):
    extra = {"last_bn.weight": torch.ones(512), "last_bn.bias": torch.zeros(512)}
    conversion = convert({**r18, **extra}, norm="GW")
    assert {row.source for row in conversion.rows} == {*r18, *extra}
    assert {row.target for row in conversion.rows} == {*conversion.tensors, ""}
    notes = {row.source: row.note for row in conversion.rows}
    assert notes["bn1.weight"] == "reshaped from (1, 64, 1, 1)"
    assert notes["conv1.weight"] == ""
    assert all(notes[row.source] for row in conversion.rows if not row.target)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(r18, dtype):
    halved = r18["layer1.0.conv1.weight"].to(dtype)
    conversion = convert({**r18, "layer1.0.conv1.weight": halved}, norm="GW")
    value = conversion.tensors["res2.0.conv1.weight"]
    assert value.dtype == torch.float32
    assert torch.equal(value.to(dtype), halved)


def _without(name):
    return lambda state: {key: value for key, value in state.items() if key != name}


def _with(name, change):
    return lambda state: {**state, name: change(state.get(name))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("layer2.0.conv2.weight"), "1 missing: layer2.0.conv2.weight"),
        (_without("layer3.0.bn1.bias"), "1 missing: layer3.0.bn1.bias"),
        (_without("layer4.0.bn2.running_var"), "1 missing: layer4.0.bn2.running_var"),
        (_with("layer1.0.se.weight", lambda _: torch.ones(3)), "not part of R-18 with .* at S1-B1: layer1.0.se.weight"),
        (_with("bn1.running_wm", lambda _: torch.ones(64, 64)), "not part of R-18 with .* at S1-B1: bn1.running_wm"),
        (_with("conv1.weight", lambda w: w[:, :1]), r"wrong shape, expected \(64, 3, 7, 7\).*\(64, 1, 7, 7\)"),
        (_with("conv1.weight", lambda w: w.transpose(0, 1)), "wrong shape"),
        (_with("layer1.0.bn2.weight", lambda w: w.view(1, -1, 1, 1)), "wrong shape"),
        (_with("bn1.weight", lambda w: w.view(-1, 1, 1, 1)), "wrong shape"),
        (_with("conv1.weight", lambda w: w.double()), "wrong type.*conv1.weight.*float64"),
        (_with("conv1.weight", lambda w: w.to(torch.complex64)), "wrong type"),
        (_with("conv1.weight", lambda w: w.to_sparse()), "not dense"),
        (_with("conv1.weight", lambda w: w * float("nan")), "NaN or infinite: conv1.weight"),
        (_with("layer1.0.bn2.running_mean", lambda m: m / 0), "NaN or infinite: layer1.0.bn2.running_mean"),
        (_with("layer1.0.bn2.running_var", lambda v: -v), "negative variance: layer1.0.bn2.running_var"),
    ],
)
def test_errors_name_the_tensor(r18, change, message):
    with pytest.raises(ValueError, match=message):
        convert(change(r18), norm="GW")


def test_all_problems_are_named_at_once(r18):
    broken = {**_without("conv1.weight")(r18), "unknown": torch.ones(1), "bn1.bias": torch.ones(2)}
    with pytest.raises(ValueError, match="(?s)wrong shape.*missing|missing.*wrong shape") as caught:
        convert(broken, norm="GW")
    assert all(name in str(caught.value) for name in ("conv1.weight", "unknown", "bn1.bias"))


def test_statistics_missing_at_one_block_are_no_position(r18):
    state = {key: value for key, value in r18.items() if "layer2.0.bn2.running" not in key}
    with pytest.raises(ValueError, match="none of the positions S1, S1-B1"):
        convert(state, norm="GW")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "R-50"}, r"architecture \('R-50'\): the weights are of R-18"),
        ({"architecture": "resnet18"}, "give a ResNet such as R-50"),
        ({"architecture": "R-26"}, r"R-50 \(18, 34, 50"),
        ({"positions": "S1-B2"}, r"positions \('S1-B2'\): the weights have BN, GW.* at S1-B1"),
        ({"positions": "B1"}, r"positions \('B1'\): the weights have BN, GW.* at S1-B1"),
    ],
)
def test_expected_architecture_and_positions_are_checked(r18, options, message):
    assert convert(r18, norm="GW", architecture="R-18", positions="S1-B1").architecture == Architecture(18)
    with pytest.raises(ValueError, match=message):
        convert(r18, norm="GW", **options)


def test_other_networks_are_refused(r18):
    with pytest.raises(ValueError, match=r"not the weights of a known ResNet: \(0, 0, 0, 0\)"):
        convert({"features.0.weight": torch.ones(3)})
    with pytest.raises(ValueError, match=r"not the weights of a known ResNet: \(2, 2, 1, 2\)"):
        convert({key: value for key, value in r18.items() if not key.startswith("layer3.1.")})


def test_fc_behind_a_norm_is_not_kept(r18):
    with pytest.raises(ValueError, match="last_bn"):
        convert({**r18, "last_bn.weight": torch.ones(512)}, norm="GW", keep_fc=True)


def test_missing_fc_is_an_error_only_if_it_is_kept(r18):
    state = {key: value for key, value in r18.items() if not key.startswith("fc.")}
    assert not convert(state, norm="GW").has_classifier
    with pytest.raises(ValueError, match=r"missing: fc\.weight"):
        convert(state, norm="GW", keep_fc=True)


@pytest.mark.parametrize("key", ["state_dict_ema", "model_ema", "ema"])
def test_weights_beside_their_average_are_refused(r18, key):
    with pytest.raises(WeightsError, match=rf"keys \('state_dict' and '{key}'\): both hold weights.*Fix: save one"):
        convert({"state_dict": r18, key: r18}, norm="GW")


def test_standardized_weights_are_refused(r18):
    norms = {"bn1": "GW", "conv1": "WS"}
    with pytest.raises(WeightsError, match=r"conv1 \('WS'\): Weight Standardization.*Fix: set MODEL.WEIGHTS"):
        convert({"model": r18, "norms": norms})


def test_to_torchvision_names_unexpected_tensors(r18):
    tensors = convert(r18, norm="GW").tensors
    with pytest.raises(ValueError, match=r"tensors \(fpn_lateral2.weight\): not part of R-18"):
        to_torchvision({**tensors, "fpn_lateral2.weight": torch.ones(1)})
    with pytest.raises(ValueError, match="not the weights of a known ResNet"):
        to_torchvision({"backbone.weight": torch.ones(1)})


@pytest.mark.parametrize("name", ["R-18", "R-50"])
def test_a_resnet_d_is_not_a_resnet(name):
    tensors = make_network(name).state_dict()
    tensors["layer2.0.downsample.2.weight"] = tensors.pop("layer2.0.downsample.1.weight")
    with pytest.raises(WeightsError, match=r"\(layer2.0.downsample.2.weight\): of a ResNet with .* \(ResNet-D\)"):
        convert(tensors)


def test_torchvisions_wide_and_larger_networks_are_recognized():
    assert Architecture.parse("X-101-64x4d") == Architecture(101, 64, 4)
    assert Architecture.parse("R-152").name == "R-152"
    with pytest.raises(ValueError, match="X-50-32x4d .50, 101, 152."):
        Architecture.parse("X-18-32x4d")


@pytest.mark.parametrize(
    ("prefix", "layout", "hint"),
    [
        (
            "backbone.bottom_up.",
            "detectron2",
            "set MODEL.WEIGHTS to the file itself: this is a checkpoint of Detectron2",
        ),
        ("", "detectron2", "these are Detectron2's names"),
        ("model.", "torchvision", r"remove the prefix 'model.' of the names"),
    ],
)
def test_names_that_need_another_step(prefix, layout, hint):
    tensors = make_network("R-18").state_dict()
    if layout == "detectron2":
        tensors = convert(tensors).tensors
    with pytest.raises(WeightsError, match=f"not the weights of a known ResNet: .* Fix: .*{hint}"):
        convert({f"{prefix}{name}": value for name, value in tensors.items()})
    with pytest.raises(WeightsError, match="Fix: set MODEL.WEIGHTS to the file itself: these are Caffe2's names"):
        convert({"conv1_w": torch.ones(1), "res2_0_branch2a_w": torch.ones(1)})
    if layout == "torchvision":
        with pytest.raises(WeightsError, match="Fix: .*these are torchvision's names: convert them first"):
            to_torchvision(tensors)
