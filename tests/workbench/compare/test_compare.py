"""gw-detectron compare: its refusals, its runs, and one that is killed and continued."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import yaml

from gw_detectron.errors import ConfigError, MissingFileError, PreflightError, RunError
from gw_detectron.weights.recording import software_versions
from gw_detectron.workbench.commands import compare as command
from gw_detectron.workbench.compare import Comparison, processes, running, settings
from gw_detectron.workbench.compare.schedule import LEAST_ITERATIONS
from gw_detectron.workbench.console import errors_reported
from gw_detectron.workbench.run import DatasetFlags, RunRequest

from ...photos import photo_names, write_photos
from ...tiny_run import CONFIG, OPTS, environment, key_words
from .fake_processes import fake_processes

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
DEFAULTS = "--norms GN GW --rates 0.01 0.02 --iterations 4 --seeds 1"
TIMES = {"GN": 0.1, "GW": 0.1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_photos(folder, photo_names(6), "train.json")
    write_photos(folder, photo_names(3, 6), "val.json")
    write_photos(folder, photo_names(3, 9), "test.json")
    return folder


def words(data, output, flags="", **keys):
    start = ["--config-file", str(CONFIG), "--num-gpus", "0", "--output", str(output)]
    for part in ("train", "val", "test"):
        start += [f"--{part}-json", str(data / f"{part}.json")]
        start += [f"--{part}-images", str(data / "photos")]

    opts = {**OPTS, **FINDS}
    for key, value in keys.items():
        opts[key.replace("__", ".")] = value
    pairs = [str(word) for pair in opts.items() for word in pair]
    given = f"{DEFAULTS} {flags} --no-equal-time"
    return [*start, *given.split(), *pairs]


def compare(data, output, flags="", *, equal_time=False, **keys):
    args = command.get_parser().parse_args(words(data, output, flags, **keys))
    args.equal_time = equal_time
    command.main(args)


@pytest.mark.parametrize(
    ("flags", "error", "named"),
    [
        ("--iterations 0", ConfigError, "--minutes"),
        ("--iterations 0 --minutes inf", ConfigError, "--minutes"),
        ("--minutes -5", ConfigError, "--minutes"),
        ("--iterations 1", ConfigError, "--iterations"),
        ("--norms GW", ConfigError, "--norms"),
        ("--norms GW GW", ConfigError, "--norms"),
        ("--norms GW FrozenBN", PreflightError, "FrozenBN"),  # without weights
        ("--norms GN GW MODEL.MASK_ON False --jobs 1", ConfigError, "MODEL.MASK_ON"),
        ("--config-file semantic_R_50_FPN_1x_GW", ConfigError, "no objects"),
        ("--rates -0.1", ConfigError, "--rates"),
        ("--rates inf", ConfigError, "--rates"),
        ("--jobs 0", ConfigError, "--jobs"),
        ("--num-gpus 2", ConfigError, "--num-gpus .* --jobs 2"),
        ("--val-json= --val-fraction 0.5", ConfigError, "--test-json"),
        ("--test-json none.json", MissingFileError, "--test-json .*none.json"),
        ("--test-images .", PreflightError, "--test-json: Dataset .*test.json"),
    ],
)
def test_refused_flags_write_nothing(data, tmp_path, flags, error, named):
    with pytest.raises(error, match=named):
        compare(data, tmp_path / "out", flags)

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "keys", "named"),
    [
        ("--norms GN BN", {"SOLVER__IMS_PER_BATCH": 1}, "BN: SOLVER.IMS_PER_BATCH"),
        ("", {"DATASETS__TEST": "()"}, "DATASETS.TEST"),
        ("", {"DATASETS__TEST": "('custom_val', 'custom_train')"}, "DATASETS.TEST"),
        ("", {"SOLVER__EMA": 1}, "SOLVER.EMA"),
    ],
)
def test_refused_keys_write_nothing(data, tmp_path, flags, keys, named):
    with pytest.raises(ConfigError, match=named):
        compare(data, tmp_path / "out", flags, **keys)

    assert not (tmp_path / "out").exists()


# 2 x 3 and 2 x 7 runs of 70 s and more
@pytest.mark.parametrize(("seeds", "least"), [("1", 8), ("5", 18)])
def test_minutes_include_starts_and_evaluations(
    data, tmp_path, monkeypatch, seeds, least
):
    fake_processes(monkeypatch, {"GN": 0.01, "GW": 0.01}, evaluation=60, start=10)

    with pytest.raises(ConfigError, match=rf"--minutes \(7\).* give {least}"):
        compare(data, tmp_path / "out", f"--iterations 0 --minutes 7 --seeds {seeds}")


def result_lines(folder):
    return [
        json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()
    ]


def test_equal_time_can_be_left_out_later(data, tmp_path, monkeypatch):
    fake_processes(monkeypatch, {"GN": 0.1, "GW": 0.2})
    lengths = []

    for equal_time in (True, False):
        compare(data, tmp_path, equal_time=equal_time)
        scored = [line for line in result_lines(tmp_path) if line["seed"]]
        lengths.append({line["iterations"] for line in scored if line["norm"] == "GN"})

    assert lengths == [{4, 8}, {4}]


def test_ap_of_0_is_no_comparison(data, tmp_path, monkeypatch):
    fake_processes(monkeypatch, TIMES, lambda job: {"AP": 0.0})

    with pytest.raises(RunError, match="AP is 0 in all 4 runs"):
        compare(data, tmp_path)

    assert {line["seed"] for line in result_lines(tmp_path)} == {0}


@pytest.mark.parametrize(("seconds", "seeds"), [(1.0, 10), (1000.0, 1)])
def test_jobs_run_side_by_side_and_the_time_decides_about_seeds(
    data, tmp_path, monkeypatch, seconds, seeds
):
    pair = multiprocessing.get_context("fork").Barrier(2, timeout=60)

    def train(job):
        if job.iterations != LEAST_ITERATIONS:  # which is timed alone
            pair.wait()
        return {"seconds": seconds}

    fake_processes(monkeypatch, TIMES, train)
    compare(data, tmp_path, "--iterations 0 --seeds 0 --minutes 30 --jobs 2 --auto")

    assert "ColorJitter" in (tmp_path / settings.SETTINGS).read_text()
    assert {line["seed"] for line in result_lines(tmp_path)} == set(range(seeds + 1))


@pytest.fixture
def own(data, tmp_path):
    """A comparison on a copy of the data, split by a datasets.yaml; and its folder."""
    folder = tmp_path / "own"
    shutil.copytree(data, folder)
    torch.save({}, folder / "weights.pth")
    _write_datasets(folder, val_fraction=0.4)
    opts = {**OPTS, "MODEL.WEIGHTS": f"{folder}/weights.pth"}
    base = RunRequest(
        str(CONFIG),
        tuple(key_words(opts)),
        num_gpus=0,
        ignore_preflight=True,
        data=DatasetFlags(datasets=f"{folder}/datasets.yaml"),
    )
    what = Comparison(base, ["GN", "GW"], tmp_path / "out", iterations=4)
    return what, folder


def _write_datasets(folder, images="photos", **fields):
    dataset = {"json": f"{folder}/train.json", "images": f"{folder}/{images}", **fields}
    text = yaml.safe_dump({"train": {"own_train": dataset}})
    (folder / "datasets.yaml").write_text(text)


def _move_photos(folder):
    (folder / "photos").rename(folder / "moved")
    _write_datasets(folder, "moved", val_fraction=0.4)


def _change_pixels(folder):
    for photo in (folder / "photos").iterdir():
        photo.write_bytes(photo.read_bytes() + b" ")


def _correct_labels(folder):
    path = folder / "train.json"
    content = json.loads(path.read_text())
    for annotation in content["annotations"]:
        annotation["bbox"][0] += 1
    path.write_text(json.dumps(content))


def _append_to_weights(folder):
    with (folder / "weights.pth").open("a") as file:
        file.write(" ")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_move_photos, "'own_train', folder of the images"),
        (_change_pixels, "'own_val', image files"),
        (_correct_labels, "'own_train', annotations"),
        (_append_to_weights, "the file of MODEL.WEIGHTS"),
        (
            lambda folder: _write_datasets(folder, val_fraction=0.8),
            "'own_val', annotations",
        ),
    ],
)
def test_a_comparison_of_changed_data_is_not_continued(own, monkeypatch, change, named):
    what, folder = own
    fake_processes(monkeypatch, TIMES)
    first = running.compare(what)
    assert running.compare(what) == first

    change(folder)

    with pytest.raises(ConfigError, match=named):
        running.compare(what)


def test_changed_keys_and_versions_are_named_with_their_values(own, monkeypatch):
    what, _ = own
    fake_processes(monkeypatch, TIMES)
    running.compare(what)
    versions = {**software_versions(), "torch": "9"}
    monkeypatch.setattr(settings, "software_versions", lambda: versions)
    base = replace(what.base, opts=(*what.base.opts, "SOLVER.MOMENTUM", "0.5"))

    with pytest.raises(ConfigError) as refused:
        running.compare(replace(what, base=base))

    assert "key SOLVER.MOMENTUM (0.9 -> 0.5)" in str(refused.value)
    assert "version of torch (" in str(refused.value)


def test_norms_that_failed_are_left_out(data, tmp_path, monkeypatch):
    def train(job):
        if job.norm == "BN":
            raise SystemExit(1)
        return {"AP": 30.0 - len(job.norm)}

    norms = ["GN", "GW:iters=3", "BN"]
    fake_processes(monkeypatch, dict.fromkeys(norms, 0.1), train)
    flags = f"--norms {' '.join(norms)} --rates 0.01 --seeds 3 --ignore-preflight"
    with pytest.raises(RunError, match="BN"):
        compare(data, tmp_path, flags)

    numbers = json.loads((tmp_path / "comparison.json").read_text())
    assert numbers["recommended"]["norm"] == "GN"
    assert "3 seeds" in numbers["advice"]
    assert numbers["norms"]["BN"]["equal iterations"] == {}
    assert numbers["score"] == "bbox/AP"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_says_how_to_continue(
    data, tmp_path, monkeypatch, capsys, number
):
    def interrupt(*_):
        signal.raise_signal(number)

    fake_processes(monkeypatch, TIMES)
    monkeypatch.setattr(processes.Processes, "start", interrupt)

    with pytest.raises(SystemExit) as stopped, errors_reported():
        compare(data, tmp_path)

    assert "The same command continues" in capsys.readouterr().err
    assert stopped.value.code == 128 + number


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
        return subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, text=True
        )

    def lines(folder):
        found = result_lines(folder)
        for line in found:
            del line["seconds"], line["versions"]
        return found

    once = tmp_path / "once"
    killed = tmp_path / "killed"
    with start(once) as process:
        assert process.wait(1800) == 0
    for count in (1, 3):
        with start(killed, "--jobs 2") as process:
            while len(list(killed.glob("runs/*/result.json"))) < count:
                assert process.poll() is None
                time.sleep(0.05)
            os.kill(process.pid, signal.SIGKILL)
    with start(killed, "--jobs 2") as process:
        printed = process.communicate(timeout=600)[0]

    assert process.returncode == 0
    assert lines(killed) == lines(once)
    assert len(lines(once)) == 2 * 2 + 2
    for path in once.glob("runs/*/datasets.yaml"):
        scored_on = "val.json" if "_s0_" in path.parent.name else "test.json"
        assert scored_on in path.read_text()
    assert "Page" in printed
    assert (killed / "recommended.yaml").exists()
    assert not list(killed.rglob("*.pth"))

    test_json = data / "test.json"
    labels = json.loads(test_json.read_text())
    labels["annotations"].pop()
    test_json.write_text(json.dumps(labels))
    with pytest.raises(ConfigError, match="--rates .*--test-json"):
        compare(data, killed, "--rates 0.5 0.01")
