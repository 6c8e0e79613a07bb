"""Converted weights on disk: atomic, with provenance and config, loadable by stock Detectron2."""

import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import get_cfg
from detectron2.modeling import build_model
from safetensors import safe_open
from safetensors.torch import save_file

from gw_detectron import add_gw_config
from gw_detectron.atomic import atomic_write
from gw_detectron.checkpoint import load_checkpoint, open_checkpoint
from gw_detectron.errors import UserError, WeightsFileError
from gw_detectron.weights import convert, convert_file, load_weights, weights_io
from gw_detectron.weights.provenance import TORCHVISION, Provenance, sha256_of
from gw_detectron.weights.weights_io import SUFFIXES

from .synthetic import authors_state, make_network


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_writes_tensors_and_provenance(r18, r18_file, tmp_path, suffix):
    convert_file(r18_file, tmp_path / f"a{suffix}")
    conversion = load_weights(tmp_path / f"a{suffix}")
    provenance = conversion.provenance
    expected = convert(r18, norm="GW").tensors
    assert conversion.tensors.keys() == expected.keys()
    assert all(torch.equal(conversion.tensors[name], value) for name, value in expected.items())
    assert provenance.source == "r18.pth"
    assert provenance.source_sha256 == sha256_of(r18_file)
    assert provenance.tool.startswith("gw_detectron ")
    assert (provenance.architecture, provenance.positions, provenance.norm) == ("R-18", "S1-B1", "BN")
    assert provenance.preprocessing == TORCHVISION
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a{suffix}", "a.yaml"]


