"""Layer benchmark at tiny sizes: rows, ratios, refused settings."""

import itertools
import os
import subprocess

import pytest
import torch

from benchmarks.layer_benchmark import SHAPES, LayerSettings, parse_shape, plan_layer, run_layer
from benchmarks.providers import PROVIDERS
from benchmarks.summary import geometric_means, summary
from gw_detectron.errors import UserError

CPU = torch.device("cpu")
SMALL = ((2, 64, 5, 3), (1, 32, 4, 4))
USUAL = [name for name in PROVIDERS if name != "figure1_compiled"]
SETTINGS = LayerSettings(CPU, SMALL, [(3, 64, 3, 3)], ["fp32", "bf16"], repeats=2, groups=16)


@pytest.fixture(scope="module")
def table():
    return run_layer(SETTINGS, "the command")


def test_one_row_for_each_case_and_provider(table):
    keys = [(row["shape"], row["dtype"], row["mode"], row["provider"]) for row in table.rows]
    timed = itertools.product(["2x64x5x3", "1x32x4x4"], ["fp32", "bf16"], ["forward", "forward+backward"], USUAL)
    layers = [name for name in USUAL if name != "floor"]  # saves nothing
    memory = itertools.product(["2x64x5x3", "1x32x4x4", "3x64x3x3"], ["fp32", "bf16"], ["memory"], layers)
    assert sorted(keys) == sorted([*timed, *memory])
    assert all(set(row) <= set(table.columns.all) for row in table.rows)


def test_ratios_of_times(table):
    timed = [row for row in table.rows if row["mode"] != "memory"]
    medians = {(row["shape"], row["dtype"], row["mode"], row["provider"]): row["median_ms"] for row in timed}
    for row in timed:
        assert 0 < row["q20_ms"] <= row["median_ms"] <= row["q80_ms"]
        assert row["repeats"] == 2
        for base in ("figure1", "group_norm", "batch_norm", "floor", "relu_apart"):
            other = medians[row["shape"], row["dtype"], row["mode"], base]
            assert row[f"to_{base}"] == pytest.approx(row["median_ms"] / other)


