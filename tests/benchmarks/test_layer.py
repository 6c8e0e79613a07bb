"""The benchmark of one layer, at sizes of no interest: what is in its table, and what it refuses."""

import itertools

import pytest
import torch

from benchmarks import PROVIDERS, SHAPES, LayerSettings, benchmark_layer, parse_shape, planned_layer, scaled, summary
from benchmarks.providers import LAYERS
from benchmarks.summary import geometric_means

CPU = torch.device("cpu")
SMALL = ((2, 64, 5, 3), (1, 32, 4, 4))
USUAL = [name for name in PROVIDERS if name != "figure1_compiled"]


@pytest.fixture(scope="module")
def table():
    settings = LayerSettings(CPU, SMALL, [(3, 64, 3, 3)], ["fp32", "bf16"], repeats=2, groups=16)
    return benchmark_layer(settings, "the command")


def test_a_row_for_everything_that_was_asked_for(table):
    keys = [(row["shape"], row["dtype"], row["mode"], row["provider"]) for row in table.rows]
    timed = itertools.product(["2x64x5x3", "1x32x4x4"], ["fp32", "bf16"], ["forward", "forward+backward"], USUAL)
    layers = [name for name in USUAL if name != "floor"]  # which keeps nothing
    kept = itertools.product(["2x64x5x3", "1x32x4x4", "3x64x3x3"], ["fp32", "bf16"], ["memory"], layers)
    assert sorted(keys) == sorted([*timed, *kept])
    assert all(set(row) <= set(table.columns.all) for row in table.rows)


def test_ratios_are_those_of_the_medians(table):
    timed = [row for row in table.rows if row["mode"] != "memory"]
    medians = {(row["shape"], row["dtype"], row["mode"], row["provider"]): row["median_ms"] for row in timed}
    for row in timed:
        assert 0 < row["q20_ms"] <= row["median_ms"] <= row["q80_ms"]
        assert row["repeats"] == 2
        for base in ("figure1", "group_norm", "batch_norm", "floor"):
            other = medians[row["shape"], row["dtype"], row["mode"], base]
            assert row[f"to_{base}"] == pytest.approx(row["median_ms"] / other)


def test_memory_is_that_of_the_shape_and_the_dtype(table):
    kept = {(row["shape"], row["dtype"], row["provider"]): row for row in table.rows if row["mode"] == "memory"}
    group_norm = kept["3x64x3x3", "fp32", "group_norm"]
    assert group_norm["saved_mib"] * 2**20 == 4 * (3 * 64 * 9 + 2 * 3 * 32)
    assert group_norm["saved_to_group_norm"] == 1
    for key, row in kept.items():
        base = kept[(*key[:2], "group_norm")]
        assert row["saved_to_group_norm"] == pytest.approx(row["saved_mib"] / base["saved_mib"])
        assert row["peak_mib"] is None
    # the listing keeps the centred input, the whitened output and some 20 products of 16 x 16
    figure1 = kept["3x64x3x3", "fp32", "figure1"]["saved_mib"] * 2**20
    assert 4 * 2 * 3 * 64 * 9 < figure1 < 4 * (2 * 3 * 64 * 9 + 30 * 3 * 16 * 16)


def test_the_plan_is_what_is_measured(table):
    providers = ["ours", "floor", "figure1"]  # without group_norm
    for settings, found in (
        (LayerSettings(CPU, SMALL, [(3, 64, 3, 3)], ["fp32", "bf16"], repeats=2, groups=16), table),
        (few := LayerSettings(CPU, SMALL[:1], (), providers=providers, repeats=1), benchmark_layer(few)),
    ):
        plan = planned_layer(settings)
        assert plan.kind == found.kind and plan.header.items() <= found.header.items()
        for planned, measured in zip(plan.rows, found.rows, strict=True):
            assert [planned[name] for name in plan.columns.key] == [measured[name] for name in plan.columns.key]
            assert {name for name in planned if "to_" in name} == {name for name in measured if "to_" in name}


def test_header_tells_machine_versions_and_command(table):
    assert table.header["command"] == "the command"
    assert table.header["torch"] == torch.__version__.partition("+")[0]
    assert table.header["threads"] == str(torch.get_num_threads())
    assert table.header["dtypes"] == "fp32 bf16"
    assert {"device", "machine", "cores", "python", "gw_detectron", "settings"} <= set(table.header)