def test_file_formats(r18_file, tmp_path):
    convert_file(r18_file, tmp_path / "a.pkl")
    content = pickle.loads((tmp_path / "a.pkl").read_bytes())
    assert content["matching_heuristics"] is True
    assert content["__author__"].startswith("gw_detectron")
    assert {value.dtype.name for value in content["model"].values()} == {"float32"}
    convert_file(r18_file, tmp_path / "b.safetensors")
    with safe_open(tmp_path / "b.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(content["model"])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_stock_detectron2_loads_it_with_the_written_config(r18, r18_file, tmp_path, detector_cfg, suffix):
    convert_file(r18_file, tmp_path / f"a{suffix}")
    cfg = get_cfg()
    add_gw_config(cfg)
    cfg.merge_from_other_cfg(detector_cfg)
    cfg.MODEL.RESNETS.WHITEN_POSITIONS = "S1-B2"  # to be corrected by the yaml
    cfg.merge_from_file(str(tmp_path / "a.yaml"))
    assert cfg.INPUT.FORMAT == "RGB"
    assert cfg.MODEL.PIXEL_STD == [58.395, 57.12, 57.375]
    model = build_model(cfg)
    DetectionCheckpointer(model).load(cfg.MODEL.WEIGHTS)
    report = load_checkpoint(build_model(cfg), open_checkpoint(cfg.MODEL.WEIGHTS))
    assert str(report) == "backbone: 82/82 tensors; FPN and heads start new, as expected"
    state = model.backbone.bottom_up.state_dict()
    assert all(torch.equal(state[name], value) for name, value in convert(r18, norm="GW").tensors.items())


def test_keeps_the_classifier_on_request(r18, r18_file, tmp_path):
    convert_file(r18_file, tmp_path / "a.pkl", keep_fc=True)
    tensors = load_weights(tmp_path / "a.pkl").tensors
    assert torch.equal(tensors["linear.weight"], r18["fc.weight"])
    assert torch.equal(tensors["linear.bias"], r18["fc.bias"])


def test_converted_weights_can_be_written_in_the_other_format(r18_file, tmp_path):
    convert_file(r18_file, tmp_path / "a.safetensors")
    convert_file(tmp_path / "a.safetensors", tmp_path / "b.pkl")
    first, second = load_weights(tmp_path / "a.safetensors"), load_weights(tmp_path / "b.pkl")
    assert first.provenance == second.provenance  # of the authors' file, not of the one between
    assert all(torch.equal(first.tensors[name], value) for name, value in second.tensors.items())


def test_safetensors_of_torchvision_or_timm(r18, tmp_path):
    save_file({name: value.contiguous() for name, value in r18.items()}, tmp_path / "timm.safetensors")
    assert convert_file(tmp_path / "timm.safetensors", tmp_path / "a.pkl", norm="GW").provenance.positions == "S1-B1"


def _broken(r18, tmp_path):
    torch.save({**r18, "conv1.weight": r18["conv1.weight"] / 0}, tmp_path / "broken.pth")
    return tmp_path / "broken.pth"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_invalid_weights_write_nothing(r18, tmp_path, suffix):
    source = _broken(r18, tmp_path)
    (tmp_path / f"a{suffix}").write_text("precious")
    with pytest.raises(WeightsFileError, match="(?s)broken.pth'\\): .*NaN or infinite: conv1.weight"):
        convert_file(source, tmp_path / f"a{suffix}", norm="GW", overwrite=True)
    assert (tmp_path / f"a{suffix}").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a{suffix}", "broken.pth"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_full_disk_leaves_no_files(r18_file, tmp_path, monkeypatch, suffix):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights_io.pickle, "dump", fail)
    monkeypatch.setattr(weights_io, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        convert_file(r18_file, tmp_path / f"a{suffix}")
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_overwritten_only_on_request(r18_file, tmp_path):
    (tmp_path / "a.yaml").write_text("my own config")
    with pytest.raises(FileExistsError, match="--force"):
        convert_file(r18_file, tmp_path / "a.pkl")
    assert (tmp_path / "a.yaml").read_text() == "my own config"
    convert_file(r18_file, tmp_path / "a.pkl", overwrite=True)
    assert "S1-B1" in (tmp_path / "a.yaml").read_text()


def test_bad_targets(r18_file, tmp_path):
    with pytest.raises(ValueError, match="Fix: end the name in .pkl or .safetensors"):
        convert_file(r18_file, tmp_path / "a.pth")
    with pytest.raises(ValueError, match="wrong suffix"):
        convert_file("", "")
    with pytest.raises(FileNotFoundError, match="folder not found"):
        convert_file(r18_file, tmp_path / "none" / "a.pkl")
    with pytest.raises(FileNotFoundError):
        convert_file(tmp_path / "none.pth", tmp_path / "a.pkl")
    convert_file(r18_file, tmp_path / "a.pkl")
    with pytest.raises(ValueError, match="is the source itself"):
        convert_file(tmp_path / "a.pkl", tmp_path / "a.pkl", overwrite=True)


def test_damaged_provenance(r18_file, tmp_path):
    convert_file(r18_file, tmp_path / "a.pkl")
    content = pickle.loads((tmp_path / "a.pkl").read_bytes())
    del content["provenance"]["preprocessing"]
    (tmp_path / "b.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(WeightsFileError, match="b.pkl.*provenance: damaged"):
        load_weights(tmp_path / "b.pkl")


def test_provenance_of_unconverted_weights(r18_file, tmp_path):
    shutil.copy(r18_file, tmp_path / "mine.pth")
    provenance = load_weights(tmp_path / "mine.pth").provenance
    assert (provenance.source, provenance.architecture) == ("mine.pth", "R-18")


def test_two_writers_of_one_file(tmp_path):
    target = tmp_path / "weights.pkl"
    (tmp_path / "weights.pkl.tmp").write_text("the user's")
    with atomic_write(target) as first, atomic_write(target) as second:
        assert first != second
        first.write_text("one")
        second.write_text("two")
    assert target.read_text() == "one"  # the outer one ends last
    assert (tmp_path / "weights.pkl.tmp").read_text() == "the user's"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("positions", ["S1-B1", "ALL"])
def test_weights_of_version_0_1_0(tmp_path, suffix, positions, caplog):
    source = make_network("R-18", positions)
    tensors = {
        name: value.flatten() if value.dim() < 4 else value
        for name, value in convert(authors_state(source), norm="GW", keep_fc=True).tensors.items()
        if not name.startswith("linear")
    }
    provenance = {
        "tool": "gw_detectron 0.1.0",
        "source": "resnet18.pth",
        "source_sha256": "0" * 64,
        "architecture": "R-18",
        "positions": positions,
        "norm": "BN",
        "preprocessing": {
            "input_format": "RGB",
            "pixel_mean": (123.675, 116.28, 103.53),
            "pixel_std": (58.395, 57.12, 57.375),
            "stride_in_1x1": False,
        },
        "pool_norm": None,
    }
    if suffix == ".pkl":
        arrays = {name: value.numpy() for name, value in tensors.items()}
        content = {"model": arrays, "__author__": "gw_detectron 0.1.0", "matching_heuristics": True}
        (tmp_path / "old.pkl").write_bytes(pickle.dumps(content | {"provenance": provenance}, protocol=4))
    else:
        save_file(tensors, tmp_path / "old.safetensors", {"format": "pt", "gw_detectron": json.dumps(provenance)})
    conversion = load_weights(tmp_path / f"old{suffix}")
    assert "assumed by version 0.1.0" in caplog.text
    assert conversion.provenance == Provenance.from_dict(provenance)
    assert dataclasses.asdict(conversion.provenance) == {**provenance, "whiten_norm": None}
    assert conversion.provenance.config()["MODEL"]["RESNETS"]["WHITEN_NORM"] == "GW"
    caplog.clear()
    stated = load_weights(tmp_path / f"old{suffix}", norm="GW").provenance
    assert stated.whiten_norm.startswith("GW:groups=64,") and not caplog.records
    assert conversion.tensors.keys() == tensors.keys()
    assert all(torch.equal(conversion.tensors[name], value) for name, value in tensors.items())


def test_provenance_must_fit_the_tensors(r18_file, tmp_path):
    conversion = convert_file(r18_file, tmp_path / "a.pkl")
    wrong = dataclasses.replace(conversion.provenance, positions="S1-B2")
    weights_io.write_weights(tmp_path / "b.pkl", dataclasses.replace(conversion, provenance=wrong))
    with pytest.raises(
        WeightsFileError, match=r"layer1.0.bn1 \('BN' by the file's notes\): the tensors are those of GN or GW"
    ):
        load_weights(tmp_path / "b.pkl")


def test_detectron2_names_do_not_show_the_preprocessing(tmp_path):
    tensors = convert(make_network("R-18").state_dict()).tensors
    torch.save({"model": tensors}, tmp_path / "a.pth")
    with pytest.raises(WeightsFileError, match="preprocessing .not recorded.*--preprocessing.* detectron2-msra"):
        load_weights(tmp_path / "a.pth")
    with pytest.raises(WeightsFileError, match=r"preprocessing \('BGR'\): unknown"):
        load_weights(tmp_path / "a.pth", preprocessing="BGR")
    convert_file(tmp_path / "a.pth", tmp_path / "a.pkl", preprocessing="detectron2-msra")
    config = load_weights(tmp_path / "a.pkl").provenance.config()
    assert config["INPUT"]["FORMAT"] == "BGR" and config["MODEL"]["PIXEL_STD"] == [1.0, 1.0, 1.0]
    with pytest.raises(WeightsFileError, match=r"preprocessing \('torchvision'\): the file records .*BGR"):
        load_weights(tmp_path / "a.pkl", preprocessing="torchvision")
    (tmp_path / "zoo.pkl").write_bytes(
        pickle.dumps({"model": {k: v.numpy() for k, v in tensors.items()}, "__author__": "torchvision"})
    )
    assert load_weights(tmp_path / "zoo.pkl").provenance.preprocessing == TORCHVISION


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("", "", "wrong suffix"),
        ("", "a.pkl", "file not found"),
        ("r18.pth", "", "wrong suffix"),
        ("r18.pth", "r18.pth/a.pkl", "folder not found"),
        (".", "a.pkl", r"'.': cannot be read: Is a directory. Fix: "),
        ("r18.pth", "folder.pkl", "exists"),
        ("broken.safetensors", "a.pkl", "notes of the file: damaged.*Fix: "),
    ],
)
def test_paths_that_cannot_be_used(r18, r18_file, tmp_path, monkeypatch, source, target, message):
    shutil.copy(r18_file, tmp_path)
    (tmp_path / "folder.pkl").mkdir()
    tensors = {name: value.contiguous() for name, value in r18.items()}
    save_file(tensors, tmp_path / "broken.safetensors", {"gw_detectron": "{"})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        convert_file(source, target)


def test_files_of_killed_conversions_are_removed(r18_file, tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=60)
    left = tmp_path / f".a.pkl.{os.uname().nodename}.{dead.pid}.00000000.tmp"
    left.write_text("half")
    convert_file(r18_file, tmp_path / "a.pkl")
    assert not left.exists()
