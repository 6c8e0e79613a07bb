"""Norms come from notes, proofs or a statement, never from a guess."""

import argparse
import functools

import pytest
import torch
from torch import nn
from torchvision.models import resnet18
from torchvision.models.convnext import LayerNorm2d
from torchvision.models.resnet import Bottleneck, ResNet

from gw_detectron.checkpoint import load_checkpoint
from gw_detectron.checkpoint.opening import open_checkpoint
from gw_detectron.errors import NormMismatchError, UnknownNormError
from gw_detectron.layers import GroupWhitening2d
from gw_detectron.weights import convert, convert_file, load_weights
from gw_detectron.weights.metadata import read_notes
from gw_detectron.weights.norm_inference import full_name
from gw_detectron.weights.reading import Contents
from gw_detectron.weights.reference_networks import config_for, detectron2_classifier

from .synthetic import BLOCK_NORMS, authors_state, make_network, stages

SHARED: list = []  # 2**40 empty lists
for _ in range(40):
    SHARED = [SHARED, SHARED]


@pytest.fixture(scope="module")
def mixed():
    """A ResNet-50 with GN at the stem and the second norm of every block, BN elsewhere."""
    torch.manual_seed(0)
    model = ResNet(Bottleneck, [3, 4, 6, 3]).eval()
    model.bn1 = nn.GroupNorm(32, 64)
    for module in model.modules():
        if isinstance(module, Bottleneck):
            module.bn2 = nn.GroupNorm(32, module.bn2.num_features)
    return model


def test_group_norm_at_whitening_positions_is_not_whitening(mixed):
    state = mixed.state_dict()
    with pytest.raises(UnknownNormError, match=r"\(17 of 53: bn1, layer1.0.bn2.*GN or GW alike.*--norm GN"):
        convert(state)
    conversion = convert(state, norm="GN")
    assert conversion.provenance.norms == ("BN", "GN", "S1-B2")
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = stages(mixed, images)
        found = detectron2_classifier(conversion, config_for(conversion.provenance))(images)
    assert all(torch.allclose(found[stage], value, rtol=1e-4, atol=1e-4) for stage, value in expected.items())


@pytest.mark.parametrize("position", ["S1-B1", "S1-B2", "S1-B3"])
@pytest.mark.parametrize(
    "norm_layer", [functools.partial(nn.GroupNorm, 32), functools.partial(nn.InstanceNorm2d, affine=True)]
)
def test_norms_without_statistics_at_one_position_must_be_stated(norm_layer, position):
    model = ResNet(Bottleneck, [3, 4, 6, 3])
    model.bn1 = norm_layer(64)
    for module in model.modules():
        if isinstance(module, Bottleneck):
            (name,) = BLOCK_NORMS[position]
            setattr(module, name, norm_layer(getattr(module, name).num_features))
    with pytest.raises(UnknownNormError, match="17 of 53: bn1, .*GN or GW alike"):
        convert(model.state_dict())


@pytest.mark.parametrize(
    "norm_layer",
    [
        lambda channels: nn.GroupNorm(16, channels),
        lambda channels: nn.GroupNorm(1, channels),
        functools.partial(nn.InstanceNorm2d, affine=True),
        LayerNorm2d,
    ],
)
def test_norms_without_statistics_everywhere_must_be_stated(norm_layer):
    state = resnet18(norm_layer=norm_layer).state_dict()
    with pytest.raises(UnknownNormError, match="20 of 20.*GN or GW alike"):
        convert(state)
    assert (
        convert(state, norm="GN:groups=16").provenance.config()["MODEL"]["RESNETS"]["NORM"].startswith("GN:groups=16")
    )
    assert convert(state, norm="GW:groups=16").provenance.norms[1:] == (full_name("GW:groups=16", 512), "ALL")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"norm": "IGWItN", "norm_cfg": {"num_groups": 32, "T": 7}}, "GW:groups=32,iters=7,eps=0,solver=newton"),
        ({"norm": "IGWItN", "norm_cfg": {}}, "GW:groups=32,iters=5,eps=0,solver=newton"),  # the script's defaults
        ({"norm": "IGWSVD", "norm_cfg": {"num_groups": 16}}, "GW:groups=16,eps=1e-05,solver=zca"),
    ],
)
def test_flags_of_the_authors_script(r18, flags, expected):
    content = {"model": r18, "cfg": argparse.Namespace(**flags)}
    provenance = convert(content).provenance
    assert provenance.whiten_norm == expected
    assert provenance.config()["MODEL"]["RESNETS"]["WHITEN_NORM"] == expected
    assert convert(content, norm=expected).provenance == provenance
    with pytest.raises(ValueError, match=r"norm \('GW:groups=8'\): the weights have"):
        convert(content, norm="GW:groups=8")


