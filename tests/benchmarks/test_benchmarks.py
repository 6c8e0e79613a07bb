"""Benchmarks: timing without a real clock, bytes by hand, the paper's listing by its numbers, ratios at tiny sizes."""

import itertools
import os
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks import command, network_benchmark, timing
from benchmarks.layer_benchmark import measure_layers
from benchmarks.memory import saved_bytes
from benchmarks.network_benchmark import measure_networks
from benchmarks.networks import Sizes, Variant, detector
from benchmarks.providers import (
    MODES,
    OPTIONAL,
    PRECISIONS,
    PROVIDERS,
    Case,
    Figure1Whitening,
)
from benchmarks.table import Table, geometric_means, plot, summary, write_csv
from benchmarks.timing import Step, time_alternating
from gw_detectron.errors import ConfigError

from ..ops.cases import assert_close, features, gradients
from ..ops.oracle import Setting, group_whiten, group_whiten_backward
from .csv_files import read_rows

CPU = torch.device("cpu")
SIZES = Sizes(batch_size=2, image_size=32, detector_batch=2, detector_image=64)
DEMO = "quick_schedules/mask_rcnn_R_18_FPN_{}_demo.yaml"
BN = {"BN": Variant("BN")}
USUAL = [name for name in PROVIDERS if name not in OPTIONAL]


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the steps advance."""
    now = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])
    return now


def test_a_drift_of_the_machine_does_not_change_ratios(clock):
    def step(cost):
        def run():
            clock[0] += cost * (1.0 + clock[0] / 4.0)  # slower and slower

        return Step(run)

    times = time_alternating({"one": step(0.01), "two": step(0.02)}, 200, CPU)

    one, two = times["one"], times["two"]
    assert two["median_ms"] / one["median_ms"] == pytest.approx(2.0, rel=0.02)
    assert one["q80_ms"] > 1.5 * one["q20_ms"]


def saved(module: nn.Module, x: torch.Tensor) -> int:
    return saved_bytes(lambda: module(x), module)


def test_bytes_saved_for_backward_are_those_counted_by_hand():
    x = torch.randn(2, 64, 5, 7, requires_grad=True)
    statistics = 2 * 2 * 32  # mean and deviation

    assert saved(nn.GroupNorm(32, 64), x) == 4 * (x.numel() + statistics)
    # its running statistics are saved, too, but not for this batch
    assert saved(nn.BatchNorm2d(64).eval(), x) == 4 * x.numel()
    with torch.no_grad():
        assert saved(nn.GroupNorm(32, 64), x) == 0


@pytest.mark.parametrize(("groups", "iters"), [(8, 5), (4, 3), (1, 1)])
def test_figure1_is_the_papers_formula(groups, iters):
    setting = Setting(groups, iters, eps=0.0)
    x = features(3, 16, 7, 5)
    dy = features(3, 16, 7, 5, seed=1)
    layer = Figure1Whitening(16, groups, iters).double()
    nn.init.uniform_(layer.weight, 0.5, 1.5)
    nn.init.uniform_(layer.bias, -1, 1)

    y, *grads = gradients(layer, x, dy)

    weight = layer.weight.detach().flatten().numpy()
    bias = layer.bias.detach().flatten().numpy()
    assert_close(y, group_whiten(x.numpy(), setting, weight, bias), 1e-12)
    expected = group_whiten_backward(x.numpy(), dy.numpy(), setting, weight)
    for gradient, wanted in zip(grads, expected, strict=True):
        assert_close(gradient.reshape(wanted.shape), wanted)


@pytest.fixture(scope="module")
def rows():
    shapes, modes = ((2, 64, 5, 3), (1, 32, 4, 4)), (*MODES, "memory")
    cases = [
        Case(shape, dtype, mode, CPU, 16, 5)
        for shape in shapes
        for dtype in ("fp32", "bf16")
        for mode in modes
    ]
    return list(measure_layers(cases, USUAL, repeats=2))


def test_rows_and_ratios_of_layers(rows):
    by_key = {
        (row["shape"], row["dtype"], row["mode"], row["provider"]): row for row in rows
    }

    modes = (*MODES, "memory")
    keys = set(
        itertools.product(["2x64x5x3", "1x32x4x4"], ["fp32", "bf16"], modes, USUAL)
    )
    # which saves nothing
    without = {key for key in keys if key[2:] == ("memory", "floor")}
    assert by_key.keys() == keys - without
    for (*cell, mode, _), row in by_key.items():
        if mode == "memory":
            base = by_key[(*cell, mode, "group_norm")]
            ratio = row["saved_mib"] / base["saved_mib"]
            assert row["saved_to_group_norm"] == pytest.approx(ratio)
            continue
        assert row["repeats"] == 2
        assert 0 < row["q20_ms"] <= row["median_ms"] <= row["q80_ms"]
        for name in ("figure1", "group_norm", "batch_norm", "floor", "relu_apart"):
            base = by_key[(*cell, mode, name)]
            assert row[f"to_{name}"] == pytest.approx(
                row["median_ms"] / base["median_ms"]
            )


def test_geometric_means_are_over_shapes():
    cell = {"dtype": "fp32", "mode": "forward", "provider": "ours"}
    rows = [cell | {"shape": "2x64x5x3", "to_floor": 2.0}]
    rows += [cell | {"shape": "1x32x4x4", "to_floor": 8.0}]

    (mean,) = geometric_means(rows, ["to_floor"])

    assert mean["to_floor"] == pytest.approx(4.0)


def test_a_table_is_written_plotted_and_shown(rows, tmp_path):
    table = Table("layer", {"machine": "a processor", "command": "the command"}, rows)

    write_csv(table, tmp_path / "t.csv")
    plot(table, tmp_path / "t.png")

    header = (tmp_path / "t.csv").read_text().splitlines()[:3]
    assert header[0] == "# benchmark: layer"
    assert header[2] == "# command: the command"
    read = read_rows(tmp_path / "t.csv")
    assert list(read[0]) == [*table.key, *table.numbers, "note"]
    written = [float(row["to_floor"] or 0) for row in read]
    numbers = [row.get("to_floor") or 0 for row in rows]
    assert written == pytest.approx(numbers, rel=1e-4)
    assert "the command" in summary(table)
    assert "geometric means" in summary(table)
    assert len(Image.open(tmp_path / "t.png").convert("L").getcolors()) > 50


def test_each_model_is_divided_by_its_first_variant(monkeypatch):
    classifiers = {
        "BN": Variant("BN"),
        "GN": Variant("GN"),
        "GW-S1-B2": Variant("BN", "GW", "S1-B2"),
    }
    detectors = {norm: Variant(config=DEMO.format(norm)) for norm in ("BN", "BN_GW")}
    models = {
        "R-18": classifiers,
        "R-18-inference": classifiers,
        "small_detector": detectors,
    }
    monkeypatch.setattr(network_benchmark, "MODELS", models)
    monkeypatch.setattr(timing, "WARM_UP", 0)

    measured = measure_networks(
        list(models), ["BN_GW", "GW-S1-B2"], "fp32", SIZES, 1, CPU
    )

    by_variant = {(row["model"], row["variant"]): row for row in measured}
    assert list(by_variant) == [
        ("R-18", "BN"),
        ("R-18", "GW-S1-B2"),
        ("R-18-inference", "BN"),
        ("R-18-inference", "GW-S1-B2"),
        ("small_detector", "BN"),
        ("small_detector", "BN_GW"),
    ]
    for (model, _), row in by_variant.items():
        base = by_variant[model, "BN"]
        assert row["to_bn"] == pytest.approx(row["median_ms"] / base["median_ms"])
        assert row["batch"] == "2"
        assert row["image"] == ("64x85" if model == "small_detector" else "32x32")
        assert ("saved_mib" in row) != (model == "R-18-inference")
        if "saved_mib" in row:
            assert row["saved_to_bn"] == row["saved_mib"] / base["saved_mib"]


def test_all_iterations_of_a_detector_are_equal():
    built = detector(
        Variant(config=DEMO.format("BN_GW")), SIZES, PRECISIONS["fp32"], CPU
    )
    mask_head = built.model.roi_heads.mask_head
    regions = []
    mask_head.register_forward_pre_hook(
        lambda module, args: regions.append(len(args[0]))
    )
    before = [parameter.clone() for parameter in built.model.parameters()]

    loss = built.forward().item()
    again = built.forward().item()
    built.step.run()

    assert loss == again
    assert all(map(torch.equal, built.model.parameters(), before))
    assert any(parameter.grad.any() for parameter in mask_head.parameters())
    # the most regions that the mask head can have: a quarter of 64 for each of the two images
    assert regions == [2 * 16] * 3


def run(*words):
    command.main(command.get_parser().parse_args([str(word) for word in words]))


def test_rows_are_written_as_they_come(tmp_path, monkeypatch, capsys):
    words = [
        "layer",
        "--device",
        "cpu",
        "--shapes",
        "1x64x5x3",
        "--repeats",
        1,
        "--output",
        tmp_path / "t",
    ]

    run(*words, "--providers", "ours", "group_norm", "--modes", "forward", "memory")

    rows = read_rows(tmp_path / "t.csv")
    cells = [(row["mode"], row["provider"]) for row in rows]
    assert cells == [*itertools.product(["forward", "memory"], ["ours", "group_norm"])]
    text = (tmp_path / "t.csv").read_text()
    for name in ("machine", "threads", "torch", "command", "settings"):
        assert f"# {name}: " in text
    assert "saved_to_group_norm" in capsys.readouterr().out
    assert (tmp_path / "t.png").exists()

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.layer_benchmark.memory_cells", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(*words, "--providers", "ours", "--modes", "forward", "memory")
    assert [row["mode"] for row in read_rows(tmp_path / "t.csv")] == ["forward"]


def test_a_graph_needs_a_gpu():
    with pytest.raises(ConfigError, match="R-50-graph"):
        next(measure_networks(["R-50-graph"], None, "fp32", SIZES, 1, CPU))


def test_a_captured_backbone_has_the_features_and_gradients_of_before(monkeypatch):
    # a graph replays on a GPU alone
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda module, _: module)
    variant, precision = Variant(config=DEMO.format("BN_GW")), PRECISIONS["fp32"]
    plain = detector(variant, SIZES, precision, CPU)
    torch.manual_seed(0)
    captured = detector(variant, SIZES, precision, CPU, "graph")
    captured.model.load_state_dict(plain.model.state_dict())

    for iteration in (plain, captured):
        iteration.step.run()

    of_plain, of_captured = (
        {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        for model in (plain.model, captured.model)
    )
    assert of_plain.keys() == of_captured.keys()
    for name, gradient in of_plain.items():
        assert torch.equal(gradient, of_captured[name]), name


@pytest.mark.slow
def test_a_compiled_network_is_measured(monkeypatch):
    monkeypatch.setattr(network_benchmark, "MODELS", {"R-18-compiled": BN})
    monkeypatch.setattr(timing, "WARM_UP", 1)

    (row,) = measure_networks(["R-18-compiled"], None, "fp32", SIZES, 1, CPU)

    assert row["median_ms"] > 0
    assert "saved_mib" not in row


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_commands_of_the_script_for_a_gpu(device, tmp_path):
    """A program in the place of Python writes down what it is called with."""
    python = tmp_path / "python"
    calls = tmp_path / "calls.txt"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {calls}\n')
    python.chmod(0o755)
    script = Path(command.__file__).with_name("gpu.sh")

    environment = os.environ | {"PYTHON": str(python), "DEVICE": device}
    output = tmp_path / "output"
    subprocess.run(["bash", script, output], env=environment, check=True, timeout=60)

    lines = [line.split() for line in calls.read_text().splitlines()]
    measured = [words[1:] for words in lines if words[0] == "tools/benchmark.py"]
    tested = [word for words in lines for word in words if word.startswith("tests/")]
    outputs = [command.get_parser().parse_args(words).output for words in measured]
    assert len(set(outputs)) == len(outputs) == (9 if device == "cuda" else 8)
    assert all((script.parents[1] / path).is_file() for path in tested)
    assert len(tested) == (2 if device == "cuda" else 0)


def test_the_script_for_a_gpu_says_what_failed(tmp_path):
    script = Path(command.__file__).with_name("gpu.sh")

    environment = os.environ | {"PYTHON": "/bin/false", "DEVICE": "cuda"}
    run = subprocess.run(
        ["bash", script, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert run.returncode == 1
    *_, failed = run.stdout.splitlines()
    assert failed.startswith("Failed: kernels_right operator layer_16 ")
