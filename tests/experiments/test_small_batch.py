"""Small-batch study: its plan, its results, and runs side by side."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import build_model
from torch import nn

from benchmarks.table import read_csv
from benchmarks.timing import Step
from experiments import run_study
from experiments.small_batch import iteration_time, single_run
from experiments.small_batch.features import feature_statistics
from experiments.small_batch.plan import (
    DECIDING,
    NORMS,
    OTHER_BATCH_NORMS,
    OTHER_BATCHES,
    RATES,
    VARIATIONS,
    Row,
    planned_rows,
)
from experiments.small_batch.results_file import append_result, read_results
from experiments.small_batch.side_by_side import estimate_hours, open_rows, run_rows
from experiments.small_batch.single_run import CONFIG, run_row, scores
from gw_detectron import GroupWhitening2d
from gw_detectron.config import read_config
from gw_detectron.data import HardSyntheticConfig, make_synthetic, register_synthetic
from gw_detectron.errors import ConfigError, DataError
from gw_detectron.layers.weight_standardization import WeightStandardized
from gw_detectron.norms import norm_spec

from ..tiny_run import ROOT

ROW = Row("GN", 2, 0.01, 0, 2000)


def config(row):
    return read_config(str(CONFIG), row.config_words())


def result(ap, **more):
    return {"AP": ap, "seconds": 60.0, "diverged": "", **more}


def grid_results(norm, batch, aps):
    rows = [row for row in planned_rows({}) if (row.norm, row.batch, row.seed) == (norm, batch, 0)]
    return dict(zip(rows, aps, strict=True))


# --- plan -----------------------------------------------------------------------------------------------


def all_grids():
    """Return results with the best rate in the middle of all grids."""
    done = {}
    for _ in range(2):  # the grids at batch 2, then those that start from their rates
        grids = [row for row in planned_rows(done) if row.seed == 0]
        done = {row: -abs(math.log(row.lr / row.batch / 0.005)) for row in grids}
    return done


def test_the_plan_without_results():
    rows = list(planned_rows({}))
    assert {(row.batch, row.seed > 0) for row in rows if row.lr} == {(2, False)}
    assert [row.norm for row in rows[:50:10]] == list(DECIDING)


def test_the_whole_plan():
    rows = list(planned_rows(all_grids()))
    main, others, variations, longer = 5 * (5 + 5) + 4 * (3 + 3), 6 * 3 * (3 + 1), 11 * 3, 3 * (3 + 5 + 3)
    assert len(rows) == len(set(rows)) == len({row.name for row in rows}) == main + others + variations + longer
    assert {row.norm for row in rows} == {*NORMS, *VARIATIONS} and set(DECIDING) < set(NORMS)
    assert [row.batch * row.iterations for row in rows].count(4000) == len(rows) - longer
    longest = [row for row in rows if row.batch * row.iterations != 4000]
    assert [(row.norm, row.seed, row.iterations) for row in longest[:4]] == [
        ("BN+GN", 1, 2500),
        ("BN", 1, 2500),
        ("GN", 1, 2500),
        ("BN+GN", 2, 2500),
    ]
    schedules = {tuple(row.config_keys()[f"SOLVER.{key}"] for key in ("WARMUP_ITERS", "STEPS")) for row in longest}
    assert schedules == {(250, (1875, 2250)), (600, (4500, 5400)), (750, (5625, 6750))}
    assert {row.batch for row in rows[: main + variations + longer]} == {2}  # the plan: these come first
    assert {row.config_keys()["DATASETS.TEST"] for row in rows if row.seed == 0} == {("gw_synthetic_hard_tune",)}
    assert {row.config_keys()["DATASETS.TEST"] for row in rows if row.seed} == {("gw_synthetic_hard_val",)}
    rates = {(row.batch, row.lr) for row in rows if row.seed}
    assert rates == {(batch, 0.005 * batch) for batch in (2, *OTHER_BATCHES)}


def test_other_batches_start_from_the_rate_at_two_images():
    done = all_grids()
    for batch in OTHER_BATCHES:
        rates = [row.lr for row in done if (row.norm, row.batch) == ("GN", batch)]
        assert rates == [0.0025 * batch, 0.005 * batch, 0.01 * batch]


def test_the_best_rate_of_the_grid_is_scored():
    done = grid_results("GW", 2, [10, 20, 30, 30, 5])
    scored = [row for row in planned_rows(done) if row.norm == "GW" and row.batch == 2 and row.seed]
    assert [(row.lr, row.seed, row.iterations) for row in scored] == [
        *((0.01, seed, 2000) for seed in range(1, 6)),
        *((0.01, seed, 6000) for seed in range(1, 4)),
    ]
    others = {row.norm for row in planned_rows(done) if row.batch == 2 and row.seed and row.lr}
    assert others == {"GW", *(variation for variation, (norm, _) in VARIATIONS.items() if norm == "GW")}


def test_a_scored_run_does_not_change_the_chosen_rate():
    done = grid_results("GN", 2, [10, 20, 30, 25, 5])
    done |= {dataclasses.replace(ROW, seed=1): 0.0, dataclasses.replace(ROW, seed=1, lr=0.02): 99.0}
    assert {row.lr for row in planned_rows(done) if (row.norm, row.batch) == ("GN", 2) and row.seed} == {0.01}


@pytest.mark.parametrize(
    ("aps", "extended", "limit"), [([30, 20, 10, 5, 1], 0.00125, 0.000625), ([1, 5, 10, 20, 30], 0.08, 0.16)]
)
def test_a_grid_grows_until_the_best_rate_is_inside(aps, extended, limit):
    done = grid_results("BN", 2, aps)

    def rows():
        return [row for row in planned_rows(done) if (row.norm, row.batch) == ("BN", 2)]

    (new,) = [row for row in rows() if row.seed == 0 and row not in done]
    assert new.lr == extended
    assert {row.lr for row in rows() if row.seed} == {None}
    inside = {**done, new: 25}
    assert {row.lr for row in planned_rows(inside) if (row.norm, row.batch) == ("BN", 2) and row.seed} == {
        0.0025 if aps[0] == 30 else 0.04
    }
    done[new] = 40
    (last,) = [row for row in rows() if row.seed == 0 and row not in done]
    assert last.lr == limit
    done[last] = 50
    assert {row.lr for row in rows() if row.seed} == {limit}  # no further


@pytest.mark.parametrize("norm", [*NORMS, *VARIATIONS])
def test_every_row_builds_the_norm_of_its_name(norm):
    cfg = config(dataclasses.replace(ROW, norm=norm))
    assert cfg.SOLVER.STEPS == (1500, 1800) and cfg.SOLVER.IMS_PER_BATCH == 2 and cfg.SEED == 0
    assert (norm == "BN_PreciseBN") == cfg.TEST.PRECISE_BN.ENABLED
    cfg.MODEL.DEVICE = "meta"
    with torch.device("meta"):
        model = build_model(cfg)
    kinds = (nn.BatchNorm2d, nn.GroupNorm, GroupWhitening2d, FrozenBatchNorm2d, WeightStandardized)
    found = {kind.__name__: sum(isinstance(layer, kind) for layer in model.modules()) for kind in kinds}
    # a stem, 8 blocks of two convolutions, and 3 shortcuts; S1-B2 are the stem and 8 others
    expected = {
        "BN": {"BatchNorm2d": 20},
        "BN_PreciseBN": {"BatchNorm2d": 20},
        "FrozenBN": {"FrozenBatchNorm2d": 20},
        "GN": {"GroupNorm": 20},
        "GW": {"GroupWhitening2d": 20},
        "BN+GW": {"BatchNorm2d": 11, "GroupWhitening2d": 9},
        "BN+GN": {"BatchNorm2d": 11, "GroupNorm": 9},
        "GN+WS": {"GroupNorm": 20, "WeightStandardized": 20},
        "GW+WS": {"GroupWhitening2d": 20, "WeightStandardized": 20},
        "BN+GW_S1": {"BatchNorm2d": 19, "GroupWhitening2d": 1},
        "BN+GW_S1-B1": {"BatchNorm2d": 11, "GroupWhitening2d": 9},
        "BN+GN_S1": {"BatchNorm2d": 19, "GroupNorm": 1},
        "BN+GN_S1-B1": {"BatchNorm2d": 11, "GroupNorm": 9},
        "BN+GW_S1-B12": {"BatchNorm2d": 3, "GroupWhitening2d": 17},
    }.get(norm, {"GroupWhitening2d": 20})
    assert {name: count for name, count in found.items() if count} == expected
    groups = {layer.num_groups for layer in model.modules() if isinstance(layer, nn.GroupNorm)}
    assert groups == ({64} if norm.startswith("BN+GN") else {32} if "GN" in norm else set())
    (options,) = {norm_spec(layer) for layer in model.modules() if isinstance(layer, GroupWhitening2d)} or {""}
    g, steps, solver = {
        "GW_g8": (8, 5, "newton"),
        "GW_g16": (16, 5, "newton"),
        "GW_g32": (32, 5, "newton"),
        "GW_T3": (64, 3, "newton"),
        "GW_T7": (64, 7, "newton"),
        "GW_zca": (64, None, "zca"),
    }.get(norm, (64, 5, "newton"))
    steps = f"iters={steps}," if steps else ""
    assert options == (f"GW:groups={g},{steps}eps=1e-05,solver={solver}" if "GW" in norm else "")


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


# --- results --------------------------------------------------------------------------------------------


def test_results_are_read_as_written(tmp_path):
    path = tmp_path / "data" / "results.jsonl"
    assert read_results(path) == {}
    append_result(path, ROW, result(20.0))
    append_result(path, dataclasses.replace(ROW, norm="BN+GW", lr=0.0025 * 1 / 2), result(30.0))
    read = read_results(path)
    assert [row.name for row in read] == ["GN_b2_lr0.01_s0_i2000", "BN+GW_b2_lr0.00125_s0_i2000"]
    assert read[ROW]["AP"] == 20.0 and len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("line", ['{"norm": "GN"', "3", '{"norm": "GN", "batch": 2}', "[]"])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "results.jsonl"
    append_result(path, ROW, result(20.0))
    with open(path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"results.jsonl', line 2: not the result of a run: .* Fix: delete the line"):
        read_results(path)


def test_scores_without_detections_or_training_are_zero():
    nan = {"bbox": dict.fromkeys(("AP", "AP50", "AP75"), float("nan"))}
    zero = {"AP": 0.0, "AP50": 0.0, "AP75": 0.0}
    assert scores(nan) == scores({"bbox": {}}) == scores(None) == zero
    assert scores({"bbox": {"AP": 1.23456, "AP50": 2, "AP75": 3, "APs": 4}})["AP"] == 1.235


def test_the_estimate_is_proportional_to_images_and_jobs():
    rows = open_rows({})
    assert estimate_hours(rows, {}, 2) is None
    done = {ROW: result(20.0, seconds=360.0)}
    images = sum(row.batch * row.iterations for row in rows)
    assert estimate_hours(rows, done, 2) == pytest.approx(images / 4000 * 360 / 3600 / 2)


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


# --- runs side by side ----------------------------------------------------------------------------------

CHILD = """
import json, sys, time
from pathlib import Path
name, line, results, seconds, status = sys.argv[1:]
Path(results).with_name(f"started {name}").touch()
time.sleep(float(seconds))
if status == "0":
    with open(results, "a") as file:
        file.write(line + "\\n")
