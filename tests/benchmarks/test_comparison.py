"""Tables: CSV files, comparison with an earlier table, plots."""

import dataclasses

import pytest

from benchmarks.comparison import compare
from benchmarks.plot import plot
from benchmarks.table import Table, find_csv, read_csv, write_csv
from gw_detectron.errors import UserError

HEADER = {
    "device": "cpu",
    "settings": "groups=64",
    "machine": "a machine: fast",
    "threads": "2",
    "command": "x --y 'a b'",
}


def row(shape: str, provider: str, factor: float = 1.0, **changes: object) -> dict:
    times = {"repeats": 20, "median_ms": 2.0, "q20_ms": 1.5, "q80_ms": 2.5}
    ratios = {"to_figure1": 0.6 * factor, "to_group_norm": 4.0, "to_batch_norm": 3.0, "to_floor": 1.2 * factor}
    key = {"shape": shape, "dtype": "fp32", "mode": "forward", "provider": provider, "note": ""}
    return {**key, **times, **ratios, **changes}


def table(factor: float = 1.0, **header: str) -> Table:
    skipped = {"shape": "1x2x3x4", "dtype": "fp32", "mode": "forward", "provider": "conv3x3", "note": 'no, "never"'}
    rows = [row("1x2x3x4", "ours"), row("5x6x7x8", "ours", factor), row("5x6x7x8", "figure1", 10 * factor), skipped]
    return Table("layer", {**HEADER, **header}, rows)


def model_table(ratio: float = 1.0) -> Table:
    key = {"model": "R-50", "dtype": "fp32", "batch": "8", "image": "224x224", "note": "", "paper_to_bn": 1.0}
    variants = {"BN": 1.0, "GN": 9 * ratio, "GW-S1-B2": ratio}
    return Table("model", HEADER, [{**key, "variant": name, "to_bn": value} for name, value in variants.items()])


def test_csv_round_trip(tmp_path):
    path = tmp_path / "new" / "table.csv"
    write_csv(table(), path)
    found = read_csv(path)
    assert found.kind == "layer"
    assert found.header == HEADER
    for before, after in zip(table().rows, found.rows, strict=True):
        assert after == {**dict.fromkeys(found.columns.all), **before}
    assert [file.name for file in path.parent.iterdir()] == ["table.csv"]


def test_equal_ratios_are_not_worse():
    comparison = compare(table(), table())
    assert not comparison.worse and not comparison.notes
    assert len(comparison.rows) == 2 * 2 + 2  # only ours: figure1 and floor at two shapes, and their means
    assert "0 of 6 ratios are worse" in str(comparison)


def test_a_slowdown_is_found_and_named():
    comparison = compare(table(2.2), table())
    places = ("5x6x7x8", "mean of 2")
    assert {(found.key[0], found.key[4]) for found in comparison.worse} == {
        (place, ratio) for place in places for ratio in ("to_figure1", "to_floor")
    }
    lines = [line.split() for line in str(comparison).splitlines() if "to_floor" in line]
    assert [line[-5:] for line in lines if line[-1] == "WORSE"] == [
        ["1.2", "2.64", "+120.0%", "+100%", "WORSE"],
        ["1.2", "1.78", "+48.3%", "+20%", "WORSE"],
    ]
    assert not compare(table(2.2), table(), tolerance=0.5).worse
    assert not compare(table(), table(2.2)).worse  # faster than before


def test_the_mean_has_a_smaller_tolerance_than_a_single_size():
    assert not compare(table(1.3), table()).worse  # one of two sizes
    both = [row("1x2x3x4", "ours", 1.3), row("5x6x7x8", "ours", 1.3)]
    slower = compare(dataclasses.replace(table(), rows=both), table()).worse
    assert {found.key[0] for found in slower} == {"mean of 2"}


def test_growth_of_memory_is_found_at_every_size():
    def memory(ratio: float) -> Table:
        key = {"dtype": "fp32", "mode": "memory", "provider": "ours", "note": "", "saved_mib": 1.0}
        ratios = {"1x2x3x4": 1.1, "5x6x7x8": ratio}
        return Table("layer", HEADER, [{**key, "shape": k, "saved_to_group_norm": v} for k, v in ratios.items()])

    found = compare(memory(1.13), memory(1.1)).worse
    assert [(each.key[0], each.key[4]) for each in found] == [("5x6x7x8", "saved_to_group_norm")]
    assert not compare(memory(1.11), memory(1.1)).worse
    assert compare(memory(1.11), memory(1.1), tolerance=0).worse


