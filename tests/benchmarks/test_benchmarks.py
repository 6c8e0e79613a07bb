"""Benchmarks: timing without a real clock, bytes by hand, the paper's listing by its numbers, ratios at tiny sizes."""

import itertools

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks import command, network_benchmark, timing
from benchmarks.layer_benchmark import measure_layers
from benchmarks.memory import saved_bytes
from benchmarks.network_benchmark import measure_networks
from benchmarks.networks import Sizes, Variant, detector
from benchmarks.providers import MODES, OPTIONAL, PRECISIONS, PROVIDERS, Case, Figure1Whitening
from benchmarks.table import Table, geometric_means, plot, read_csv, summary, write_csv
from benchmarks.timing import Step, time_alternating
from gw_detectron.errors import DataError, MissingFileError

from ..ops.cases import correlated
from ..ops.oracle import Setting, group_whiten, group_whiten_backward

CPU = torch.device("cpu")
SIZES = Sizes(batch_size=2, image_size=32, detector_batch=2, detector_image=64)
DEMO = "quick_schedules/mask_rcnn_R_18_FPN_{}_demo.yaml"
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

    found = time_alternating({"one": step(0.01), "two": step(0.02)}, 200, CPU)
    assert found["two"]["median_ms"] / found["one"]["median_ms"] == pytest.approx(2.0, rel=0.02)
    assert found["one"]["q80_ms"] > 1.5 * found["one"]["q20_ms"]


def saved(module: nn.Module, x: torch.Tensor) -> int:
    return saved_bytes(lambda: module(x), module)


def test_bytes_saved_for_backward_are_those_counted_by_hand():
    x = torch.randn(2, 64, 5, 7, requires_grad=True)
    assert saved(nn.GroupNorm(32, 64), x) == 4 * (
        x.numel() + 2 * 2 * 32
    )  # input, mean, deviation
    assert (
        saved(nn.BatchNorm2d(64).eval(), x) == 4 * x.numel()
    )  # its running statistics are saved too
    with torch.no_grad():
        assert saved(nn.GroupNorm(32, 64), x) == 0


@pytest.mark.parametrize(("groups", "iters"), [(8, 5), (4, 3), (1, 1)])
def test_figure1_is_the_papers_formula(groups, iters):
    setting = Setting(groups, iters, eps=0.0)
    x, grad_y = correlated((3, 16, 7, 5)), correlated((3, 16, 7, 5), seed=1)
    weight, bias = np.linspace(0.5, 1.5, 16), np.linspace(-1, 1, 16)
    layer = Figure1Whitening(16, groups, iters).double()
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(weight).reshape(layer.weight.shape))
        layer.bias.copy_(torch.as_tensor(bias).reshape(layer.bias.shape))
    input = torch.tensor(x, requires_grad=True)
    y = layer(input)
    y.backward(torch.tensor(grad_y))
    np.testing.assert_allclose(
        y.detach(), group_whiten(x, setting, weight, bias), rtol=0, atol=1e-12
    )
    grads = group_whiten_backward(x, grad_y, setting, weight)
    for found, expected in zip(
        (input.grad, layer.weight.grad, layer.bias.grad), grads, strict=True
    ):
        np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=0, atol=1e-10)


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
    found = {(row["shape"], row["dtype"], row["mode"], row["provider"]): row for row in rows}
    expected = set(
        itertools.product(["2x64x5x3", "1x32x4x4"], ["fp32", "bf16"], (*MODES, "memory"), USUAL)
    )
    assert found.keys() == {
        key for key in expected if key[2:] != ("memory", "floor")
    }  # which saves nothing
    for key, row in found.items():
        if key[2] == "memory":
            base = found[(*key[:3], "group_norm")]
            assert row["saved_to_group_norm"] == pytest.approx(
                row["saved_mib"] / base["saved_mib"]
            )
        else:
            assert (
                0 < row["q20_ms"] <= row["median_ms"] <= row["q80_ms"] and row["repeats"] == 2
            )
            for base in ("figure1", "group_norm", "batch_norm", "floor", "relu_apart"):
                assert row[f"to_{base}"] == pytest.approx(
                    row["median_ms"] / found[(*key[:3], base)]["median_ms"]
                )
    a, b = (
        found[shape, "fp32", "forward", "ours"]["to_floor"]
        for shape in ("2x64x5x3", "1x32x4x4")
    )
    (mean,) = [
        row
        for row in geometric_means(rows, ["to_floor"])
        if (row["dtype"], row["mode"], row["provider"]) == ("fp32", "forward", "ours")
    ]
    assert mean["to_floor"] == pytest.approx((a * b) ** 0.5)


