"""Converted weights on disk: atomic, with record and config, loadable by stock Detectron2."""

import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import build_model

from gw_detectron.atomic import atomic_write
from gw_detectron.errors import FileAccessError, UserError, WeightsFileError
from gw_detectron.weights import (
    convert,
    convert_file,
    load_checkpoint,
    load_weights,
    open_checkpoint,
)
from gw_detectron.weights.describing import describe_checkpoint
from gw_detectron.weights.network_record import PREPROCESSING, TORCHVISION
from gw_detectron.weights.reading import RECORD_KEY, sha256_of
from gw_detectron.workbench.commands import weights as weights_command

from ..workbench.run.test_failures import files_limited_to
from .synthetic import make_network


@pytest.fixture(scope="module")
def converted(r18_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("converted") / "r18.pkl"
    convert_file(r18_file, path)
    return path


@pytest.fixture(scope="module")
def safe(r18_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("converted") / "r18.safetensors"
    convert_file(r18_file, path)
    return path


def assert_equal(tensors, expected):
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", ["converted", "safe"])
def test_a_changed_value_is_refused(request, kind, tmp_path):
    path = shutil.copy(request.getfixturevalue(kind), tmp_path)
    content = bytearray(Path(path).read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4] = bytes(byte ^ 1 for byte in content[middle:][:4])
    Path(path).write_bytes(content)

    with pytest.raises(
        WeightsFileError, match=r"damaged \(other checksum than written"
    ):
        open_checkpoint(path)


def test_writes_tensors_and_record(r18, r18_file, converted):
    conversion = load_weights(converted)

    assert_equal(conversion.tensors, convert(r18, norm="GW").tensors)
    origin = conversion.provenance
    assert (origin.source, origin.source_sha256) == ("r18.pth", sha256_of(r18_file))
    assert origin.tool.startswith("gw_detectron ")
    assert conversion.architecture.name == "R-18"
    assert conversion.preprocessing == TORCHVISION
    assert conversion.norms["bn1"] == "GW:groups=64,iters=5,eps=0,solver=newton"
    assert {path.name for path in converted.parent.iterdir()} == {"r18.pkl", "r18.yaml"}
    with pytest.raises(ValueError, match="GW:groups=32'.*GW:groups=64"):
        load_weights(converted, norm="GW:groups=32")


def test_safetensors_have_the_same_tensors_and_record(converted, safe, detector_cfg):
    expected = load_weights(converted)

    found = load_weights(safe)

    assert_equal(found.tensors, expected.tensors)
    assert replace(found, tensors={}) == replace(expected, tensors={})
    report = load_checkpoint(build_model(detector_cfg), open_checkpoint(safe))
    assert not report.missing
    description = describe_checkpoint(safe)
    assert description["format"] == "safetensors"
    assert description["preprocessing"]["input_format"] == "RGB"
    assert sum(description["norms"].values()) == 20


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "damaged"),
        ("[1]", "damaged"),
        ("[" * 100_000, "damaged"),
        ('{"norms": {"stem.conv1.norm": 1}}', "record of the file"),
        ('{"preprocessing": {"input_format": "RGB"}}', "record of the file"),
    ],
)
def test_a_damaged_record_of_safetensors_is_an_error(safe, tmp_path, record, message):
    path = tmp_path / "a.safetensors"
    tensors = safetensors.torch.load_file(safe)
    safetensors.torch.save_file(tensors, path, {RECORD_KEY: record})

    with pytest.raises(WeightsFileError, match=message):
        open_checkpoint(path)


def test_safetensors_of_another_program_need_a_conversion(r18, tmp_path):
    path = tmp_path / "my weights.safetensors"
    safetensors.torch.save_file(dict(r18), path, {"format": "pt"})

    with pytest.raises(WeightsFileError, match=f"weights convert '{path}' NEW.pkl"):
        open_checkpoint(path)


