"""Small-batch study: its tests, tables and figures."""

import math
import random

import pytest
from PIL import Image
from scipy import stats

from benchmarks.table import Table, write_csv
from experiments import summarize_study
from experiments.small_batch import figures, tables
from experiments.small_batch.paired_test import HYPOTHESES, Difference, holm, paired_difference, verdict
from experiments.small_batch.plan import DECIDING, NORMS, VARIATIONS, planned_rows
from experiments.small_batch.results_file import append_result, read_results
from experiments.small_batch.results_page import PAGE, write_summary
from gw_detectron.errors import DataError, MissingFileError

PAGE_TEXT = "before\n" + "".join(
    f"<!-- {name}: begin -->\nstale {name}\n<!-- {name}: end -->\nafter {name}\n"
    for name in ("hypotheses", "norms", "rates", "longer", "mechanism", "batches", "variations")
)
TIMES = {norm: 0.3 if "GW" in norm else 0.2 for norm in (*NORMS, *VARIATIONS)}
AP = {"BN": 20.0, "GN": 24.0, "GW": 28.0, "BN+GW": 27.0, "BN+GN": 26.5}


def results_of_the_whole_plan():
    """Return results in which every norm is best at 0.005 per image, with little noise."""
    rng, done = random.Random(0), {}
    for _ in range(3):  # grids at batch 2, the rows of their rates, the scored rows of the other grids
        for row in list(planned_rows({row: result["AP"] for row, result in done.items()})):
            if row.lr is not None and row not in done:
                ap = AP.get(row.norm, 21.0) - 2 * abs(math.log2(row.lr / row.batch / 0.005)) + rng.gauss(0, 0.1)
                features = {
                    "kappa": {
                        "stem.conv1": 10.0,
                        "res2.0.conv1": None,
                        "res2.0.conv2": 25.0,
                        "res2.1.conv1": 100.0,
                        "res3.0.shortcut": 9.0,
                    },
                    "gap": {"res2.0.conv1": 0.1, **({} if row.norm == "BN+GW" else {"stem.conv1": 0.4})},
                }
                done[row] = {
                    "AP": ap,
                    "seconds": 400.0,
                    "losses": [(0, 3.0), (300, 2.0), (350, 1.9), (310, 1.8), (1900, 1.5)],
                    "features": features if row.seed else {},
                    "diverged": "",
                }
    return done


@pytest.fixture(scope="module")
def whole():
    return results_of_the_whole_plan()


# --- statistics -----------------------------------------------------------------------------------------


def test_a_paired_difference_is_that_of_scipy():
    first, second = {1: 30.0, 2: 32.0, 3: 31.5, 9: 0.0}, {3: 30.0, 2: 31.0, 1: 28.0, 8: 99.0}
    found = paired_difference(first, second)
    test = stats.ttest_rel([30.0, 32.0, 31.5], [28.0, 31.0, 30.0])
    assert found.mean == pytest.approx(1.5) and found.p == pytest.approx(test.pvalue)
    half = stats.t.ppf(0.975, 2) * 0.5 / math.sqrt(3)  # the differences 2, 1, 1.5 deviate by 0.5
    assert (found.low, found.high) == pytest.approx((1.5 - half, 1.5 + half))


def test_a_difference_needs_two_common_seeds_and_may_be_constant():
    assert paired_difference({1: 3.0}, {1: 2.0}) is paired_difference({1: 3.0, 2: 1.0}, {3: 2.0}) is None
    assert paired_difference({1: 3.0, 2: 4.0}, {1: 3.0, 2: 4.0}) == Difference(0.0, 0.0, 0.0, 1.0)
    assert paired_difference({1: 3.0, 2: 4.0}, {1: 2.0, 2: 3.0}) == Difference(1.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("values", "corrected"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),  # the example of many textbooks
        ([0.5, 0.6], [1.0, 1.0]),
        ([0.02], [0.02]),
    ],
)
def test_holm(values, corrected):
    assert holm(values) == pytest.approx(corrected)


@pytest.mark.parametrize(
    ("mean", "low", "high", "p", "expected"),
    [
        (2.0, 1.5, 2.5, 0.01, "holds"),
        (1.0, 0.5, 1.5, 0.049, "holds"),
        (1.0, 0.5, 1.5, 0.05, "open"),
        (0.9, 0.5, 1.3, 0.01, "open"),  # surely better, perhaps by less than 1 AP
        (0.5, 0.2, 0.8, 0.01, "no"),  # surely better, surely by less than 1 AP
        (0.0, -3.0, 3.0, 1.0, "open"),
        (-1.0, -4.0, 2.0, 0.04, "no"),
        (-0.2, -0.9, 0.5, 0.5, "no"),
    ],
)
def test_verdicts_are_those_of_the_plan(mean, low, high, p, expected):
    assert verdict(Difference(mean, low, high, p), p) == expected


# --- tables ---------------------------------------------------------------------------------------------


