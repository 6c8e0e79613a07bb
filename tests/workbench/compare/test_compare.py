"""gw-detectron compare: its refusals, its processes, and a comparison that is killed and continued."""

import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml

from gw_detectron.errors import (
    ConfigError,
    MissingFileError,
    NonFiniteError,
    PreflightError,
    RunError,
)
from gw_detectron.workbench.commands import compare as command
from gw_detectron.workbench.compare import job, run
from gw_detectron.workbench.compare.plan import Costs, Job
from gw_detectron.workbench.run.folder import METRICS

from ...photos import photo_names, write_photos
from ...tiny_run import CONFIG, OPTS, environment

#: some of many boxes fit by chance: AP is above 0 after a few iterations
FINDS = {
    "DATALOADER.NUM_WORKERS": 1,  # a process of a forkserver has to fork them
    "MODEL.MASK_ON": False,
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 300,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 200,
    "MODEL.RPN.NMS_THRESH": 0.9,
    "MODEL.ANCHOR_GENERATOR.SIZES": "[[20], [24], [28], [32], [40]]",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for part, names in (
        ("train", photo_names(6)),
        ("val", photo_names(3, 6)),
        ("test", photo_names(3, 9)),
    ):
        write_photos(folder, names, f"{part}.json")
    return folder


def words(data, output, *flags, **keys):
    start = ["--config-file", str(CONFIG), "--num-gpus", "0", "--output", str(output)]
    for part in ("train", "val", "test"):
        start += [
            f"--{part}-json",
            str(data / f"{part}.json"),
            f"--{part}-images",
            str(data / "photos"),
        ]
    defaults = [
        "--norms",
        "GN",
        "GW",
        "--rates",
        "0.01",
        "0.02",
        "--iterations",
        "4",
        "--seeds",
        "1",
    ]
    opts = {**OPTS, **FINDS, **{key.replace("__", "."): value for key, value in keys.items()}}
    return [
        *start,
        *defaults,
        *flags,
        "--no-equal-time",
        *(str(word) for pair in opts.items() for word in pair),
    ]


@pytest.mark.parametrize(
    ("flags", "keys", "error", "named"),
    [
        (["--iterations", "0"], {}, ConfigError, "--minutes"),
        (["--iterations", "1"], {}, ConfigError, "--iterations"),
        (["--norms", "GW"], {}, ConfigError, "--norms"),
        (["--norms", "GW", "GW"], {}, ConfigError, "--norms"),
        (["--norms", "GW", "FrozenBN"], {}, PreflightError, "FrozenBN"),  # without weights
        (
            ["--norms", "GN", "BN"],
            {"SOLVER__IMS_PER_BATCH": 1},
            PreflightError,
            "BN: SOLVER.IMS_PER_BATCH",
        ),
        (
            ["--norms", "GN", "GW", "MODEL.MASK_ON", "False", "--jobs", "1"],
            {},
            ConfigError,
            "MODEL.MASK_ON",
        ),
        (["--config-file", "semantic_R_50_FPN_1x_GW"], {}, ConfigError, "detects no objects"),
        (["--rates", "-0.1"], {}, ConfigError, "--rates"),
        (["--rates", "inf"], {}, ConfigError, "--rates"),
        (["--jobs", "0"], {}, ConfigError, "--jobs"),
        (["--num-gpus", "2"], {}, ConfigError, "--num-gpus .* --jobs 2"),
        ([], {"DATASETS__TEST": "()"}, ConfigError, "DATASETS.TEST"),
        (
            [],
            {"DATASETS__TEST": "('custom_val', 'custom_train')"},
            ConfigError,
            "DATASETS.TEST",
        ),
        (
            ["--val-json", "", "--val-fraction", "0.5"],
            {},
            ConfigError,
            "--test-json: needs --val-json",
        ),
        (["--test-json", "none.json"], {}, MissingFileError, "--test-json .*none.json"),
        (
            ["--test-images", "."],
            {},
            PreflightError,
            "--test-json: Dataset .*test.json.* missing",
        ),
    ],
)
def test_refusals_write_nothing(data, tmp_path, flags, keys, error, named):
    with pytest.raises(error, match=named):
        command.main(
            command.get_parser().parse_args(words(data, tmp_path / "out", *flags, **keys))
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("seeds", "least"), [("1", 8), ("5", 19)]
)  # 2 x 3 and 2 x 7 runs of 70 s and more
def test_minutes_include_starts_and_evaluations(data, tmp_path, monkeypatch, seeds, least):
    monkeypatch.setattr(
        run._Runs,
        "_measure",
        lambda self: Costs({"GN": 0.01, "GW": 0.01}, evaluation=60, start=10),
    )
    args = words(
        data, tmp_path / "out", "--iterations", "0", "--minutes", "7", "--seeds", seeds
    )
    with pytest.raises(ConfigError, match=rf"--minutes \(7\).* give {least}"):
        command.main(command.get_parser().parse_args(args))


def test_equal_time_can_be_left_out_later_and_ap_of_0_is_no_comparison(
    data, tmp_path, monkeypatch
):
    def finish(self):
        assert self.plan.lengths("GN") == ([4, 8] if args.equal_time else [4])
        self.results = {job: {"AP": 0.0} for job in self.plan.jobs({}, 1)}

    monkeypatch.setattr(
        run._Runs, "_measure", lambda self: Costs({"GN": 0.1, "GW": 0.2}, evaluation=1, start=1)
    )
    monkeypatch.setattr(run._Runs, "finish", finish)
    args = command.get_parser().parse_args(words(data, tmp_path))
    for args.equal_time in (True, False):
        with pytest.raises(RunError, match="AP is 0"):
            command.main(args)


def test_runs_get_the_gpu_with_the_fewest_runs_and_errors_name_their_cause(
    tmp_path, monkeypatch
):
    runs, (received, sent) = (
        object.__new__(run._Runs),
        os.pipe(),
    )  # without a lock, which a kill may leave locked
    runs.gpus, runs.threads = ["0", "1"], 1
    monkeypatch.setattr(run, "_CONTEXT", multiprocessing.get_context("fork"))
    monkeypatch.setattr(
        run, "run_in_process", lambda work, *rest: (os.write(sent, rest[-1].encode()), work(60))
    )
    processes = [runs._start(time.sleep, tmp_path) for _ in range(2)]
    assert {os.read(received, 1), os.read(received, 1)} == {b"0", b"1"}
    processes[1].kill()
    (tmp_path / job.LOG).write_text("\nError: of an earlier attempt")
    with pytest.raises(RunError, match="signal 9"):
        run._result(tmp_path, processes[1])
    with pytest.raises(RunError, match="__main__"):
        run._result(tmp_path, runs._start(sys.exit, tmp_path))
    assert os.read(received, 1) == b"1"
    run._stop(processes)


@pytest.mark.parametrize(("seconds", "seeds"), [(1.0, 10), (1000.0, 1)])
def test_jobs_run_side_by_side_and_the_time_decides_about_seeds(
    data, tmp_path, monkeypatch, seconds, seeds
):
    fork = multiprocessing.get_context("fork")
    pair = fork.Barrier(2, timeout=60)

    def train(work, folder, threads, gpu, one, *_):
        pair.wait()
        folder.mkdir(parents=True)
        result = {
            "score": "bbox/AP",
            "AP": 1.0,
            "diverged": "",
            "curve": [],
            "seconds": seconds,
        }
        job.write_json(folder / job.RESULT, {**one._asdict(), **result})

    monkeypatch.setattr(run, "_CONTEXT", fork)
    monkeypatch.setattr(run, "run_in_process", train)
    monkeypatch.setattr(
        run._Runs, "_measure", lambda self: Costs({"GN": 0.1, "GW": 0.1}, evaluation=1, start=1)
    )
    flags = ["--iterations", "0", "--seeds", "0", "--minutes", "30", "--jobs", "2", "--auto"]
    command.main(command.get_parser().parse_args(words(data, tmp_path, *flags)))
    assert "ColorJitter" in (tmp_path / run.SETTINGS).read_text()
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["seed"] for line in lines} == set(range(seeds + 1))