sys.exit(int(status))
"""


def starter(path, seconds=0.0, status=lambda row: 0, ap=lambda row: 20 - 1000 * abs(row.lr - 0.01)):
    """Start processes that write the result of a row without training."""

    def start(row):
        line = json.dumps({**dataclasses.asdict(row), **result(ap(row))})
        words = [row.name, line, str(path), str(seconds), str(status(row))]
        return subprocess.Popen([sys.executable, "-S", "-c", CHILD, *words])

    return start


def test_grid_then_scored_runs_and_nothing_twice(tmp_path):
    path, reports = tmp_path / "results.jsonl", []
    assert run_rows(path, starter(path), 2, ["GN_b2_*_i2000"], reports.append) == []
    rows = list(read_results(path))
    assert len(path.read_text().splitlines()) == len(rows) == 10
    assert {row.lr for row in rows if row.seed == 0} == set(RATES)
    assert {(row.lr, row.seed) for row in rows if row.seed} == {(0.01, seed) for seed in range(1, 6)}
    assert any("done GN_b2_lr0.01_s5_i2000: AP 20.0 on val, 60 s" in line for line in reports)
    assert reports[-1].startswith("10 finished, 0 left")
    assert run_rows(path, None, 2, ["GN_b2_*_i2000"], reports.append) == []  # starts nothing


def test_a_failed_run_is_reported_left_open_and_blocks_only_its_own_grid(tmp_path):
    path, reports = tmp_path / "results.jsonl", []
    only = ["GN_b2_*_i2000", "GW_b2_*_i2000"]
    bad = "GN_b2_lr0.01_s0_i2000"
    failed = run_rows(path, starter(path, status=lambda row: int(row.name == bad)), 2, only, reports.append)
    assert [row.name for row in failed] == [bad]
    assert f"FAILED {bad}: exit status 1, see process.txt in its folder" in reports
    done = read_results(path)
    assert {row.seed for row in done if row.norm == "GN"} == {0}
    assert {row.seed for row in done if row.norm == "GW"} == set(range(6))
    assert run_rows(path, starter(path), 2, only, reports.append) == []
    assert {row.seed for row in read_results(path) if row.norm == "GN"} == set(range(6))


def test_no_more_runs_than_jobs_at_a_time_and_all_end_with_the_runner(tmp_path):
    path, running = tmp_path / "results.jsonl", []
    start = starter(path, seconds=60)

    def noted(row):
        running.append(start(row))
        if len(running) == 3:
            raise AssertionError("a third run started")
        if len(running) == 2:
            raise KeyboardInterrupt
        return running[-1]

    with pytest.raises(KeyboardInterrupt):
        run_rows(path, noted, 2, [], lambda line: None)
    running[0].wait(timeout=10)
    running[1].kill()  # the interrupt came before the runner knew it
    running[1].wait(timeout=10)
    assert len(running) == 2 and running[0].returncode == -signal.SIGTERM


# --- the tool -------------------------------------------------------------------------------------------


def arguments(tmp_path, *words):
    places = ["--results", str(tmp_path / "r.jsonl"), "--output", str(tmp_path / "out")]
    return run_study.get_parser().parse_args([*words, *places])


def test_a_dry_run_lists_what_is_left_and_writes_nothing(tmp_path, capsys):
    assert run_study.main(arguments(tmp_path, "--dry-run", "--only", "GN_b2_*_i2000"))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11 and lines[0] == "GN_b2_lr0.0025_s0_i2000" and lines[9] == "GN_b2_lrchosen_s5_i2000"
    assert lines[-1] == "10 runs left, time unknown before the first result"
    assert not os.listdir(tmp_path)
    append_result(tmp_path / "r.jsonl", ROW, result(20.0, seconds=720.0))
    assert run_study.main(arguments(tmp_path, "--dry-run", "--only", "GN_b2_*_i2000"))
    assert capsys.readouterr().out.splitlines()[-1] == "9 runs left, 0.9 h"


def test_the_results_are_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = run_study.get_parser().parse_args([])
    assert read_results(args.results) and args.output == ROOT / "output" / "small_batch"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jobs", "0"], r"--jobs \(0\): too few. Fix: give 1 or more"),
        (["--only", "GM_*"], r"--only \(GM_\*\): no run has such a name. Fix: see the names with --dry-run"),
    ],
)
def test_wrong_flags_are_refused(tmp_path, words, message):
    with pytest.raises(ConfigError, match=message):
        run_study.main(arguments(tmp_path, *words))


def test_times_of_training_iterations(tmp_path, monkeypatch):
    monkeypatch.setattr(iteration_time, "NORMS", {norm: NORMS[norm] for norm in ("BN", "GN+WS")})
    monkeypatch.setattr(iteration_time, "VARIATIONS", {"GW_T3": VARIATIONS["GW_T3"]})
    monkeypatch.setattr(run_study, "_TIMED_ROUNDS", 1)
    timed = []
    iteration = SimpleNamespace(step=Step(lambda: time.sleep(0.001)))
    monkeypatch.setattr(
        iteration_time, "detector_training", lambda cfg, *_: timed.append(cfg.MODEL.RESNETS) or iteration
    )
    assert run_study.main(arguments(tmp_path, "--time", str(tmp_path / "times.csv")))
    table = read_csv(tmp_path / "times.csv")
    assert [row["variant"] for row in table.rows] == ["BN", "GN+WS", "GW_T3"]
    assert [(keys.NORM, keys.CONV) for keys in timed] == [("BN", ""), ("GN", "WS"), ("GW:iters=3", "")]
    assert table.rows[0]["to_bn"] == 1 and all(row["median_ms"] > 0 for row in table.rows)
    assert {row["image"] for row in table.rows} == {"192x256"} and table.header["command"].startswith("python ")
    assert run_study.main(arguments(tmp_path, "--time", str(tmp_path / "times.csv"), "--batch", "1"))
    rows = read_csv(tmp_path / "times.csv").rows
    assert [row["variant"] for row in rows] == list(OTHER_BATCH_NORMS) and {row["batch"] for row in rows} == {"1"}


# --- one run ---------------------------------------------------------------------------------------------


def test_a_run_is_continued_and_its_curve_ends_with_the_last_loss(tmp_path, monkeypatch):
    flags = []
    lines = [f'{{"iteration": {iteration}, "total_loss": 1}}' for iteration in range(60)]
    (tmp_path / "metrics.json").write_text("\n".join(lines))
    monkeypatch.setattr(single_run, "main", flags.append)
    run_row(ROW, tmp_path, tmp_path / "r.jsonl")
    assert [args.resume for args in flags] == [True]
    losses = read_results(tmp_path / "r.jsonl")[ROW]["losses"]
    assert [iteration for iteration, _ in losses] == list(range(1, 60, 2))


def test_features_are_those_of_the_final_weights_on_the_same_images(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(config(ROW).dump())
    final = nn.Linear(2, 2)
    DetectionCheckpointer(final, str(tmp_path)).save("model_final")
    monkeypatch.setattr(single_run, "build_model", lambda cfg: nn.Linear(2, 2))
    monkeypatch.setattr(single_run, "build_detection_train_loader", lambda cfg: torch.rand(100))
    monkeypatch.setattr(single_run, "feature_statistics", lambda model, batches: (model, torch.stack([*batches])))
    (model, images), (_, again) = (single_run._features(tmp_path, 4) for _ in range(2))
    assert torch.equal(model.weight, final.weight) and torch.equal(images, again) and len(images) == 64 / 4


# --- a real run -----------------------------------------------------------------------------------------

SHORT = ("INPUT.MIN_SIZE_TEST", "64", "INPUT.MIN_SIZE_TRAIN", "(64,)", "MODEL.RPN.PRE_NMS_TOPK_TEST", "30")


@pytest.fixture(scope="module")
def hard_dataset(tmp_path_factory):
    root, data = tmp_path_factory.mktemp("datasets"), HardSyntheticConfig(num_train=6, num_val=2, num_tune=3)
    make_synthetic(root, data)
    register_synthetic(root, data)
    yield
    register_synthetic()


@pytest.mark.usefixtures("hard_dataset", "one_thread")
@pytest.mark.parametrize("seed", [0, 1])
def test_a_run_is_evaluated_and_its_checkpoints_are_removed(tmp_path, seed):
    row = dataclasses.replace(ROW, norm="BN+GW", batch=1, iterations=10, seed=seed)
    start = time.perf_counter()
    run_row(row, tmp_path / "run", tmp_path / "r.jsonl", SHORT)
    (found,) = read_results(tmp_path / "r.jsonl").values()
    assert {"AP", "AP50", "AP75"} < set(found)
    assert (tmp_path / "run" / "inference").exists()
    if seed:
        convs, norms = (found["features"][name] for name in ("kappa", "gap"))
        assert len(convs) == 20 and len(norms) == 11 and all(gap > 0 for gap in norms.values())
    else:
        assert found["features"] == {}
    assert [iteration for iteration, _ in found["losses"]] == [9]
    assert 0 < found["seconds"] <= time.perf_counter() - start + 1
    assert found["diverged"] == "" and found["threads"] == 1 and found["options"] == list(SHORT)
    assert found["versions"]["torch"] == torch.__version__ and found["machine"]
    assert not list((tmp_path / "run").glob("*.pth")) and (tmp_path / "run" / "metrics.json").exists()


@pytest.mark.usefixtures("hard_dataset", "one_thread")
def test_a_diverged_run_has_ap_zero_and_says_why(tmp_path):
    row = dataclasses.replace(ROW, norm="FrozenBN", iterations=10, lr=1e30)
    run_row(row, tmp_path / "run", tmp_path / "r.jsonl", SHORT)
    found = read_results(tmp_path / "r.jsonl")[row]
    assert found["AP"] == 0.0 and found["features"] == {}
    assert "iteration" in found["diverged"]