def cells(table):
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return lines[0], {line[0]: line[1:] for line in lines[2:]}


def test_the_table_of_hypotheses(whole):
    _, lines = cells(tables.hypotheses(whole))
    assert list(lines) == list(HYPOTHESES) == ["H1", "H2", "H3", "H4"]
    assert lines["H1"][0] == "GW - BN" and float(lines["H1"][1]) == pytest.approx(8, abs=0.3)
    assert [line[-1] for line in lines.values()] == ["holds", "holds", "no", "holds"]  # 0.5 AP is too little


def test_hypotheses_wait_for_all_runs(whole):
    part = {row: result for row, result in whole.items() if row.norm != "BN+GN" or row.seed == 0}
    assert tables.hypotheses(part) == "The scored runs of the hypotheses are not finished."
    assert tables.main_table(part, TIMES).endswith("Not yet scored: BN+GN.")
    lacking = {row: result for row, result in whole.items() if (row.norm, row.seed) != ("BN+GN", 5)}
    assert tables.hypotheses(lacking) == "The scored runs of the hypotheses are not finished."
    assert cells(tables.main_table(lacking, TIMES))[1]["BN+GN"][2] == "4 of 5"


def test_the_table_of_norms(whole):
    header, lines = cells(tables.main_table(whole, TIMES))
    assert list(lines) == list(NORMS)
    gw = dict(zip(header[1:], lines["GW"], strict=True))
    assert gw["learning rate"] == "0.01" and gw["seeds"] == "5" and gw["time"] == "1.50"
    assert gw["AP"].startswith("28.") or gw["AP"].startswith("27.9")
    assert gw["rates within 2 AP of the best"] in ("0.01", "0.005, 0.01", "0.01, 0.02", "0.005, 0.01, 0.02")
    assert lines["BN"][3] == "" and lines["GW"][3].startswith(("+8.", "+7.9"))
    two = {row: {**result, "AP": 20.0 + 2 * row.seed} for row, result in whole.items() if row.seed in (1, 2)}
    assert cells(tables.main_table(two, TIMES))[1]["GW"][1] == "23.0 ± 1.4"


def test_tables_of_rates_batches_and_variations(whole):
    header, lines = cells(tables.grid_table(whole))
    assert header == ["norm", "0.0025", "0.005", "0.01", "0.02", "0.04"]
    assert all(all(line) == (norm in DECIDING) for norm, line in lines.items())
    image, _, table = tables.batch_table(whole).partition("\n\n")
    header, lines = cells(table)
    assert image == f"![Box AP over the images per batch]({tables.BATCH_FIGURE})"
    assert header == ["norm", "batch 1", "batch 2", "batch 4", "batch 8", "batch 2, all seeds"]
    first = next(result["AP"] for row, result in whole.items() if (row.norm, row.batch, row.seed) == ("GN", 2, 1))
    assert lines["GN"][1] == f"{first:.1f}" and "±" in lines["GN"][4]
    first, *_ = tables.variation_table(whole, TIMES).split("\n\n")
    assert cells(first)[1]["BN+GW"][4] == "1.50"  # of BN's
    names = [line.split("|")[1].strip() for line in tables.variation_table(whole, TIMES).splitlines() if "±" in line]
    bases = [base for base, _ in VARIATIONS.values()]
    assert names == [
        name
        for norm in dict.fromkeys(bases)
        for name in (norm, *(name for name, base in zip(VARIATIONS, bases, strict=True) if base == norm))
    ]


def test_a_diverged_run_counts_as_zero(whole):
    row = next(row for row in whole if (row.norm, row.batch, row.seed) == ("BN", 2, 1))
    diverged = {**whole[row], "AP": 0.0, "diverged": "loss is NaN", "features": {}}
    with_zero = {**whole, row: diverged}
    assert paired_difference(tables.scored(with_zero, "GN"), tables.scored(with_zero, "BN")).mean > 7


def test_longer_runs_are_compared_with_each_other_or_with_those_of_equal_time(whole):
    ap, _ = tables.longer_table(whole).split("\n\n")
    header, lines = cells(ap)
    assert header == ["norm", *(f"{each} iterations" for each in (2000, 2500, 6000, 7500))]
    assert lines["GW"][1] == "" and all(lines["GN"]) and list(lines) == list(NORMS)[:5]
    gained = {
        row: {**result, "AP": result["AP"] + {2500: 1, 6000: 3, 7500: 5}.get(row.iterations, 0)}
        for row, result in whole.items()
        if (row.norm, row.iterations) != ("BN+GN", 7500)
    }
    header, lines = cells(tables.longer_table(gained).split("\n\n")[1])
    lengths = ("2000", "2000 - 2500", "6000", "6000 - 7500")
    assert header == ["difference", *(f"{each} iterations" for each in lengths)]
    found = [float(cell.split()[0]) for cell in lines["GW - BN"]]
    assert found == pytest.approx([8, 7, 8, 6], abs=0.2) and lines["GW - BN"][1].endswith("(3 seeds)")
    assert lines["BN+GW - BN+GN"][3] == "not run"
    short = {row: result for row, result in whole.items() if row.iterations < 2500}
    assert tables.longer_table(short) == "No longer run is finished."