def test_checkpoints_stay_until_the_result_is_there(tmp_path, monkeypatch):
    def main(args):
        (tmp_path / "inference").mkdir()
        for name in (
            "model_final.pth",
            "last_checkpoint",
            "inference/instances_predictions.pth",
            "config.yaml",
        ):
            (tmp_path / name).touch()
        raise NonFiniteError("the loss is nan")

    monkeypatch.setattr(job, "main", main)
    found = job.train(tmp_path, Job("GN", 0.1, 1, 4), {}, [])
    assert (found["AP"], found["diverged"], len(list(tmp_path.iterdir()))) == (
        0,
        "the loss is nan",
        4,
    )
    job.write_json(tmp_path / job.RESULT, found)
    for _ in range(2):
        assert job.read_result(tmp_path) == found
        assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", job.RESULT}


def test_a_second_evaluation_after_the_end_is_no_further_point(tmp_path, monkeypatch):
    scores = [
        {"iteration": place, "bbox/AP": ap}
        for place, ap in ((1, 3.0), (3, math.nan), (4, 5.0), (4, 5.0))
    ]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in scores))
    monkeypatch.setattr(job, "main", lambda args: {"bbox": {"AP": 5.0}})
    assert job.train(tmp_path, Job("GN", 0.1, 1, 4), {}, [])["curve"] == [(2, 3.0), (4, 5.0)]


