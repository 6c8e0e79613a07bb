"""Small-batch study: its plan, its results, and runs side by side."""

import dataclasses
import json
import math
import random
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from PIL import Image
from scipy import stats
from torch import nn

from benchmarks.table import Table, write_csv
from experiments import summarize_study
from experiments.small_batch import tables
from experiments.small_batch.dataset import HardSyntheticConfig
from experiments.small_batch.features import feature_statistics
from experiments.small_batch.paired_test import Difference, paired_difference, verdict
from experiments.small_batch.plan import (
    NORMS,
    RATES,
    VARIATIONS,
    Row,
    planned_rows,
)
from experiments.small_batch.results_file import append_result, read_results
from experiments.small_batch.results_page import PAGE
from experiments.small_batch.side_by_side import run_rows
from experiments.small_batch.single_run import CONFIG, run_row
from gw_detectron.config import read_config
from gw_detectron.data import make_synthetic, register_synthetic
from gw_detectron.layers.weight_standardization import WeightStandardized
from gw_detectron.norms import norm_rows

ROW = Row("GN", 2, 0.01, 0, 2000)


def config(row):
    return read_config(str(CONFIG), row.config_words())


def result(ap, **more):
    return {"AP": ap, "seconds": 60.0, "diverged": "", **more}


def test_rows_of_one_seed_start_from_the_same_weights():
    """The comparison of norms is paired by the seed."""

    def weights(norm, seed):
        torch.manual_seed(seed)
        model = build_model(config(dataclasses.replace(ROW, norm=norm)))
        return {name: value for name, value in model.state_dict().items() if ".norm." not in name}

    first, second, other = weights("BN", 1), weights("GW", 1), weights("GW", 2)
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not torch.equal(
        second["backbone.bottom_up.stem.conv1.weight"], other["backbone.bottom_up.stem.conv1.weight"]
    )


def test_conditioning_and_gap_are_those_of_numpy():
    torch.manual_seed(0)
    norm, x = nn.BatchNorm2d(2, eps=0.5), torch.randn(3, 4, 2, 5, 5)
    norm.running_mean, norm.running_var = torch.tensor([1.0, -2.0]), torch.tensor([4.0, 0.5])
    model = SimpleNamespace(
        backbone=SimpleNamespace(bottom_up=nn.Sequential(OrderedDict(norm=norm, conv=nn.Conv2d(2, 1, 1)))),
        preprocess_image=lambda batch: SimpleNamespace(tensor=batch),
    )
    found = feature_statistics(model, x)
    mean, deviation, x = np.array([1.0, -2.0]), np.sqrt([4.5, 1.0]), x.double().numpy()
    y = ((np.moveaxis(x, 2, -1) - mean) / deviation).reshape(-1, 2)
    assert found["kappa"] == {"conv": pytest.approx(np.linalg.cond(y.T @ y), rel=1e-5)}
    ratio, shift = np.sqrt(x.var((1, 3, 4)) + 0.5) / deviation, (x.mean((1, 3, 4)) - mean) / deviation
    assert found["gap"] == {"norm": pytest.approx(np.sqrt(np.mean((1 - ratio) ** 2 + shift**2)))}
    assert norm.running_mean.tolist() == [1.0, -2.0] and norm.momentum == 0.1


CHILD = """
import sys
results, line, status = sys.argv[1:]
if status == "0":
    with open(results, "a") as file:
        file.write(line + "\\n")
sys.exit(int(status))
"""


def starter(path, bad=""):
    """Start processes that write the result of a row without training."""

    def start(row):
        line = json.dumps({**dataclasses.asdict(row), **result(20 - 1000 * abs(row.lr - 0.01))})
        return subprocess.Popen([sys.executable, "-S", "-c", CHILD, str(path), line, str(int(row.name == bad))])

    return start


def test_the_grid_then_scored_runs_and_nothing_twice(tmp_path):
    path, reports, bad = tmp_path / "results.jsonl", [], "GN_b2_lr0.01_s0_i2000"
    failed = run_rows(path, starter(path, bad), 2, ["GN_b2_*_i2000"], reports.append)
    assert [row.name for row in failed] == [bad] and {row.seed for row in read_results(path)} == {0}
    assert run_rows(path, starter(path), 2, ["GN_b2_*_i2000"], reports.append) == []
    rows = list(read_results(path))
    assert len(path.read_text().splitlines()) == len(rows) == 10
    assert {row.lr for row in rows if row.seed == 0} == set(RATES)
    assert {(row.lr, row.seed) for row in rows if row.seed} == {(0.01, seed) for seed in range(1, 6)}
    assert reports[-1].startswith("10 finished, 0 left")
    assert run_rows(path, None, 2, ["GN_b2_*_i2000"], reports.append) == []  # starts nothing


SHORT = ("INPUT.MIN_SIZE_TEST", "64", "INPUT.MIN_SIZE_TRAIN", "(64,)", "MODEL.RPN.PRE_NMS_TOPK_TEST", "30")


@pytest.fixture(scope="module")
def hard_dataset(tmp_path_factory):
    root, data = tmp_path_factory.mktemp("datasets"), HardSyntheticConfig(num_train=6, num_val=2, num_tune=3)
    make_synthetic(root, data)
    register_synthetic(root, data)
    yield
    register_synthetic(config=HardSyntheticConfig())