def test_the_mechanism_leaves_out_images_shortcuts_and_infinite_numbers(whole):
    header, lines = cells(tables.mechanism_table(whole))
    assert header[1:] == ["kappa", "BN's gap at S1-B2", "BN's gap elsewhere", "loss of the last fifth"]
    assert lines["BN"] == ["50", "0.400", "0.100", "1.500"] and lines["BN+GW"] == ["50", "", "0.100", "1.500"]
    assert tables.mechanism_table({}) == "No features are measured."


def test_the_mechanism_compares_common_seeds(whole):
    """GN+WS has seeds 1 to 3."""
    later = {
        row: {**result, "losses": [[1900, 99.0]], "features": {}} if row.seed > 3 else result
        for row, result in whole.items()
    }
    assert tables.mechanism_table(later) == tables.mechanism_table(whole)


def test_the_losses_of_a_continued_run_do_not_go_back(whole):
    row = next(row for row in whole if row.seed)
    assert list(tables.losses(whole, row).items()) == [(0, 3.0), (300, 2.0), (310, 1.8), (1900, 1.5)]
    (axes,) = figures.loss_figure(whole).axes
    assert [line.get_label() for line in axes.get_lines()] == list(figures._STYLES)
    assert all(list(line.get_xdata()) == [300, 310, 1900] for line in axes.get_lines())


def test_the_figure_of_variations_has_each_of_them_once(whole):
    panels = figures.variation_figure(whole).axes
    assert [len(axes.patches) for axes in panels] == [8, 4, 4]
    assert set(VARIATIONS) < {norm for labels in figures._VARIED.values() for norm in labels}
    counts = [len(line.get_xdata()) for line in panels[0].get_lines()]
    assert counts == [5, 3, 3, 3, 3, 5, 3, 5]  # seeds


# --- the page -------------------------------------------------------------------------------------------


def test_the_page_and_its_figures(whole, tmp_path):
    results = tmp_path / "results.jsonl"
    for row, result in whole.items():
        append_result(results, row, result)
    assert read_results(results).keys() == whole.keys()
    (tmp_path / PAGE).write_text(PAGE_TEXT)
    times = tmp_path / "times.csv"
    write_csv(Table("model", {}, [{"variant": norm, "median_ms": time} for norm, time in TIMES.items()]), times)
    words = ["--results", str(results), "--times", str(times), "--output", str(tmp_path)]
    args = summarize_study.get_parser().parse_args(words)
    summarize_study.main(args)
    first = (tmp_path / PAGE).read_text()
    assert "stale" not in first and tables.main_table(whole, TIMES) in first and first.count("\nafter ") == 7
    for name in ("ap", "batches", "features", "losses", "variations"):
        with Image.open(tmp_path / f"small_batch_{name}.png") as image:
            assert len(image.convert("L").getcolors()) > 50
    summarize_study.main(args)
    assert (tmp_path / PAGE).read_text() == first


@pytest.mark.parametrize("rows", [1, 40])
def test_a_study_that_has_begun_has_a_page_too(whole, tmp_path, rows):
    some, folder = dict(list(whole.items())[:rows]), tmp_path / "new"
    assert all(path.exists() for path in write_summary(some, TIMES, folder))
    assert not (folder / tables.BATCH_FIGURE).exists()
    text = (folder / PAGE).read_text()
    assert (
        text.startswith("# Small-batch study") and text.count("\n## ") == 7 and tables.main_table(some, TIMES) in text
    )
    write_summary(whole, TIMES, folder)
    later = (folder / PAGE).read_text()
    assert (
        later.count("\n## ") == 7
        and tables.main_table(whole, TIMES) in later
        and tables.main_table(some, TIMES) not in later
    )


def test_a_page_without_marks_and_no_results_are_refused(whole, tmp_path):
    (tmp_path / PAGE).write_text(PAGE_TEXT.replace("<!-- rates: end -->", ""))
    with pytest.raises(DataError, match="table 'rates' lacks its marks"):
        write_summary(whole, TIMES, tmp_path)
    assert "stale" in (tmp_path / PAGE).read_text()
    args = summarize_study.get_parser().parse_args(["--results", str(tmp_path / "none.jsonl")])
    with pytest.raises(MissingFileError, match="no results. Fix: run experiments.run_study"):
        summarize_study.main(args)
    append_result(tmp_path / "one.jsonl", *next(iter(whole.items())))
    words = ["--results", str(tmp_path / "one.jsonl"), "--times", str(tmp_path / "no.csv"), "--output", str(tmp_path)]
    with pytest.raises(MissingFileError, match=r"--times \(.*no.csv'\): file not found"):
        summarize_study.main(summarize_study.get_parser().parse_args(words))