def test_authors_whitening_without_flags_must_be_stated(r18):
    with pytest.raises(UnknownNormError, match="state it"):
        convert(r18)


def test_group_norm_by_the_authors_script():
    state = make_network("R-18", norm="GN").state_dict()
    cfg = argparse.Namespace(norm="GN", norm_cfg={"num_groups": 32, "num_channels": 0})
    assert convert({"model": state, "cfg": cfg}).provenance.norms == ("GN", "", "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"norm": "IGWItN", "norm_cfg": {"num_channels": 16}}, "another number of groups"),
        (
            {"norm": "GN", "norm_cfg": {"num_groups": 32}},
            r"bn1 \('GN:groups=32.*by the file's notes.*authors' whitening",
        ),
        ({"norm": "IGWItN", "norm_cfg": {"num_groups": 48}}, "does not divide 64"),
        ({"norm": "IGWItN", "norm_cfg": {"num_groups": SHARED}}, "state it"),
        ({"norm": "ours", "norm_cfg": {}}, "state it"),
        ({"norm": 3}, "state it"),
    ],
)
def test_unusable_flags(r18, flags, message):
    with pytest.raises(ValueError, match=message):
        convert({"model": r18, "cfg": argparse.Namespace(**flags)})


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        ("GN", r"bn1 \('GN' as stated\): .*authors' whitening layer"),
        ("BN", r"bn1 \('BN' as stated\)"),
        ("BW", r"bn1 \('BW' as stated\)"),
        ("", "names no norm"),
        ("XX", r"norm \('XX'\): unknown norm"),
        ("GW:groups=48", "does not divide 512 channels"),
    ],
)
def test_statement_that_contradicts_the_tensors(r18, norm, message):
    with pytest.raises(ValueError, match=message):
        convert(r18, norm=norm)


def test_statistics_prove_batch_norm():
    state = make_network("R-18").state_dict()
    assert convert(state).provenance.norms == convert(state, norm="FrozenBN").provenance.norms == ("BN", "", "")
    with pytest.raises(ValueError, match=r"norm \('GW'\): the weights have BN, no GW"):
        convert(state, norm="GW")


@pytest.mark.parametrize("norm", ["GW:groups=32,solver=zca", "GN:groups=8"])
def test_converted_weights_record_their_norm(norm, tmp_path):
    torch.save(authors_state(make_network("R-18", norm="GN")), tmp_path / "a.pth")
    convert_file(tmp_path / "a.pth", tmp_path / "a.pkl", norm=norm)
    convert_file(tmp_path / "a.pkl", tmp_path / "b.safetensors")
    provenance = load_weights(tmp_path / "b.safetensors").provenance
    recorded = provenance.whiten_norm or provenance.norm
    assert recorded == full_name(norm, 512)
    with pytest.raises(ValueError, match=r"norm \('GW'\): the weights have"):
        load_weights(tmp_path / "a.pkl", norm="GW")


def test_a_run_with_other_options_is_refused(r18_file, tmp_path, detector_cfg):
    from detectron2.modeling import build_model

    convert_file(r18_file, tmp_path / "a.pkl")
    weights = open_checkpoint(str(tmp_path / "a.pkl"))
    detector_cfg.MODEL.RESNETS.WHITEN_NORM = "GW:eps=1e-3"  # may be changed for fine-tuning
    load_checkpoint(build_model(detector_cfg), weights)
    detector_cfg.MODEL.RESNETS.WHITEN_NORM = "GW:groups=32"
    model = build_model(detector_cfg)
    with pytest.raises(NormMismatchError, match=r"9 layers differ \(backbone.bottom_up.stem.conv1.norm GW:groups=64"):
        load_checkpoint(model, weights)
    load_checkpoint(model, weights, allow_partial=True)


@pytest.mark.parametrize("value", [3, "text", [], {}, {"architecture": []}, {"positions": 5}])
def test_damaged_provenance(r18, value):
    with pytest.raises(ValueError, match="provenance: damaged.*Fix: "):
        convert({"model": r18, "provenance": value})


def test_authors_affine_is_whitening_of_any_solver():
    network = make_network("R-18", "S1")
    network.bn1 = GroupWhitening2d(64, 16, solver="zca")
    conversion = convert(authors_state(network), norm="GW:groups=16,solver=zca")
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        found = detectron2_classifier(conversion, config_for(conversion.provenance))(images)
        assert torch.allclose(found["res5"], stages(network, images)["res5"], rtol=1e-4, atol=1e-4)


def test_other_entries_of_a_header_may_hold_any_text():
    notes = read_notes(Contents({}, {"note": "{'a': 'dict of Python'}", "norms": '{"bn1": "GW"}'}))
    assert notes.norms == {"bn1": "GW"}
