"""Benchmark of detectors: a row each, ratios to the first, errors before the measurement."""

import numpy as np
import pytest
import torch

from benchmarks import command as benchmark
from benchmarks import detector_benchmark
from benchmarks.detector_benchmark import DetectorSettings, plan_detectors, run_detectors
from benchmarks.plot import plot
from benchmarks.summary import summary
from benchmarks.table import read_csv, write_csv
from gw_detectron.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture
def opened(monkeypatch):
    """Detectors that only record how they are opened and called."""
    calls = []

    def open_predictor(model, device):
        calls.append((model, device))
        return lambda image: calls.append((model, image.shape))

    monkeypatch.setattr(detector_benchmark, "open_predictor", open_predictor)
    return calls


def test_each_detector_predicts_the_same_image_in_each_round(opened, tmp_path):
    table = run_detectors(DetectorSettings(CPU, ["run", "a.onnx"], repeats=4), "the command")
    assert opened[:2] == [("run", "cpu"), ("a.onnx", "cpu")]
    shapes = {shape for _, shape in opened[2:]}
    assert len(shapes) == 1 and all(sum(name == model for name, _ in opened[2:]) == 7 for model in ("run", "a.onnx"))
    first, second = table.rows
    assert first["to_first"] == 1 and np.isclose(second["to_first"], second["median_ms"] / first["median_ms"])
    assert table.header["command"] == "the command" and "a.onnx" in summary(table)
    write_csv(table, tmp_path / "t.csv")
    read = read_csv(tmp_path / "t.csv").rows
    assert [row["to_first"] for row in read] == pytest.approx([row["to_first"] for row in table.rows], rel=1e-3)
    plot(table, tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 5000
    plan = plan_detectors(DetectorSettings(CPU, ["run", "a.onnx"]))
    assert [row["detector"] for row in plan.rows] == ["run", "a.onnx"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "run"], r"MODEL \('run'\): given twice"),
        (["run", "--repeats", "0"], "--repeats"),
        (["run", "--image", "none.png"], "file not found: 'none.png'|none.png"),
        (["no_such_run"], "no_such_run"),
    ],
)
def test_bad_flags_are_refused(words, message, tmp_path):
    args = benchmark.get_parser().parse_args(["detector", *words, "--output", str(tmp_path / "x")])
    with pytest.raises(UserError, match=message):
        benchmark.main(args)
    assert not list(tmp_path.iterdir())
