"""The command line: files, printed text, constraints of a config."""

import csv
import json

import pytest
from PIL import Image

from gw_detectron.analysis import AnalysisResult, analyze_constraints
from gw_detectron.cli import check_folder
from gw_detectron.commands import analyze_whitening
from gw_detectron.errors import FileAccessError

from ..tiny_run import CONFIG


@pytest.fixture
def run(tmp_path, capsys):
    """A function that runs the tool and returns rows, notes, picture and printed text."""

    def call(name: str, *words: object):
        arguments = analyze_whitening.get_parser().parse_args([name, "--output", str(tmp_path), *map(str, words)])
        analyze_whitening.main(arguments)
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.{kind}" for kind in ("csv", "json", "png")]
        with open(tmp_path / f"{name}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        notes = json.loads((tmp_path / f"{name}.json").read_text())
        with Image.open(tmp_path / f"{name}.png") as picture:
            picture.load()
        return rows, notes, picture, capsys.readouterr().out

    return call


def test_constraints_of_the_table_and_of_a_config(run):
    rows, notes, picture, printed = run(
        "constraints", "--batch-size", 64, "--examples", 640, "--config-file", CONFIG, "--height", 64, "--width", 64
    )
    table = {row["norm"]: row for row in rows[:4]}
    # d = 256, m = 64, g = 16: 2d, d(d+3)/2, 2gm, mg(g+3)/2
    assert [int(table[name]["constraints"]) for name in ("BN", "BW", "GN", "GW")] == [512, 33152, 2048, 9728]
    assert [table[name]["range"] for name in ("BN", "BW", "GN", "GW")] == ["m >= 2", "m >= 130", "g <= 128", "g <= 21"]
    assert int(table["GW"]["over_examples"]) == 97280
    assert table["BW"]["remark"].startswith("infeasible: whitening 256 rows over 64 columns")
    layers = {row["layer"]: row for row in rows[4:]}
    assert layers["backbone.bottom_up.res5.0.conv2.norm"]["remark"].startswith("infeasible: whitening 64 rows over 32")
    assert notes["findings"]["every layer of the model is feasible"] is False
    assert "NO   every layer of the model is feasible" in printed and "res5.0.conv2" in printed
    assert notes["settings"]["height"] == 64 and picture.width > 1000


def test_constraints_without_a_model(run):
    rows, notes, _, _ = run("constraints", "--config-file", "")
    assert len(rows) == 4 and len(notes["findings"]) == 1


def test_each_analysis_takes_its_options(run):
    _, notes, _, printed = run("swapping", "--neurons", 8, "--examples", 40, "--steps", 4, "--depths", 2, "--seed", 5)
    assert notes["settings"]["seed"] == 5 and notes["settings"]["depths"] == [2]
    assert "swapping.png" in printed


def test_diversity_without_small_groups(run):
    assert run("diversity", "--examples", 960, "--bins", 20, "--pairs", 1)[1]["settings"]["bins"] == 20


def test_conditioning(run):
    rows, *_ = run("conditioning", "--neurons", 8, "--examples", 64, "--layers", 1, "--repeats", 1)
    assert {row["method"] for row in rows} == {"Base", "BN", "GN", "GW", "GW-ItN"}


def test_layers(run):
    opts = ["INPUT.MIN_SIZE_TEST", 64, "MODEL.FPN.OUT_CHANNELS", 32, "MODEL.RPN.POST_NMS_TOPK_TEST", 5]
    rows, notes, _, printed = run("layers", "--config-file", CONFIG, "--count", 1, *opts)
    assert len(rows) > 20 and notes["settings"]["weights"] == "random"
    assert f"random: {notes['settings']['loaded']}" in printed


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"batch_size": 64, "examples": 100}, r"examples \(100\): not a multiple of batch_size=64"),
        ({"batch_size": 0}, r"batch_size \(0\): too small. Fix: give 1 or more"),
        ({"examples": -1024}, r"examples \(-1024\): too small. Fix: give 0 or more"),
    ],
)
def test_invalid_examples_and_batches(numbers, message):
    with pytest.raises(ValueError, match=message):
        analyze_constraints(**numbers)


@pytest.mark.parametrize("name", ["conditioning", "diversity", "layers", "swapping"])
@pytest.mark.parametrize("seed", ["-1", "4294967296", "x"])
def test_an_invalid_seed(name, seed, capsys):
    with pytest.raises(SystemExit):
        analyze_whitening.get_parser().parse_args([name, "--seed", seed])
    assert f"'{seed}' is not a seed. Fix: give a whole number from 0 to 4294967295" in capsys.readouterr().err


def test_without_the_folder_of_experiments(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(analyze_whitening, "ROOT", tmp_path)
    parser = analyze_whitening.get_parser()
    assert parser.parse_args(["layers"]).analysis == "layers" and not capsys.readouterr().err
    names = "conditioning, diversity, swapping, padding, tiling"
    assert f"In a clone of the repository only: {names}." in parser.format_help()
    with pytest.raises(SystemExit):
        parser.parse_args(["swapping"])


@pytest.mark.parametrize("output", ["file", "file/below"])
def test_the_folder_is_checked_before_the_analysis(tmp_path, monkeypatch, output):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(analyze_whitening, "analyze", lambda args: pytest.fail("it was run"))
    arguments = analyze_whitening.get_parser().parse_args(["swapping", "--output", str(tmp_path / output)])
    with pytest.raises(FileAccessError, match=f"'{tmp_path / 'file'}' is not a folder"):
        analyze_whitening.main(arguments)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(OSError, match=f"'{tmp_path}' is write-protected"):
        check_folder(tmp_path / "new")


def test_files_are_written_atomically(tmp_path):
    class NoFigure:
        def savefig(self, path, **options):
            path.write_text("half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        AnalysisResult("some", {}, [], {}, NoFigure()).write(tmp_path)
    assert list(tmp_path.iterdir()) == []