@pytest.mark.usefixtures("hard_dataset", "one_thread")
def test_a_run_is_evaluated_and_its_checkpoints_are_removed(tmp_path):
    row = dataclasses.replace(ROW, norm="BN+GW", batch=1, iterations=10, seed=1)
    start = time.perf_counter()
    run_row(row, tmp_path / "run", tmp_path / "r.jsonl", SHORT)
    (found,) = read_results(tmp_path / "r.jsonl").values()
    assert {"AP", "AP50", "AP75"} < set(found)
    assert (tmp_path / "run" / "inference").exists()
    convs, norms = (found["features"][name] for name in ("kappa", "gap"))
    assert len(convs) == 20 and len(norms) == 11 and all(gap > 0 for gap in norms.values())
    assert [iteration for iteration, _ in found["losses"]] == [9]
    assert 0 < found["seconds"] <= time.perf_counter() - start + 1
    assert found["diverged"] == "" and found["threads"] == 1 and found["options"] == list(SHORT)
    assert found["versions"]["torch"] == torch.__version__ and found["machine"]
    assert not list((tmp_path / "run").glob("*.pth")) and (tmp_path / "run" / "metrics.json").exists()


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        ("BN_PreciseBN", {"BN": 20}),
        ("GW", {"GW:groups=64,iters=5,eps=1e-05,solver=newton": 20}),
        ("GW_T3", {"GW:groups=64,iters=3,eps=1e-05,solver=newton": 20}),
        ("BN+GW", {"BN": 11, "GW:groups=64,iters=5,eps=1e-05,solver=newton": 9}),
        ("BN+GN", {"BN": 11, "GN:groups=64": 9}),
        ("BN+GW_S1-B12", {"BN": 3, "GW:groups=64,iters=5,eps=1e-05,solver=newton": 17}),
        ("GN+WS", {"GN:groups=32": 20}),
    ],
)
def test_a_row_builds_the_norms_of_its_name(norm, expected):
    """R-18 has a stem, 8 blocks of two convolutions, and 3 shortcuts; S1-B2 are the stem and 8 others."""
    cfg = config(dataclasses.replace(ROW, norm=norm))
    assert cfg.SOLVER.STEPS == (1500, 1800) and cfg.SOLVER.IMS_PER_BATCH == 2 and cfg.SEED == 0
    assert (norm == "BN_PreciseBN") == cfg.TEST.PRECISE_BN.ENABLED
    cfg.MODEL.DEVICE = "meta"
    with torch.device("meta"):
        model = build_model(cfg)
    assert Counter(row.spec.removesuffix(",eps=1e-05") for row in norm_rows(model)) == expected
    assert sum(isinstance(layer, WeightStandardized) for layer in model.modules()) == 20 * norm.endswith("+WS")


PAGE_TEXT = "before\n" + "".join(
    f"<!-- {name}: begin -->\nstale {name}\n<!-- {name}: end -->\nafter {name}\n"
    for name in ("hypotheses", "norms", "rates", "longer", "mechanism", "batches", "variations")
)
TIMES = {norm: 0.3 if "GW" in norm else 0.2 for norm in (*NORMS, *VARIATIONS)}
AP = {"BN": 20.0, "GN": 24.0, "GW": 28.0, "BN+GW": 27.0, "BN+GN": 26.5}


@pytest.fixture(scope="module")
def whole():
    """Return results in which every norm is best at 0.005 per image, with little noise."""
    rng, done = random.Random(0), {}
    for _ in range(3):  # grids at batch 2, the rows of their rates, the scored rows of the other grids
        for row in list(planned_rows({row: result["AP"] for row, result in done.items()})):
            if row.lr is not None and row not in done:
                ap = AP.get(row.norm, 21.0) - 2 * abs(math.log2(row.lr / row.batch / 0.005)) + rng.gauss(0, 0.1)
                kappa = {"stem.conv1": 10.0, "res2.0.conv1": None, "res2.0.conv2": 25.0, "res3.0.shortcut": 9.0}
                features = {"kappa": kappa, "gap": {"res2.0.conv1": 0.1, "stem.conv1": 0.4}}
                done[row] = result(ap, losses=[(0, 3.0), (300, 2.0), (1900, 1.5)], features=features)
    return done


def test_a_paired_difference_is_that_of_scipy():
    first, second = {1: 30.0, 2: 32.0, 3: 31.5, 9: 0.0}, {3: 30.0, 2: 31.0, 1: 28.0, 8: 99.0}
    found = paired_difference(first, second)
    test = stats.ttest_rel([30.0, 32.0, 31.5], [28.0, 31.0, 30.0])
    assert found.mean == pytest.approx(1.5) and found.p == pytest.approx(test.pvalue)
    half = stats.t.ppf(0.975, 2) * 0.5 / math.sqrt(3)  # the differences 2, 1, 1.5 deviate by 0.5
    assert (found.low, found.high) == pytest.approx((1.5 - half, 1.5 + half))


@pytest.mark.parametrize(
    ("mean", "low", "high", "p", "expected"),
    [
        (2.0, 1.5, 2.5, 0.01, "holds"),
        (1.0, 0.5, 1.5, 0.05, "open"),
        (0.9, 0.5, 1.3, 0.01, "open"),  # surely better, perhaps by less than 1 AP
        (0.5, 0.2, 0.8, 0.01, "no"),  # surely better, surely by less than 1 AP
        (-1.0, -4.0, 2.0, 0.04, "no"),
    ],
)
def test_verdicts_are_those_of_the_plan(mean, low, high, p, expected):
    assert verdict(Difference(mean, low, high, p), p) == expected


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
        with Image.open(tmp_path / f"{name}.png") as image:
            assert len(image.convert("L").getcolors()) > 50
    summarize_study.main(args)
    assert (tmp_path / PAGE).read_text() == first