def test_a_table_is_read_as_written_and_shown(rows, tmp_path):
    table = Table("layer", {"machine": "a processor", "command": "the command"}, rows)
    write_csv(table, tmp_path / "t.csv")
    read = read_csv(tmp_path / "t.csv")
    assert (read.kind, read.header, read.numbers) == (table.kind, table.header, table.numbers)
    numbers = [row.get("to_floor") or 0 for row in rows]
    assert [row["to_floor"] or 0 for row in read.rows] == pytest.approx(numbers, rel=1e-4)
    assert "the command" in summary(read) and "geometric means" in summary(read)
    plot(read, tmp_path / "t.png")
    assert len(Image.open(tmp_path / "t.png").convert("L").getcolors()) > 50
    with pytest.raises(MissingFileError, match="none"):
        read_csv(tmp_path / "none.csv")
    with pytest.raises(DataError, match=r"t\.png"):
        read_csv(tmp_path / "t.png")


def test_each_model_is_divided_by_its_first_variant(monkeypatch):
    classifiers = {
        "BN": Variant("BN"),
        "GN": Variant("GN"),
        "GW-S1-B2": Variant("BN", "GW", "S1-B2"),
    }
    detectors = {norm: Variant(config=DEMO.format(norm)) for norm in ("BN", "BN_GW")}
    models = {"R-18": classifiers, "R-18-inference": classifiers, "small_detector": detectors}
    monkeypatch.setattr(network_benchmark, "MODELS", models)
    monkeypatch.setattr(timing, "WARM_UP", 0)
    measured = measure_networks(list(models), ["BN_GW", "GW-S1-B2"], "fp32", SIZES, 1, CPU)
    found = {(row["model"], row["variant"]): row for row in measured}
    assert list(found) == [
        (model, variant) for model in models for variant in models[model] if variant != "GN"
    ]
    for (model, _), row in found.items():
        base = found[model, "BN"]
        assert row["to_bn"] == pytest.approx(row["median_ms"] / base["median_ms"])
        assert (row["batch"], row["image"]) == (
            "2",
            "64x85" if model == "small_detector" else "32x32",
        )
        assert ("saved_mib" in row) != (model == "R-18-inference")
        assert row.get("saved_to_bn") == (
            row["saved_mib"] / base["saved_mib"] if "saved_mib" in row else None
        )


def test_all_iterations_of_a_detector_are_equal():
    built = detector(Variant(config=DEMO.format("BN_GW")), SIZES, PRECISIONS["fp32"], CPU)
    regions = []
    built.model.roi_heads.mask_head.register_forward_pre_hook(
        lambda module, args: regions.append(len(args[0]))
    )
    before = {name: value.clone() for name, value in built.model.named_parameters()}
    losses = [built.forward().item() for _ in range(2)]
    built.step.run()
    assert losses[0] == losses[1]
    assert all(
        torch.equal(value, before[name]) for name, value in built.model.named_parameters()
    )
    assert any(
        value.grad is not None and value.grad.abs().sum() > 0
        for value in built.model.parameters()
    )
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
    table = read_csv(tmp_path / "t.csv")
    assert [(row["mode"], row["provider"]) for row in table.rows] == [
        *itertools.product(["forward", "memory"], ["ours", "group_norm"])
    ]
    assert {"machine", "threads", "torch", "command", "settings"} <= table.header.keys()
    assert "saved_to_group_norm" in capsys.readouterr().out and (tmp_path / "t.png").exists()

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "plot", interrupted)
    monkeypatch.setattr("benchmarks.layer_benchmark.memory_cells", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(*words, "--providers", "ours", "--modes", "forward", "memory")
    assert [row["mode"] for row in read_csv(tmp_path / "t.csv").rows] == ["forward"]