def test_a_model_is_compared_by_its_ratio_to_bn():
    worse = compare(model_table(1.4), model_table(1.1)).worse
    assert [found.key[:2] for found in worse] == [("R-50", "GW-S1-B2")]


def test_notes_on_differences():
    text = str(compare(table(machine="another", commit="b"), table(commit="a")))
    assert "Different machine: another, before a machine: fast." in text
    fewer = dataclasses.replace(table(), rows=table().rows[:1])
    assert "2 ratios are in the earlier run only" in str(compare(fewer, table()))
    assert "2 ratios are in the present run only" in str(compare(table(), fewer))
    without = dataclasses.replace(table(), rows=[row("1x2x3x4", "ours", to_floor=None), row("5x6x7x8", "ours")])
    assert "1 ratios are in the earlier run only" in str(compare(without, table()))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (table(device="cuda"), "device of the table is 'cuda', of this run 'cpu'"),
        (table(settings="groups=32"), "settings of the table is 'groups=32', of this run 'groups=64'"),
        (Table("model", HEADER, []), "benchmark of the table is 'model', of this run 'layer'"),
        (Table("layer", HEADER, [row("9x9x9x9", "ours")]), "no ratio in common: the table has 9x9x9x9 .* and 1"),
        (Table("layer", HEADER, [row("1x2x3x4", "figure1")]), "the table has none, this run has 1x2x3x4 fp32"),
    ],
)
def test_incomparable_tables_are_refused(reference, message):
    with pytest.raises(ValueError, match=message) as caught:
        compare(table(), reference)
    assert isinstance(caught.value, UserError)


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf")])
def test_bad_tolerances_are_refused(tolerance):
    with pytest.raises(ValueError, match=rf"--tolerance \({tolerance}\): not a finite number"):
        compare(table(), table(), tolerance=tolerance)


def test_unusable_files_are_refused(tmp_path):
    path = tmp_path / "t.csv"
    with pytest.raises(FileNotFoundError, match=r"t.csv'\): file not found \(cwd: .*\)\. Fix: "):
        read_csv(path)

    def refused(text: str, message: str) -> None:
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"t.csv'\): no table of this benchmark: {message}.* Fix: "):
            read_csv(path)

    write_csv(table(), path)
    text = path.read_text()
    lines = text.splitlines()
    refused("a,b\n1,2\n", "no line '# benchmark: NAME'")
    refused("# benchmark: layer\nshape,dtype\n1,2\n", "columns mode, provider, .* are missing")
    refused(text.replace("1.5", "fast"), "row 1: could not convert string to float: 'fast'")
    for ratio in ("nan", "inf", "-1"):  # no run would be worse than these, or every run
        refused(text.replace("1.2", ratio), f"row 1: '{ratio}' is not a time, size or ratio")
    refused("\n".join(lines)[: -len(lines[-1]) - 10], "row 3 does not have 19 cells")  # cut off
    refused("\n".join([*lines, lines[-2] + ",1"]), "row 5 does not have 19 cells")
    plot(table(), path)
    with pytest.raises(ValueError, match="no line '# benchmark: NAME'"):
        read_csv(path)


def test_a_folder_gives_the_table_of_the_machine(tmp_path):
    for name, machine in (("a", "one"), ("b", "two")):
        write_csv(table(machine=machine), tmp_path / f"{name}.csv")
    write_csv(model_table(), tmp_path / "c.csv")
    assert find_csv(tmp_path, "layer", "two") == tmp_path / "b.csv"
    assert find_csv(tmp_path, "model", HEADER["machine"]) == tmp_path / "c.csv"
    with pytest.raises(FileNotFoundError, match=r"no table of 'layer' for 'three', only for {'a.csv': 'one', 'b.csv'"):
        find_csv(tmp_path, "layer", "three")


@pytest.mark.parametrize("measured", [table(), model_table()], ids=["layer", "model"])
def test_plot(measured, tmp_path):
    path = tmp_path / "new" / "table.png"
    plot(measured, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["table.png"]