def test_times_beside_busy_processes(table):
    assert all("loaded_ms" not in row for row in table.rows)
    settings = LayerSettings(CPU, SMALL[:1], (), providers=["ours", "figure1"], repeats=2, groups=16, loaded=True)
    rows = {(row["mode"], row["provider"]): row for row in run_layer(settings).rows}
    for mode in ("forward", "forward+backward"):
        own, figure1 = rows[mode, "ours"], rows[mode, "figure1"]
        assert own["loaded_to_figure1"] == pytest.approx(own["loaded_ms"] / figure1["loaded_ms"])
    children = subprocess.run(["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True).stdout
    assert "while True" not in children, "the busy processes end with the measurement"


def test_memory(table):
    memory = {(row["shape"], row["dtype"], row["provider"]): row for row in table.rows if row["mode"] == "memory"}
    group_norm = memory["3x64x3x3", "fp32", "group_norm"]
    assert group_norm["saved_mib"] * 2**20 == 4 * (3 * 64 * 9 + 2 * 3 * 32)
    assert group_norm["saved_to_group_norm"] == 1
    for key, row in memory.items():
        base = memory[(*key[:2], "group_norm")]
        assert row["saved_to_group_norm"] == pytest.approx(row["saved_mib"] / base["saved_mib"])
        assert row["peak_mib"] is None
    # the listing saves the centered input, the whitened output and about 20 products of 16 x 16
    figure1 = memory["3x64x3x3", "fp32", "figure1"]["saved_mib"] * 2**20
    assert 4 * 2 * 3 * 64 * 9 < figure1 < 4 * (2 * 3 * 64 * 9 + 30 * 3 * 16 * 16)


def test_the_plan_has_the_measured_rows_and_ratios(table):
    few = LayerSettings(CPU, SMALL[:1], (), providers=["ours", "floor", "figure1"], repeats=1)  # without group_norm
    for settings, found in ((SETTINGS, table), (few, run_layer(few))):
        plan = plan_layer(settings)
        assert plan.kind == found.kind and plan.header.items() <= found.header.items()
        for planned, measured in zip(plan.rows, found.rows, strict=True):
            assert [planned[name] for name in plan.columns.key] == [measured[name] for name in plan.columns.key]
            assert {name for name in planned if "to_" in name} == {name for name in measured if "to_" in name}


def test_header_and_summary(table):
    assert table.header["command"] == "the command"
    assert table.header["torch"] == torch.__version__.partition("+")[0]
    assert table.header["threads"] == str(torch.get_num_threads())
    assert table.header["dtypes"] == "fp32 bf16"
    assert {"device", "machine", "cores", "python", "gw_detectron", "settings"} <= set(table.header)
    text = summary(table)
    assert "the command" in text and "fp32, forward+backward, geometric means over the shapes" in text
    rows = [row for row in table.rows if (row["dtype"], row["mode"]) == ("fp32", "forward")]
    ours = next(row for row in geometric_means(rows, ["to_floor"]) if row["provider"] == "ours")
    a, b = (row["to_floor"] for row in rows if row["provider"] == "ours")
    assert ours["to_floor"] == pytest.approx((a * b) ** 0.5)
    assert f"{ours['to_floor']:.3f}" in text
    incomplete = [{"provider": "ours", "shape": shape, "to_floor": ratio} for shape, ratio in (("a", 2.0), ("b", None))]
    assert geometric_means(incomplete, ["to_floor"]) == [{"provider": "ours", "to_floor": None}]


def test_a_provider_that_cannot_run_gets_the_reason(monkeypatch):
    def without_compiler(case):
        raise RuntimeError("No working C++ compiler found\nand more lines")

    monkeypatch.setitem(PROVIDERS, "figure1_compiled", ("", without_compiler))
    table = run_layer(LayerSettings(CPU, SMALL[:1], (), providers=["figure1_compiled"], repeats=1))
    assert len(table.rows) == 3
    for row in table.rows:
        assert row["note"] == "RuntimeError: No working C++ compiler found"
        assert row.get("median_ms") is None and row.get("saved_mib") is None
    assert "figure1_compiled: RuntimeError: No working C++ compiler found" in summary(table)
    one_value = LayerSettings(CPU, [(1, 8, 1, 1)], (), providers=["ours", "batch_norm"], repeats=1, groups=4)
    notes = {row["provider"]: row["note"] for row in run_layer(one_value).rows}
    assert notes["ours"] == "" and "more than 1 value per channel" in notes["batch_norm"]
    monkeypatch.setitem(PROVIDERS, "ours", ("", without_compiler))
    with pytest.raises(RuntimeError, match="No working"):  # an error of the layer itself is raised
        run_layer(LayerSettings(CPU, SMALL[:1], (), providers=["ours"], repeats=1))


def test_shapes():
    assert parse_shape("2x64x200x336") == parse_shape("2,64,200,336") == SHAPES[0]
    assert next(LayerSettings(CPU, batch_scale=8).cases()).shape == (16, 64, 200, 336)
    for text in ("2x64x200", "2x64x200x0", "2x64x200x-1", "axbxcxd", "", "2x64x200x336x1"):
        with pytest.raises(ValueError, match=rf"^--shapes \('{text}'\): .*2x64x200x336"):
            parse_shape(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"providers": ["layer_norm"]}, r"--providers \('layer_norm'\): unknown. Fix: use ours, .*figure1"),
        ({"providers": []}, "--providers: none given"),
        ({"dtypes": ["fp8"]}, r"--dtypes \('fp8'\): unknown. Fix: use fp32"),
        ({"modes": ["sideways"]}, r"--modes \('sideways'\): unknown. Fix: use forward"),
        ({"repeats": 0}, r"--repeats \(0\)"),
        ({"groups": 0}, r"--groups \(0\)"),
        ({"iters": 0}, r"--iters \(0\)"),
        ({"batch_scale": 0}, r"--batch-scale \(0\)"),
        ({"providers": ["floor"], "modes": ["memory"]}, "saves nothing, .* Fix: add another provider"),
        ({"shapes": [(2, 48, 5, 5)]}, r"--shapes \('2x48x5x5'\): group_norm needs .* 32 divides"),
        ({"shapes": [(2, 96, 5, 5)]}, r"--shapes \('2x96x5x5'\): ours needs .* 64 divides"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        LayerSettings(CPU, **{"shapes": SMALL, **arguments})
    assert isinstance(caught.value, UserError)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_times_and_peaks():
    settings = LayerSettings(torch.device("cuda"), SMALL[:1], (), ["fp32", "bf16"], repeats=2)
    for row in run_layer(settings).rows:
        assert not row["note"]
        assert row.get("peak_mib" if row["mode"] == "memory" else "median_ms") > 0
