"""Verification: right weights agree to rounding, each mistake is recognized."""

import argparse
import dataclasses

import pytest
import torch

from gw_detectron.config import read_config
from gw_detectron.data import synthetic_images
from gw_detectron.data.images import center_crop, classification_input
from gw_detectron.errors import UnknownNormError
from gw_detectron.weights import convert, convert_file, load_weights
from gw_detectron.weights.provenance import sha256_of
from gw_detectron.weights.reference_networks import config_for
from gw_detectron.weights.verify import is_labeled, measure_accuracy, verify
from gw_detectron.weights.weights_io import write_weights

from .synthetic import authors_state, make_network


@pytest.fixture(scope="module")
def images():
    return [image.resize((64, 64)) for image in synthetic_images(2)]


@pytest.fixture(scope="module")
def converted(r18_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("converted") / "r18.pkl"
    convert_file(r18_file, path, keep_fc=True)
    return path


def test_right_weights_agree_and_mistakes_do_not(converted, r18_file, images):
    found = verify(converted, images, source=r18_file)
    assert found.agrees
    assert found.subject.worst < 1e-10
    assert set(found.subject.relative) == {"stem", "res2", "res3", "res4", "res5", "logits"}
    assert found.subject.same_top1 == 1.0
    assert {row.name: row.worst > 1e-6 for row in found.mistakes} == {
        "BGR instead of RGB": True,
        "PIXEL_STD 1": True,
        "batch norm eps 0": True,
        "Detectron2's defaults (BGR, std 1, stride in 1x1)": True,
    }
    assert all(name in str(found) for name in ("AGREES", "max abs", "BGR instead of RGB", "res5"))


@pytest.mark.parametrize("norm", ["BN", "GN"])
def test_stride_and_weights_without_whitening(images, tmp_path, norm):
    torch.save(make_network("R-50", norm=norm).state_dict(), tmp_path / "r50.pth")
    found = verify(tmp_path / "r50.pth", images, norm=norm)
    assert found.agrees
    strides = {row.name: row.relative for row in found.mistakes}["stride in the 1x1 convolution"]
    assert strides["res2"] < 1e-10 < 1e-2 < strides["res3"]
    assert ("batch norm eps 0" in str(found)) == (norm == "BN")


@pytest.mark.parametrize(
    ("changes", "signature"),
    [
        ({"INPUT.FORMAT": "BGR"}, "signature of: BGR instead of RGB"),
        ({"MODEL.PIXEL_STD": [1.0, 1.0, 1.0]}, "signature of: PIXEL_STD 1"),
        (
            {
                "INPUT.FORMAT": "BGR",
                "MODEL.PIXEL_MEAN": [103.53, 116.28, 123.675],
                "MODEL.PIXEL_STD": [1.0, 1.0, 1.0],
            },
            "signature of: Detectron2's defaults",
        ),
        ({"MODEL.PIXEL_MEAN": [0.485, 0.456, 0.406]}, "signature of no mistake"),
        ({"MODEL.RESNETS.WHITEN_NORM": "GW:groups=32"}, "signature of no mistake"),
    ],
)
def test_mistake_of_a_config_is_named(converted, images, changes, signature):
    cfg = config_for(load_weights(converted).provenance)
    cfg.merge_from_list([word for pair in changes.items() for word in pair])
    found = verify(converted, images, cfg=cfg)
    assert not found.agrees
    assert found.verdict.startswith("DISAGREES")
    assert signature in found.verdict


def test_written_config_is_right(converted, images):
    assert verify(converted, images, cfg=read_config(converted.with_suffix(".yaml"))).agrees


def test_source_reveals_a_wrong_conversion(converted, r18_file, images, tmp_path):
    conversion = load_weights(converted)
    first, second = "res2.0.conv1.weight", "res2.0.conv2.weight"
    tensors = conversion.tensors
    tensors[first], tensors[second] = tensors[second], tensors[first]
    write_weights(tmp_path / "swapped.pkl", conversion)
    assert verify(tmp_path / "swapped.pkl", images).agrees  # consistent in itself
    assert not verify(tmp_path / "swapped.pkl", images, source=r18_file).agrees


def test_features_that_are_not_finite_disagree(images, tmp_path):
    state = make_network("R-18").state_dict()
    for name in [name for name in state if name.startswith(("layer3", "layer4")) and name.endswith("running_var")]:
        state[name].zero_()
        state[name.replace("running_var", "weight")].fill_(3e38)
    torch.save(state, tmp_path / "a.pth")
    convert_file(tmp_path / "a.pth", tmp_path / "a.pkl")
    found = verify(tmp_path / "a.pkl", images, source=tmp_path / "a.pth")
    assert not found.agrees and found.verdict.startswith("DISAGREES: the largest relative difference is inf.")


def test_wrong_source_is_refused(converted, images, tmp_path):
    torch.save(authors_state(make_network("R-18", "S1-B1", seed=5)), tmp_path / "other.pth")
    with pytest.raises(ValueError, match="was converted from r18.pth with"):
        verify(converted, images, source=tmp_path / "other.pth")


def test_config_of_another_network_is_refused(converted, images):
    cfg = config_for(load_weights(converted).provenance)
    cfg.MODEL.RESNETS.WHITEN_POSITIONS = "S1"
    with pytest.raises(ValueError, match=r"do not fit the network: .* missing \(res2\.0\.conv1\.norm\.running"):
        verify(converted, images, cfg=cfg)


def _labeled_folder(folder, names, images):
    for index, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        images[index % len(images)].save(folder / name / "0.png")
    return folder


def test_accuracy_of_labeled_images(converted, images, tmp_path):
    weights = load_weights(converted).tensors
    assert len(weights["linear.bias"]) == 10
    folder = _labeled_folder(tmp_path / "all", [f"n{index:02}" for index in range(10)], images)
    assert is_labeled(folder) and not is_labeled(folder / "n00")
    theirs, ours = measure_accuracy(converted, folder, batch_size=4)
    assert (theirs.images, ours.images) == (10, 10)
    assert (theirs.top1, theirs.top5) == (ours.top1, ours.top5)
    assert theirs.top1 <= theirs.top5
    assert theirs.top5 in (40.0, 50.0, 60.0)  # two images, each with all ten labels: five of them are right


def test_classes_by_number(converted, images, tmp_path):
    network = make_network("R-18", "S1-B1")
    with torch.no_grad():
        label = network(classification_input(center_crop(images[0])).float()[None]).argmax().item()
    for number, top1 in ((label, 100.0), ((label + 1) % 10, 0.0)):
        folder = _labeled_folder(tmp_path / f"as{number}", [str(number)], images)
        assert [row.top1 for row in measure_accuracy(converted, folder)] == [top1, top1]


def test_classes_that_do_not_fit(converted, r18_file, images, tmp_path):
    folder = _labeled_folder(tmp_path / "few", ["cat", "dog"], images)
    with pytest.raises(ValueError, match=r"2 classes, cat \.\.\. dog\): the classifier has 10"):
        measure_accuracy(converted, folder)
    convert_file(r18_file, tmp_path / "headless.pkl")
    with pytest.raises(ValueError, match="no classifier.*--keep-fc"):
        measure_accuracy(tmp_path / "headless.pkl", folder)


def test_wrong_claim_disagrees(images, tmp_path):
    """The tensors of GN and GW look alike, so only the source's norm reveals a wrong claim."""
    torch.save(make_network("R-18", norm="GN").state_dict(), tmp_path / "gn.pth")
    convert_file(tmp_path / "gn.pth", tmp_path / "gw.pkl", norm="GW")
    with pytest.raises(UnknownNormError, match="GN or GW alike.*--norm GN"):
        verify(tmp_path / "gw.pkl", images, source=tmp_path / "gn.pth")
    for source in (tmp_path / "gn.pth", None):
        found = verify(tmp_path / "gw.pkl", images, source=source, norm="GN")
        assert not found.agrees and found.verdict.startswith("DISAGREES")
        assert "--norm says GN" in found.verdict and found.verdict.endswith("Fix: leave --norm out, or give that norm.")
    assert verify(tmp_path / "gw.pkl", images, source=tmp_path / "gn.pth", norm="GW").agrees


def test_claim_against_the_flags_of_the_source(images, r18, tmp_path):
    torch.save({"model": r18}, tmp_path / "bare.pth")
    written = convert_file(tmp_path / "bare.pth", tmp_path / "a.pkl", norm="GW:groups=16")
    cfg = argparse.Namespace(norm="IGWItN", norm_cfg={"num_groups": 64})
    torch.save({"model": r18, "cfg": cfg}, tmp_path / "flags.pth")
    facts = dataclasses.replace(written.provenance, source_sha256=sha256_of(tmp_path / "flags.pth"))
    write_weights(tmp_path / "b.pkl", dataclasses.replace(written, provenance=facts))
    assert not verify(tmp_path / "b.pkl", images, source=tmp_path / "flags.pth").agrees


@pytest.mark.parametrize(
    "preprocessing",
    [
        "detectron2-msra",
        pytest.param("detectron2-fair", marks=pytest.mark.slow),
        pytest.param("detectron2-fair-resnext", marks=pytest.mark.slow),
    ],
)
def test_other_preprocessing_than_torchvisions(images, tmp_path, preprocessing):
    converted = convert(make_network("R-50").state_dict())
    torch.save({"model": converted.tensors}, tmp_path / "a.pth")
    convert_file(tmp_path / "a.pth", tmp_path / "a.pkl", preprocessing=preprocessing)
    found = verify(tmp_path / "a.pkl", images[:1], source=tmp_path / "a.pth")
    assert found.agrees
    assert all(row.worst > 1e-6 for row in found.mistakes), str(found)
