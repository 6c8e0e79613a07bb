"""Tables survive a file, and a slowdown against an earlier table is found by its ratios."""

import dataclasses

import pytest

from benchmarks import Table, compare, draw, read_csv, write_csv

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


def test_a_table_survives_its_file(tmp_path):
    path = tmp_path / "new" / "table.csv"
    write_csv(table(), path)
    found = read_csv(path)
    assert found.kind == "layer"
    assert found.header == HEADER
    for before, after in zip(table().rows, found.rows, strict=True):
        assert after == {**dict.fromkeys(found.columns.all), **before}
    assert [file.name for file in path.parent.iterdir()] == ["table.csv"]


def test_the_same_ratios_are_no_slowdown():
    comparison = compare(table(), table())
    assert not comparison.worse
    assert len(comparison.rows) == 2 * 2 + 2  # ours alone: figure1 and floor at two shapes, and their means
    assert "0 of 6 ratios are worse than before by more than 20%" in str(comparison)


def test_a_slowdown_is_found_and_named():
    comparison = compare(table(2.2), table())
    where = ("5x6x7x8", "mean of 2")
    assert {(found.key[0], found.key[4]) for found in comparison.worse} == {
        (place, ratio) for place in where for ratio in ("to_figure1", "to_floor")
    }
    (line,) = [line for line in str(comparison).splitlines() if "5x6x7x8" in line and "to_floor" in line]
    assert line.split()[-4:] == ["1.2", "2.64", "+120.0%", "WORSE"]
    (line,) = [line for line in str(comparison).splitlines() if "mean of 2" in line and "to_floor" in line]
    assert line.split()[-4:] == ["1.2", "1.78", "+48.3%", "WORSE"]
    assert not compare(table(2.2), table(), tolerance=0.5).worse
    assert not compare(table(), table(2.2)).worse  # faster than before


def test_the_mean_is_held_tighter_than_the_times_of_one_size():
    assert not compare(table(1.3), table()).worse  # one of two sizes: chance
    both = [row("1x2x3x4", "ours", 1.3), row("5x6x7x8", "ours", 1.3)]
    slower = compare(dataclasses.replace(table(), rows=both), table()).worse
    assert {found.key[0] for found in slower} == {"mean of 2"}


def test_more_memory_is_found_too():
    def kept(ratio: float) -> Table:
        memory = {"dtype": "fp32", "mode": "memory", "provider": "ours", "note": "", "saved_mib": 1.0}
        ratios = {"1x2x3x4": 1.1, "5x6x7x8": ratio}
        return Table("layer", HEADER, [{**memory, "shape": k, "saved_to_group_norm": v} for k, v in ratios.items()])

    found = compare(kept(1.13), kept(1.1)).worse  # bytes do not depend on chance: every size is held, and tightly
    assert [(each.key[0], each.key[4]) for each in found] == [("5x6x7x8", "saved_to_group_norm")]
    assert not compare(kept(1.11), kept(1.1)).worse
    assert compare(kept(1.11), kept(1.1), tolerance=0).worse


def test_a_model_is_compared_by_its_ratio_to_bn():
    def model(ratio: float) -> Table:
        key = {"model": "R-50", "dtype": "fp32", "batch": "8", "image": "224x224", "note": ""}
        variants = {"BN": 1.0, "GN": 9 * ratio, "GW-S1-B2": ratio}
        return Table("model", HEADER, [{**key, "variant": name, "to_bn": value} for name, value in variants.items()])

    assert [found.key[:2] for found in compare(model(1.4), model(1.1)).worse] == [("R-50", "GW-S1-B2")]


def test_another_machine_is_remarked_but_compared():
    text = str(compare(table(machine="another"), table()))
    assert "Another machine than before: another, before a machine: fast." in text


def test_ratios_of_one_run_alone_are_counted():
    fewer = dataclasses.replace(table(), rows=table().rows[:1])
    assert "2 ratios are in the earlier run only" in str(compare(fewer, table()))
    assert "2 ratios are in the present run only" in str(compare(table(), fewer))
    without = dataclasses.replace(table(), rows=[row("1x2x3x4", "ours", to_floor=None), row("5x6x7x8", "ours")])
    assert "1 ratios are in the earlier run only" in str(compare(without, table()))
    assert "run only" not in str(compare(table(), table()))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (table(device="cuda"), "measured with device cuda, this run is with cpu"),
        (table(settings="groups=32"), "measured with settings groups=32"),
        (Table("model", HEADER, []), "a table of the benchmark 'model', this run is one of 'layer'"),
        (
            Table("layer", HEADER, [row("9x9x9x9", "ours")]),
            "no ratio in common: the reference has 9x9x9x9 .* and 1",
        ),
        (
            Table("layer", HEADER, [row("1x2x3x4", "figure1")]),
            "the reference has none, this run 1x2x3x4 fp32",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(reference, message):
    with pytest.raises(ValueError, match=message):
        compare(table(), reference)


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf")])
def test_a_tolerance_that_lets_nothing_or_everything_pass_is_refused(tolerance):
    with pytest.raises(ValueError, match=f"tolerance {tolerance}: give a finite number"):
        compare(table(), table(), tolerance=tolerance)


def test_files_that_are_no_tables(tmp_path):
    path = tmp_path / "t.csv"
    with pytest.raises(FileNotFoundError, match="no table of measurements"):
        read_csv(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no table of this benchmark"):
        read_csv(path)
    path.write_text("# benchmark: layer\nshape,dtype\n1,2\n")
    with pytest.raises(ValueError, match="lacks the columns mode, provider"):
        read_csv(path)
    write_csv(table(), path)
    path.write_text(path.read_text().replace("1.5", "fast"))
    with pytest.raises(ValueError, match="row 1 holds something that is not a number"):
        read_csv(path)
    for ratio in ("nan", "inf", "-1"):  # no run would be worse than these, or every one
        write_csv(Table("layer", HEADER, [row("1x2x3x4", "ours", to_floor=float(ratio))]), path)
        with pytest.raises(ValueError, match=f"row 1 holds .*'{ratio}' is no time, size or ratio"):
            read_csv(path)
    draw(table(), path)
    with pytest.raises(ValueError, match="no table of this benchmark"):
        read_csv(path)


def test_a_damaged_row_is_refused(tmp_path):
    path = tmp_path / "t.csv"
    write_csv(table(), path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines)[: -len(lines[-1]) - 10])  # within the last row but one
    with pytest.raises(ValueError, match="row 3 does not have the 17 cells .* cut off"):
        read_csv(path)
    path.write_text("\n".join([*lines, lines[-2] + ",1"]))
    with pytest.raises(ValueError, match="row 5 does not have the 17 cells"):
        read_csv(path)


@pytest.mark.parametrize("kind", ["layer", "model"])
def test_a_picture_is_drawn(kind, tmp_path):
    drawn = table()
    if kind == "model":
        key = {"model": "R-50", "dtype": "fp32", "batch": "8", "image": "224x224", "note": ""}
        rows = [{**key, "variant": "BN", "to_bn": 1.0, "paper_to_bn": 1.0}, {**key, "variant": "GW-S1"}]
        drawn = Table("model", HEADER, rows)
    path = tmp_path / "new" / "table.png"
    draw(drawn, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["table.png"]
