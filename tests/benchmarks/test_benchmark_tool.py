"""Command line: written files, a slowdown as exit status, user errors before the measurement."""

import subprocess
import sys

import pytest
import torch

from benchmarks import command as benchmark
from benchmarks import layer_benchmark, network_benchmark, timing
from benchmarks.networks import Variant
from benchmarks.table import read_csv, write_csv
from gw_detectron.errors import UserError


@pytest.fixture
def tool(monkeypatch):
    def run(*words):
        words = [str(word) for word in words]
        monkeypatch.setattr(sys, "argv", ["benchmark.py", *words])
        return benchmark.main(benchmark.get_parser().parse_args(words))

    return run


@pytest.fixture
def layer(tool, tmp_path):
    flags = ["--device", "cpu", "--shapes", "1x64x5x3", "--repeats", "2", "--output", tmp_path / "found"]
    return lambda *words: tool("layer", *flags, *words)


@pytest.fixture
def no_measurement(monkeypatch):
    """Fail the test if anything is measured."""
    for name in ("time_alternating", "memory_cells"):
        monkeypatch.setattr(layer_benchmark, name, lambda *args: pytest.fail("measured before all was checked"))


def test_layer_writes_its_table_and_compares_it(layer, tmp_path, capsys):
    assert layer() is True
    printed = capsys.readouterr().out
    assert "to_figure1" in printed and "1x64x5x3" in printed and "conv3x3" in printed
    assert sorted(file.name for file in tmp_path.iterdir()) == ["found.csv", "found.png"]
    table = read_csv(tmp_path / "found.csv")
    assert table.header["command"].startswith("python tools/benchmark.py layer --device cpu")
    assert {row["provider"] for row in table.rows} == {
        *("ours", "ours_relu", "relu_apart", "figure1", "group_norm", "batch_norm", "conv3x3", "floor")
    }
    for factor, passes in ((1e4, True), (1e-4, False)):
        rows = [row | {name: row[name] and row[name] * factor for name in table.columns.watched} for row in table.rows]
        write_csv(
            type(table)("layer", table.header, rows), tmp_path / "before.csv"
        )  # an earlier layer, slower or faster
        assert layer("--modes", "forward", "--compare", tmp_path / "before.csv") is passes
        printed = capsys.readouterr().out
        assert ("WORSE" in printed) is not passes
        assert f"{0 if passes else 4} of 4 ratios are worse" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tolerance", "-1"], r"--tolerance \(-1.0\)"),
        (["--shapes", "2x64x5x3"], "no ratio in common: the table has 1x64x5x3 fp32 memory ours"),
        (["--modes", "forward"], "no ratio in common"),
        (["--providers", "ours"], "no ratio in common: .*, this run has none"),
        (["--compare", "."], r"--compare \('.'\): no table of 'layer' for '.+', only for {}"),
        (["--compare", "nowhere.csv"], r"--compare \('nowhere.csv'\): file not found"),
        (["--groups", "32"], "settings of the table is 'groups=64 .*', of this run 'groups=32"),
        (["--output", "{tmp_path}/before"], r"before.csv'\): is the table to compare with"),
        (["--output", "."], r"--output \('.'\): no file name"),
        (["--output", "/"], r"--output \('/'\): no file name"),
        (["--output", ".."], r"--output \('..'\): no file name"),
        (["--output", "{tmp_path}/taken"], r"taken.png'\): is a folder"),
        (["--output", "{tmp_path}/file/below"], r"below.csv'\): cannot be written: .*\. Fix: give another path"),
        (["--output", "{tmp_path}/" + "x" * 240], r"x.csv'\): cannot be written: File name too long"),
    ],
)
def test_bad_input_is_refused_before_the_measurement(request, layer, tmp_path, words, message):
    layer("--modes", "memory", "--output", tmp_path / "before")
    (tmp_path / "taken.png").mkdir()
    (tmp_path / "file").touch()
    files = sorted(tmp_path.iterdir())
    request.getfixturevalue("no_measurement")
    words = [word.format(tmp_path=tmp_path) for word in words]
    before = (tmp_path / "before.csv").read_bytes()
    with pytest.raises(UserError, match=message):
        layer("--modes", "memory", "--compare", tmp_path / "before.csv", *words)
    assert (tmp_path / "before.csv").read_bytes() == before
    assert sorted(tmp_path.iterdir()) == files


def test_an_interrupted_run_writes_nothing(layer, tmp_path, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(layer_benchmark, "time_alternating", interrupted)
    with pytest.raises(SystemExit) as caught:
        layer()
    assert caught.value.code == 130
    assert capsys.readouterr().err.endswith("\nInterrupted: no table is written.\n")
    assert list(tmp_path.iterdir()) == []


def test_model_flags(tool, monkeypatch, tmp_path, capsys):
    variants = {"BN": Variant("BN"), "GW-S1": Variant("BN", "GW", "S1")}
    monkeypatch.setattr(network_benchmark, "MODELS", {"R-18": variants})
    monkeypatch.setattr(timing, "WARM_UP", 0)
    flags = ["--models", "R-18", "--batch-size", 2, "--image-size", 32, "--repeats", 1, "--output", tmp_path / "m"]
    assert tool("model", "--device", "cpu", *flags) is True
    assert "R-18" in capsys.readouterr().out
    assert [row["variant"] for row in read_csv(tmp_path / "m.csv").rows] == ["BN", "GW-S1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layer", "--shapes", "2x64"], r"--shapes \('2x64'\): not four positive integers"),
        (["layer", "--providers", "ours", "theirs"], r"--providers \('theirs'\): unknown"),
        (["model", "--models", "VGG"], r"--models \('VGG'\): unknown"),
        (["layer", "--device", "tpu"], r"--device \('tpu'\): unknown. Fix: use cpu, cuda"),
    ],
)
def test_bad_flags_are_refused(tool, words, message, tmp_path):
    with pytest.raises(UserError, match=message):
        tool(*words, "--output", tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu(tool):
    with pytest.raises(UserError, match="torch finds no CUDA device"):
        tool("layer", "--device", "cuda")


@pytest.mark.slow
def test_help_lists_the_providers():
    done = subprocess.run([sys.executable, "tools/benchmark.py", "layer", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "figure1_compiled  the same under torch.compile" in done.stdout
