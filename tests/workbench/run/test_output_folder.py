"""The output folder: one training at a time, metrics after a kill, what a new run deletes and what stays."""

import errno
import fcntl
import json
import os
import signal

import pytest
import torch

from gw_detectron.errors import ConfigError, PreflightError, PreflightReport, UserError
from gw_detectron.weights import LazyCheckpoint
from gw_detectron.weights.opening import local_file
from gw_detectron.workbench.run import folder as output_folder
from gw_detectron.workbench.run import main, start
from gw_detectron.workbench.run.folder import (
    check_output,
    clear_output,
    lock_output,
    read_metrics,
)
from gw_detectron.workbench.run.start import start_run
from gw_detectron.workbench.run.train import run_config

from ...tiny_run import arguments
from ..reliability.forked_run import STEP, child, training

SHORT = {"SOLVER__MAX_ITER": 1, "SOLVER__STEPS": "()", "DATASETS__TEST": "()"}


def hold(folder):
    """A function for a child that holds the lock until it is ended."""

    def work(report):
        lock = lock_output(str(folder))
        report("locked")
        signal.pause()
        lock.close()

    return work


def test_a_second_training_is_refused_before_it_writes_anything(tmp_path, small_dataset):
    output = tmp_path / "run"
    with child(
        training(arguments(output, SOLVER__MAX_ITER=500, SOLVER__STEPS="()")), tmp_path / "log"
    ) as first:
        assert first.wait_for(STEP)
        config = (output / "config.yaml").read_bytes()
        with pytest.raises(
            UserError, match=rf"OUTPUT_DIR \('.*run'\): .*process {first.pid}, since 20"
        ):
            main(arguments(output, SOLVER__BASE_LR=0.0123))
        assert (output / "config.yaml").read_bytes() == config
        assert "0.0123" not in (output / "log.txt").read_text()
        first.send(signal.SIGKILL)
        first.wait()
    for _ in range(2):  # a killed run holds no lock, and a finished one neither
        main(arguments(output, "--overwrite", **SHORT))
    with child(hold(output), tmp_path / "log") as other:
        assert other.wait_for("locked")
        assert main(arguments(output, "--eval-only", "--resume"))  # may run beside a training


def test_a_checkpoint_to_continue_from_is_chosen_under_the_lock(
    tmp_path, small_dataset, monkeypatch
):
    main(arguments(tmp_path, **SHORT))
    opened = []
    monkeypatch.setattr(
        start, "open_start_weights", lambda *args, **kwargs: opened.append(args)
    )
    with child(hold(tmp_path), tmp_path / "log") as other:
        assert other.wait_for("locked")
        with pytest.raises(UserError, match="another training"):
            main(arguments(tmp_path, "--resume", **SHORT))
    assert not opened


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    lock_output(str(tmp_path)).close()
    assert "its file system has no locks" in caplog.text