def test_a_run_that_diverged_has_the_curve_of_the_others_score(tmp_path, monkeypatch):
    def main(args):
        raise NonFiniteError("the loss is nan")

    scores = {
        "bbox/AP": 30.0,
        "bbox/AP@300": 50.0,
        "segm/AP": 10.0,
        "segm/AP@300": 20.0,
        "segm/AP75": 5.0,
    }
    (tmp_path / METRICS).write_text(json.dumps({"iteration": 1, **scores}))
    monkeypatch.setattr(job, "main", main)
    found = job.train(tmp_path, Job("GN", 0.1, 1, 4), {}, [])
    assert (found["score"], found["AP"], found["curve"]) == ("segm/AP@300", 0.0, [(2, 20.0)])
    monkeypatch.setattr(job, "main", lambda args: {"bbox": {"AP": 4.0, "AP@300": 7.0}})
    (tmp_path / METRICS).unlink()
    assert job.train(tmp_path, Job("GN", 0.1, 1, 4), {}, [])["AP"] == 7


@pytest.mark.parametrize("changed", ["val.json", "weights.pth"])
def test_a_comparison_of_changed_files_is_not_continued(data, tmp_path, monkeypatch, changed):
    shutil.copy(data / "val.json", tmp_path)
    torch.save({}, tmp_path / "weights.pth")
    places = {"train": data / "train.json", "val": tmp_path / "val.json"}
    parts = {
        part: {part: {"json": str(path), "images": f"{data}/photos"}}
        for part, path in places.items()
    }
    (tmp_path / "datasets.yaml").write_text(yaml.safe_dump(parts))
    monkeypatch.setattr(
        run._Runs, "_measure", lambda self: Costs({"GN": 0.1, "GW": 0.1}, evaluation=1, start=1)
    )
    monkeypatch.setattr(run._Runs, "finish", lambda self: None)
    what = run.Comparison(
        str(CONFIG),
        ["GN", "GW"],
        tmp_path / "out",
        {"datasets": f"{tmp_path}/datasets.yaml", "num_gpus": 0, "ignore_preflight": True},
        [
            str(word)
            for pair in {**OPTS, "MODEL.WEIGHTS": f"{tmp_path}/weights.pth"}.items()
            for word in pair
        ],
        iterations=4,
    )
    for _ in range(2):
        with pytest.raises(RunError, match="all norms failed"):  # no run is finished
            run.compare(what)
    with (tmp_path / changed).open("a") as file:
        file.write(" ")
    with pytest.raises(ConfigError, match="other values of data"):
        run.compare(what)


def test_norms_that_failed_are_left_out(data, tmp_path, monkeypatch):
    def finish(self):
        result = {"score": "bbox/AP", "curve": [], "diverged": "", "seconds": 1.0}
        jobs = [
            job
            for norm in self.plan.norms
            for job in self.plan.runs(norm, 3 if norm != "BN" else 1)
        ]
        self.results = {job: {"AP": 30.0 - len(job.norm), **result} for job in jobs}
        self.failed = {"BN"}

    times = dict.fromkeys(("GN", "GW:iters=3", "BN"), 0.1)
    monkeypatch.setattr(run._Runs, "_measure", lambda self: Costs(times, evaluation=1, start=1))
    monkeypatch.setattr(run._Runs, "finish", finish)
    flags = ["--norms", *times, "--rates", "0.01", "--seeds", "3", "--ignore-preflight"]
    with pytest.raises(RunError, match="BN: a run failed; the other norms are compared"):
        command.main(command.get_parser().parse_args(words(data, tmp_path, *flags)))
    numbers = json.loads((tmp_path / "comparison.json").read_text())
    assert numbers["recommended"]["norm"] == "GN" and "3 seeds" in numbers["advice"]
    assert numbers["norms"]["BN"]["equal iterations"] == {} and numbers["score"] == "bbox/AP"


@pytest.mark.slow
def test_a_comparison_killed_twice_gives_the_same_lines(data, tmp_path):
    def start(folder, *flags):
        command = [
            sys.executable,
            "-m",
            "gw_detectron",
            "compare",
            *words(data, folder, *flags),
        ]
        return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)

    def lines(folder):
        found = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
        return [
            {key: value for key, value in line.items() if key not in ("seconds", "versions")}
            for line in found
        ]

    once, killed = tmp_path / "once", tmp_path / "killed"
    with start(once) as process:
        assert process.wait(1800) == 0
    for count in (1, 3):
        with start(killed, "--jobs", "2") as process:
            while len(list(killed.glob("runs/*/result.json"))) < count:
                assert process.poll() is None
                time.sleep(0.05)
            os.kill(process.pid, signal.SIGKILL)
    with start(killed, "--jobs", "2") as process:
        printed = process.communicate(timeout=600)[0]
    assert process.returncode == 0
    assert lines(killed) == lines(once) and len(lines(once)) == 2 * 2 + 2
    for path in once.glob("runs/*/datasets.yaml"):
        assert ("val.json" if "_s0_" in path.parent.name else "test.json") in path.read_text()
    assert (
        "Page" in printed
        and (killed / "recommended.yaml").exists()
        and not list(killed.rglob("*.pth"))
    )
    (data / "test.json").write_text((data / "test.json").read_text() + " ")
    args = command.get_parser().parse_args(words(data, killed, "--rates", "0.5", "0.01"))
    with pytest.raises(ConfigError, match="rates, data"):
        command.main(args)
