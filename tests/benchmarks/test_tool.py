"""The command line: files written, a slowdown as exit status, errors for people."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import layer as layer_file
from benchmarks import model as model_file
from benchmarks import read_csv, write_csv
from benchmarks.model import Variant
from gw_detectron.engine.launch import errors_reported

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
        *("ours", "ours_relu", "relu_apart", "figure1", "group_norm", "batch_norm", "conv3x3", "floor")
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
    assert f"{0 if fine else 10} of 10 ratios are worse" in printed


@pytest.fixture
def never(monkeypatch):
    """Fails the test if anything is measured."""
    monkeypatch.setattr(layer_file, "alternate", lambda *args: pytest.fail("measured before all was checked"))
    monkeypatch.setattr(layer_file, "saved_bytes", lambda *args: pytest.fail("measured before all was checked"))


@pytest.fixture
def before(layer, tmp_path):
    layer("--modes", "memory", "--output", tmp_path / "before")
    return tmp_path / "before.csv"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tolerance", "-1"], "tolerance -1.0: give a finite number"),
        (["--tolerance", "nan"], "tolerance nan: give a finite number"),
        (["--shapes", "2x64x5x3"], "no ratio in common: the reference has 1x64x5x3 fp32 memory ours"),
        (["--modes", "forward"], "no ratio in common"),
        (["--providers", "ours"], "no ratio in common: .*, this run none"),
        (["--compare", ""], "no table of measurements ''"),
        (["--output", "{before}"], "before.csv is the reference itself: give .* another name"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_measured(request, layer, before, words, message):
    request.getfixturevalue("never")
    words = [word.format(before=before.with_suffix("")) for word in words]
    earlier = before.read_bytes()
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        layer("--modes", "memory", "--compare", before, *words)
    assert before.read_bytes() == earlier


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (".", "output '.' names no file"),
        ("/", "output '/' names no file"),
        ("..", "output '..' names no file"),
        ("{tmp_path}/taken", "taken.png is a folder: give"),
        ("{tmp_path}/file/below", r"below.csv cannot be written \(.*\): give another name"),
        ("{tmp_path}/" + "x" * 240, r"x.csv cannot be written \(File name too long\)"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_anything_is_measured(
    layer, never, tmp_path, capsys, output, message
):
    (tmp_path / "taken.png").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as caught, errors_reported():
        layer("--output", output.format(tmp_path=tmp_path))
    assert caught.value.code == 1
    assert re.search(message, capsys.readouterr().err)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "taken.png"]


def test_an_interrupted_run_says_so_in_one_line(layer, tmp_path, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(layer_file, "alternate", interrupted)
    with pytest.raises(SystemExit) as caught:
        layer()
    assert caught.value.code == 130
    assert capsys.readouterr().err.endswith("\nInterrupted while measuring: no table is written.\n")
    assert list(tmp_path.iterdir()) == []


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
        (["layer", "--compare", "nowhere.csv"], "there is no table of measurements 'nowhere.csv'"),
        (["model", "--models", "VGG"], "unknown model 'VGG'"),
        (["model", "--variants", "GW-S2"], "unknown variant 'GW-S2'"),
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