def test_metrics_of_a_killed_and_resumed_run_are_in_order(tmp_path):
    path = tmp_path / "metrics.json"
    assert read_metrics(path) == []
    lines = [
        {"iteration": 1, "AP": 3.0},
        {"iteration": 3, "AP": 2.0, "loss": 2.0},
        {"iteration": 3, "loss": 1.0},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"iteration": 4, "lo')
    assert read_metrics(path) == [lines[0], {**lines[1], **lines[2]}]
    path.write_bytes(
        b'{"time": 1}\n[1]\n{"iteration": 3, "lr": 0.1}\n\xff\xfe\n'
    )  # of other software
    assert read_metrics(path) == [{"iteration": 3, "lr": 0.1}]


@pytest.fixture
def earlier(tmp_path):
    """A folder with the files of a run, and files of the user."""
    files = (
        "model_final.pth",
        "model_0000009.pth",
        "metrics.json",
        "log.txt",
        "log.txt.rank1",
        "config.yaml",
    )
    folders = (
        "inference/coco_instances_results.json",
        "inference/config.yaml",
        "inference_TTA/a",
        "report/report.html",
    )
    for name in (*files, *folders, "events.out.tfevents.1", "notes.txt", "weights.pth"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("earlier")
    (tmp_path / "last_checkpoint").write_text("model_final.pth")
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("address", ["{}", "{}?matching_heuristics=True"])
def test_the_files_of_a_run_are_deleted_and_no_others(earlier, address):
    weights = local_file(address.format(earlier / "model_0000009.pth"))
    later = clear_output(str(earlier), everything=True, needed=weights)
    assert {"model_final.pth", "inference", "report", "log.txt.earlier"} < {*names(earlier)}
    assert "log.txt" not in names(earlier)
    output_folder.remove_files(later)
    assert names(earlier) == ["config.yaml", "model_0000009.pth", "notes.txt", "weights.pth"]


def test_a_new_run_deletes_the_metrics_and_the_earlier_evaluation(earlier):
    """Metrics are appended to; a report would judge the predictions by the dataset and weights of the earlier one."""
    before = names(earlier)
    for name in ("mine_coco_format.json", "mine_coco_format.json.lock", "other.json"):
        (earlier / "inference" / name).touch()
    clear_output(str(earlier), metrics=True, needed=str(earlier / "inference" / "config.yaml"))
    assert set(before) - set(names(earlier)) == {"metrics.json"}
    assert names(earlier / "inference") == ["config.yaml", "other.json"]
    clear_output(str(earlier))
    assert names(earlier / "inference") == ["other.json"]
    clear_output(str(earlier / "none"), everything=True)
    clear_output("s3://bucket/run", everything=True)


def test_nothing_is_deleted_if_the_run_reads_a_file_that_cannot_stay(earlier):
    """A folder's, or the best weights, which commands would take for the new run's."""
    (earlier / "model_best.pth").touch()
    before = names(earlier)
    with pytest.raises(ConfigError, match=r"--overwrite: .*model_best.pth"):
        clear_output(str(earlier), everything=True, needed=str(earlier / "model_best.pth"))
    with pytest.raises(ConfigError, match=r"--overwrite: .*inference/config.yaml"):
        clear_output(
            str(earlier), everything=True, needed=str(earlier / "inference" / "config.yaml")
        )
    assert names(earlier) == before and names(earlier / "inference") == [
        "coco_instances_results.json",
        "config.yaml",
    ]


@pytest.mark.parametrize("resume", [True, False])
def test_a_link_to_a_checkpoint_that_was_moved_away(tmp_path, resume):
    (tmp_path / "model_final.pth").symlink_to(tmp_path / "gone.pth")
    check_output(
        str(tmp_path), LazyCheckpoint(), report := PreflightReport(), resume=resume, keeps=True
    )
    assert resume is any("there is no other checkpoint" in error for error in report.errors)


@pytest.mark.parametrize("name", ["model_best.pth", "model_final.pth", "last_checkpoint"])
def test_a_run_that_crashed_before_its_first_checkpoint_is_not_mixed_with_another_one(
    tmp_path, name
):
    (tmp_path / name).touch()
    check_output(
        str(tmp_path), LazyCheckpoint(), report := PreflightReport(), resume=False, keeps=True
    )
    assert any("--overwrite" in error for error in report.errors)


@pytest.mark.parametrize(
    "late",
    [{"SOLVER__LR_SCHEDULER_NAME": "Other"}, {"TRACKER": "other"}, {"MODEL__WEIGHTS": "w.pth"}],
)
def test_a_run_that_is_refused_while_it_is_built_leaves_the_checkpoints(
    earlier, small_dataset, monkeypatch, late
):
    monkeypatch.chdir(earlier)
    torch.save(
        {"model": {"backbone.bottom_up.stem.conv1.weight": torch.zeros(64, 3, 7, 7)}}, "w.pth"
    )
    before = {
        path.name: path.read_text()
        for path in earlier.iterdir()
        if path.is_file() and path.suffix != ".pth"
    }
    with pytest.raises((ValueError, ImportError)):
        main(arguments(earlier, "--overwrite", **SHORT, **late))
    assert {name: (earlier / name).read_text() for name in before} == before
    assert (earlier / "model_final.pth").read_text() == "earlier" and not list(
        earlier.glob("*.earlier")
    )


@pytest.mark.parametrize("flags", [[], ["--eval-only"]])
def test_the_config_is_replaced_as_a_whole(tmp_path, small_dataset, flags):
    """A kill or a full disk must not leave half a config."""
    path = tmp_path / ("inference/config.yaml" if flags else "config.yaml")
    cfg = run_config(arguments(tmp_path, *flags, SOLVER__BASE_LR=0.1))
    start_run(cfg, eval_only=bool(flags), ignore_preflight=True)[1].close()
    os.link(path, tmp_path / "earlier.yaml")
    cfg = run_config(arguments(tmp_path, *flags, SOLVER__BASE_LR=0.2))
    start_run(cfg, eval_only=bool(flags), ignore_preflight=True)[1].close()
    assert (
        "BASE_LR: 0.1" in (tmp_path / "earlier.yaml").read_text()
        and "BASE_LR: 0.2" in path.read_text()
    )


def test_a_finished_run_is_replaced_only_on_request(tmp_path, one_thread, small_dataset):
    main(arguments(tmp_path, **{**SHORT, "SOLVER__MAX_ITER": 2}))
    checkpoint = (tmp_path / "model_final.pth").read_bytes()
    with pytest.raises(
        PreflightError, match=r"checkpoints of an earlier run. Fix: .*--overwrite"
    ):
        main(arguments(tmp_path, **SHORT))
    for flag in ("--resume", "--eval-only"):
        with pytest.raises(ConfigError, match=rf"--overwrite: given together with {flag}"):
            main(arguments(tmp_path, "--overwrite", flag, **SHORT))
    assert (tmp_path / "model_final.pth").read_bytes() == checkpoint
    again = arguments(tmp_path, "--overwrite", **SHORT)
    again.config_file = str(tmp_path / "config.yaml")  # of the run that is replaced
    main(again)
    records = [
        json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()
    ]
    assert {record["iteration"] for record in records} == {0}
    assert not (tmp_path / "model_0000001.pth").exists()


def test_an_output_folder_that_is_a_file_is_named(tmp_path, small_dataset):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"OUTPUT_DIR \('.*file'\)"):
        main(arguments(tmp_path / "file"))