def test_stock_detectron2_loads_it_with_the_written_config(
    r18, r18_file, tmp_path, detector_cfg
):
    convert_file(r18_file, tmp_path / "a.pkl")
    cfg = detector_cfg
    cfg.MODEL.RESNETS.WHITEN_POSITIONS = "S1-B2"  # to be corrected by the yaml
    cfg.merge_from_file(str(tmp_path / "a.yaml"))
    model = build_model(cfg)

    DetectionCheckpointer(model).load(cfg.MODEL.WEIGHTS)

    assert cfg.INPUT.FORMAT == "RGB"
    assert cfg.MODEL.PIXEL_STD == [58.395, 57.12, 57.375]
    assert not load_checkpoint(
        build_model(cfg), open_checkpoint(cfg.MODEL.WEIGHTS)
    ).missing
    state = model.backbone.bottom_up.state_dict()
    expected = convert(r18, norm="GW").tensors
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_invalid_weights_write_nothing(r18, tmp_path):
    torch.save(
        {**r18, "conv1.weight": r18["conv1.weight"] / 0}, tmp_path / "broken.pth"
    )
    (tmp_path / "a.pkl").write_text("precious")

    with pytest.raises(
        WeightsFileError, match="(?s)broken.pth'.*infinite: conv1.weight"
    ):
        convert_file(
            tmp_path / "broken.pth", tmp_path / "a.pkl", norm="GW", overwrite=True
        )

    assert (tmp_path / "a.pkl").read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"a.pkl", "broken.pth"}


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("", "", "suffix"),
        ("", "a.pkl", "file not found"),
        ("r18.pth", "a.pth", ".pkl or .safetensors"),
        ("r18.pth", "own.yaml/a.pkl", "own.yaml/a"),
        ("r18.pth", "own.pkl", "--force"),
        (".", "a.pkl", "'.'"),
    ],
)
def test_paths_that_cannot_be_used(
    r18_file, converted, tmp_path, monkeypatch, source, target, message
):
    shutil.copy(r18_file, tmp_path)
    shutil.copy(converted, tmp_path / "own.pkl")
    (tmp_path / "own.yaml").write_text("my own config")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UserError, match=message):
        convert_file(source, target)

    assert (tmp_path / "own.yaml").read_text() == "my own config"
    assert not (tmp_path / "a.pkl").exists()


def test_files_are_overwritten_by_request_and_folders_created(
    r18_file, converted, tmp_path, monkeypatch
):
    shutil.copy(converted, tmp_path / "own.pkl")
    monkeypatch.chdir(tmp_path)
    convert_file(r18_file, "own.pkl", overwrite=True)
    assert "S1-B1" in (tmp_path / "own.yaml").read_text()
    convert_file(r18_file, "new/folder/a.pkl")
    assert (tmp_path / "new/folder/a.pkl").is_file()


@pytest.mark.parametrize("suffix", [".pkl", ".safetensors"])
def test_a_full_disk_is_named_and_leaves_nothing(r18_file, tmp_path, suffix):
    with (
        pytest.raises(FileAccessError, match=f"r18{suffix}'.*free disk space"),
        files_limited_to(100_000),
    ):
        convert_file(r18_file, tmp_path / f"r18{suffix}")

    assert list(tmp_path.iterdir()) == []


def test_the_unfinished_file_of_another_process_stays(r18_file, tmp_path):
    checkpoint = tmp_path / "model_0000099.pth"
    with atomic_write(checkpoint) as unfinished:
        unfinished.write_text("of a training")
        convert_file(r18_file, tmp_path / "r18.pkl")
    assert checkpoint.is_file()


def test_a_record_must_fit_the_tensors(converted, tmp_path):
    content = pickle.loads(converted.read_bytes())
    content["norms"] |= {"res2.0.conv1.norm": "BN", "res2.0.conv2.norm": "GW"}
    (tmp_path / "b.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(WeightsFileError, match="(?s)b.pkl.*(missing|positions)"):
        load_weights(tmp_path / "b.pkl")


def test_the_preprocessing_is_recorded(tmp_path):
    tensors = convert(make_network("R-18").state_dict()).tensors
    torch.save({"model": tensors}, tmp_path / "a.pth")
    convert_file(
        tmp_path / "a.pth", tmp_path / "a.pkl", preprocessing="detectron2-msra"
    )

    recorded = load_weights(tmp_path / "a.pkl").preprocessing

    assert recorded == PREPROCESSING["detectron2-msra"]
    with pytest.raises(WeightsFileError, match="'torchvision'.*BGR"):
        load_weights(tmp_path / "a.pkl", preprocessing="torchvision")


@pytest.mark.parametrize("preprocessing", ["detectron2-msra", "torchvision"])
def test_the_command(r18_file, tmp_path, capsys, preprocessing):
    words = [
        "convert",
        "--preprocessing",
        preprocessing,
        str(r18_file),
        f"{tmp_path}/a.pkl",
    ]
    weights_command.main(weights_command.get_parser().parse_args(words))
    assert "82 tensors of R-18 with BN, GW:groups=64" in capsys.readouterr().out
    assert (
        load_weights(tmp_path / "a.pkl").preprocessing == PREPROCESSING[preprocessing]
    )