def test_summary_shows_ratios_and_their_geometric_means(table):
    text = summary(table)
    assert "the command" in text and "fp32, forward+backward, geometric means over the shapes" in text
    rows = [row for row in table.rows if (row["dtype"], row["mode"]) == ("fp32", "forward")]
    ours = next(row for row in geometric_means(rows, ["to_floor"]) if row["provider"] == "ours")
    a, b = (row["to_floor"] for row in rows if row["provider"] == "ours")
    assert ours["to_floor"] == pytest.approx((a * b) ** 0.5)
    assert f"{ours['to_floor']:.3f}" in text


def test_no_geometric_mean_over_fewer_shapes():
    rows = [{"provider": "ours", "shape": shape, "to_floor": ratio} for shape, ratio in (("a", 2.0), ("b", None))]
    assert geometric_means(rows, ["to_floor"]) == [{"provider": "ours", "to_floor": None}]


@pytest.mark.parametrize("others", [["group_norm"], []])
def test_what_cannot_be_done_says_why(monkeypatch, others):
    def without_compiler(case):
        raise RuntimeError("No working C++ compiler found\nand more lines")

    monkeypatch.setitem(LAYERS, "figure1_compiled", without_compiler)
    settings = LayerSettings(CPU, SMALL[:1], (), providers=[*others, "figure1_compiled"], repeats=2)
    table = benchmark_layer(settings)
    skipped = [row for row in table.rows if row["provider"] == "figure1_compiled"]
    assert len(skipped) == 3
    for row in skipped:
        assert row["note"] == "RuntimeError: No working C++ compiler found"
        assert row.get("median_ms") is None and row.get("saved_mib") is None
    assert "figure1_compiled: RuntimeError: No working C++ compiler found" in summary(table)


def test_batch_norm_of_one_value_per_channel_is_skipped():
    settings = LayerSettings(CPU, [(1, 8, 1, 1)], (), providers=["ours", "batch_norm"], repeats=1, groups=4)
    rows = [row for row in benchmark_layer(settings).rows if row["provider"] == "batch_norm"]
    assert rows
    assert all("more than 1 value per channel" in row["note"] for row in rows)


def test_the_layer_itself_is_never_skipped(monkeypatch):
    def broken(case):
        raise RuntimeError("broken")

    monkeypatch.setitem(LAYERS, "ours", broken)
    with pytest.raises(RuntimeError, match="broken"):
        benchmark_layer(LayerSettings(CPU, SMALL[:1], (), providers=["ours"], repeats=2))


@pytest.mark.parametrize("text", ["2x64x200x336", "2,64,200,336"])
def test_shapes_are_read(text):
    assert parse_shape(text) == SHAPES[0]


@pytest.mark.parametrize("text", ["2x64x200", "2x64x200x0", "2x64x200x-1", "axbxcxd", "", "2x64x200x336x1"])
def test_other_shapes_are_refused(text):
    with pytest.raises(ValueError, match="2x64x200x336") as error:
        parse_shape(text)
    assert repr(text) in str(error.value)


def test_batch_scale():
    assert scaled(SHAPES, 8)[0] == (16, 64, 200, 336)
    with pytest.raises(ValueError, match="batch scale 0"):
        scaled(SHAPES, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"providers": ["layer_norm"]}, "unknown provider 'layer_norm'; allowed are ours, .*figure1"),
        ({"providers": []}, "no provider is given"),
        ({"precisions": ["fp8"]}, "unknown dtype 'fp8'; allowed are fp32"),
        ({"modes": ["sideways"]}, "unknown mode 'sideways'; allowed are forward"),
        ({"repeats": 0}, "repeats 0"),
        ({"groups": 0}, "groups 0"),
        ({"providers": ["floor"], "modes": ["memory"]}, "the floor keeps nothing, .*; give another provider"),
        ({"shapes": [(2, 48, 5, 5)]}, r"shape 2x48x5x5: group_norm needs .* 32 divides"),
        ({"shapes": [(2, 96, 5, 5)]}, r"shape 2x96x5x5: ours needs .* 64 divides"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LayerSettings(CPU, **{"shapes": SMALL, **arguments})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_times_and_peaks():
    settings = LayerSettings(torch.device("cuda"), SMALL[:1], (), ["fp32", "bf16"], repeats=2)
    for row in benchmark_layer(settings).rows:
        assert not row["note"]
        assert row.get("peak_mib" if row["mode"] == "memory" else "median_ms") > 0
