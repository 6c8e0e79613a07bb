"""The command line: files written, a slowdown as exit status, errors for people."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gw_detectron.benchmark import model as model_file
from gw_detectron.benchmark import read_csv, write_csv
from gw_detectron.benchmark.model import Variant
from gw_detectron.launch import errors_reported

FILE = Path(__file__).parents[2] / "tools" / "benchmark.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("benchmark_tool", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *words: module.main(module.get_parser().parse_args([str(word) for word in words]), "the command")


@pytest.fixture
def layer(tool, tmp_path):
    flags = ["--device", "cpu", "--shapes", "1x64x5x3", "--repeats", "2", "--output", tmp_path / "found"]
    return lambda *words: tool("layer", *flags, *words)


def test_layer_prints_and_writes_its_table(layer, tmp_path, capsys):
    assert layer() is True
    printed = capsys.readouterr().out
    assert "to_figure1" in printed and "1x64x5x3" in printed and "conv3x3" in printed
    assert sorted(file.name for file in tmp_path.iterdir()) == ["found.csv", "found.png"]
    table = read_csv(tmp_path / "found.csv")
    assert table.header["command"] == "the command"
    assert {row["provider"] for row in table.rows} == {
        *("ours", "figure1", "group_norm", "batch_norm", "conv3x3", "floor")
    }


@pytest.mark.parametrize(("factor", "fine"), [(1e4, True), (1e-4, False)])
def test_compare_with_an_earlier_table(layer, tmp_path, capsys, factor, fine):
    layer()
    table = read_csv(tmp_path / "found.csv")
    for row in table.rows:  # as if the layer had been that much slower before
        for name in table.columns.watched:
            row[name] = row[name] and row[name] * factor
    write_csv(table, tmp_path / "before.csv")
    capsys.readouterr()
    assert layer("--compare", tmp_path / "before.csv") is fine
    printed = capsys.readouterr().out
    assert ("WORSE" in printed) is not fine
    assert f"{0 if fine else 7} of 7 ratios are worse" in printed


def test_a_reference_of_another_device_is_refused_before_anything_is_measured(layer, tmp_path):
    layer("--modes", "memory")
    csv = tmp_path / "found.csv"
    csv.rename(tmp_path / "before.csv")
    text = (tmp_path / "before.csv").read_text()
    (tmp_path / "before.csv").write_text(text.replace("# device: cpu", "# device: cuda"))
    with pytest.raises(ValueError, match="measured with device cuda"):
        layer("--compare", tmp_path / "before.csv")
    assert not csv.exists()


def test_model_flags(tool, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(model_file, "MODELS", {"R-18": {"BN": Variant("BN"), "GW-S1": Variant("BN", "GW", "S1")}})
    flags = ["--models", "R-18", "--batch-size", 2, "--image-size", 32, "--repeats", 1, "--output", tmp_path / "m"]
    assert tool("model", "--device", "cpu", *flags) is True
    assert "R-18" in capsys.readouterr().out
    assert [row["variant"] for row in read_csv(tmp_path / "m.csv").rows] == ["BN", "GW-S1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layer", "--shapes", "2x64"], "shape '2x64': write four positive integers"),
        (["layer", "--providers", "ours", "theirs"], "unknown provider 'theirs'"),
        (["layer", "--dtypes", "fp8"], "unknown dtype 'fp8'"),
        (["layer", "--compare", "nowhere.csv"], "there is no table of measurements nowhere.csv"),
        (["model", "--models", "VGG"], "unknown model 'VGG'"),
        (["layer", "--device", "tpu"], "device 'tpu': allowed are cpu and cuda"),
    ],
)
def test_errors_speak_to_people(tool, words, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught, errors_reported():
        tool(*words, "--output", tmp_path / "x")
    assert caught.value.code == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks about a machine without a GPU")
def test_a_gpu_that_is_not_there(tool):
    with pytest.raises(ValueError, match="torch finds no CUDA device"):
        tool("layer", "--device", "cuda")


def test_help_names_the_providers():
    done = subprocess.run([sys.executable, "-W", "ignore", FILE, "layer", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "figure1_compiled  the same under torch.compile" in done.stdout
