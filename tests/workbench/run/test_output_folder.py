"""The output folder: one training at a time, metrics after a kill, files of an earlier run."""

import errno
import fcntl
import json
import os
import shutil
import signal

import pytest
import torch

from gw_detectron.errors import CheckReport, ConfigError, PreflightError, UserError
from gw_detectron.weights import LazyCheckpoint
from gw_detectron.weights.opening import last_checkpoint, local_file
from gw_detectron.workbench.commands.train import run_here as main
from gw_detectron.workbench.run import start
from gw_detectron.workbench.run.folder import (
    check_output,
    lock_output,
    read_metrics,
    remove_files,
    stale_output,
)
from gw_detectron.workbench.run.start import open_run

from ...tiny_run import arguments, config_of
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


def test_a_second_training_is_refused_before_it_writes_anything(
    tmp_path, small_dataset
):
    output = tmp_path / "run"
    long = training(arguments(output, SOLVER__MAX_ITER=500, SOLVER__STEPS="()"))
    with child(long, tmp_path / "log") as first:
        assert first.wait_for(STEP)
        config = (output / "config.yaml").read_bytes()

        with pytest.raises(UserError, match=rf"'.*run'.*process {first.pid}, since 20"):
            main(arguments(output, SOLVER__BASE_LR=0.0123))

        assert (output / "config.yaml").read_bytes() == config
        assert "0.0123" not in (output / "log.txt").read_text()
        first.send(signal.SIGKILL)
        first.wait()

    for _ in range(2):  # a killed run holds no lock, and a finished one neither
        main(arguments(output, "--overwrite", **SHORT))


def test_only_the_last_checkpoints_stay(tmp_path, small_dataset):
    keys = {"SOLVER__KEEP": 1, "SOLVER__CHECKPOINT_PERIOD": 1, "DATASETS__TEST": "()"}
    main(arguments(tmp_path, **keys))
    names = {path.name for path in tmp_path.glob("*.pth")}
    assert names == {"model_0000002.pth", "model_final.pth"}

    copy = "model_0000001_paper.pth"  # of the user
    shutil.copy(tmp_path / "model_0000002.pth", tmp_path / copy)
    main(arguments(tmp_path, "--resume", SOLVER__MAX_ITER=5, **keys))
    names = {path.name for path in tmp_path.glob("*.pth")}
    assert names == {"model_0000004.pth", "model_final.pth", copy}


def test_an_evaluation_beside_a_training_needs_another_folder(tmp_path, small_dataset):
    """Both write their predictions to the folder inference."""
    output = tmp_path / "run"
    main(arguments(output, **SHORT))
    evaluation = arguments(output, "--eval-only", "--resume")
    weights = output / "model_final.pth"

    with child(hold(output), tmp_path / "log") as other:
        assert other.wait_for("locked")
        with pytest.raises(UserError, match=r"another run .* give another OUTPUT_DIR"):
            main(evaluation)
        assert main(
            arguments(tmp_path / "other", "--eval-only", MODEL__WEIGHTS=weights)
        )

    assert main(evaluation)


def test_a_checkpoint_to_continue_from_is_chosen_under_the_lock(
    tmp_path, small_dataset, monkeypatch
):
    main(arguments(tmp_path, **SHORT))
    opened = []
    monkeypatch.setattr(start, "open_start_weights", lambda *args: opened.append(args))

    with child(hold(tmp_path), tmp_path / "log") as other:
        assert other.wait_for("locked")
        with pytest.raises(UserError, match="another run"):
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
    lines = [
        {"iteration": 1, "AP": 3.0},
        {"iteration": 3, "AP": 2.0, "loss": 2.0},
        {"iteration": 3, "loss": 1.0},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"iteration": 4, "lo')

    assert read_metrics(path) == [
        {"iteration": 1, "AP": 3.0},
        {"iteration": 3, "AP": 2.0, "loss": 1.0},
    ]


def test_metrics_of_other_software_are_skipped(tmp_path):
    path = tmp_path / "metrics.json"
    assert read_metrics(path) == []

    path.write_bytes(b'{"time": 1}\n[1]\n{"iteration": 3, "lr": 0.1}\n\xff\xfe\n')
    assert read_metrics(path) == [{"iteration": 3, "lr": 0.1}]


@pytest.mark.parametrize("value", ["9" * 400, "9" * 5000, "[" * 5000 + "]" * 5000])
def test_metrics_that_cannot_be_read_or_plotted_are_skipped(tmp_path, value):
    path = tmp_path / "metrics.json"
    path.write_text(f'{{"iteration": 1, "lr": {value}}}\n{{"iteration": 2, "lr": 7}}\n')

    assert read_metrics(path) == [{"iteration": 2, "lr": 7}]


EARLIER = (
    "config.yaml",
    "events.out.tfevents.1",
    "inference/coco_instances_results.json",
    "inference/config.yaml",
    "inference_TTA/a",
    "log.txt",
    "log.txt.rank1",
    "metrics.json",
    "model_0000009.pth",
    "model_final.pth",
    "notes.txt",  # of the user
    "report/report.html",
    "weights.pth",  # of the user
)


@pytest.fixture
def earlier(tmp_path):
    """A folder with the files of a run, and files of the user."""
    for name in EARLIER:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("earlier")
    (tmp_path / "last_checkpoint").write_text("model_final.pth")
    return tmp_path


def test_a_linked_folder_is_not_emptied(earlier, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "kept").write_text("")
    folder = earlier / "inference_mixed"
    folder.symlink_to(elsewhere)

    remove_files([folder])

    assert not folder.exists()
    assert (elsewhere / "kept").exists()


def begin_run(cfg, eval_only):
    run = open_run(cfg, eval_only=eval_only, ignore_preflight=True)
    with run.lock:
        if not eval_only:
            run.begin()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def clear(folder, **options):
    stale = stale_output(str(folder), **options)
    remove_files(stale)


@pytest.mark.parametrize("address", ["{}", "{}?matching_heuristics=True"])
def test_the_files_of_a_run_are_deleted_and_no_others(earlier, address):
    weights = local_file(address.format(earlier / "model_0000009.pth"))
    before = names(earlier)

    stale = stale_output(str(earlier), everything=True, needed=[weights])
    assert names(earlier) == before

    remove_files(stale)
    assert names(earlier) == [
        "config.yaml",
        "log.txt",
        "log.txt.rank1",
        "metrics.json",
        "model_0000009.pth",
        "notes.txt",
        "weights.pth",
    ]
    assert (earlier / "metrics.json").read_text() == ""


def test_a_new_run_deletes_metrics_and_events_and_the_earlier_evaluation(earlier):
    """A report or TensorBoard would take them for its own."""
    inference = earlier / "inference"
    for name in ("mine_coco_format.json", "mine_coco_format.json.lock", "other.json"):
        (inference / name).touch()
    before = names(earlier)

    clear(earlier, metrics=True, needed=[str(inference / "config.yaml")])
    before.remove("events.out.tfevents.1")
    assert names(earlier) == before
    assert (earlier / "metrics.json").read_text() == ""
    assert names(inference) == ["config.yaml", "other.json"]

    clear(earlier)
    assert names(inference) == ["other.json"]


@pytest.mark.parametrize(
    ("present", "kept"),
    [
        # a folder of the user, where no run was
        ([], ["report/thesis.tex", "inference/server.py", "model_notes.pth"]),
        (["config.yaml"], ["report/thesis.tex", "inference/server.py"]),
        # a run without a report
        (["config.yaml", "log.txt"], ["report/thesis.tex", "model_notes.pth"]),
        (["model_final.pth", "log.txt"], ["report/thesis.tex", "model_0000001_a.pth"]),
    ],
)
def test_files_that_no_run_wrote_stay(tmp_path, present, kept):
    for name in (*present, *kept):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("the user's")

    clear(tmp_path, everything=True)

    for name in kept:
        assert (tmp_path / name).read_text() == "the user's"


@pytest.mark.parametrize("folder", ["none", "s3://bucket/run"])
def test_a_folder_without_a_run_has_no_stale_files(folder):
    assert stale_output(folder, everything=True) == []


@pytest.mark.parametrize("name", ["model_best.pth", "inference/config.yaml"])
def test_nothing_is_deleted_if_the_run_reads_a_file_that_cannot_stay(earlier, name):
    """A folder's, or the best weights, which commands would take for the new run's."""
    (earlier / "model_best.pth").touch()
    before = sorted(earlier.rglob("*"))

    with pytest.raises(ConfigError, match=f"--overwrite: .*{name}"):
        stale_output(str(earlier), everything=True, needed=[str(earlier / name)])

    assert sorted(earlier.rglob("*")) == before


def test_a_kill_while_a_run_is_replaced_leaves_no_checkpoint_beside_a_new_config(
    earlier, small_dataset
):
    (earlier / "datasets.yaml").mkdir()  # the record of the datasets cannot be written
    run = open_run(config_of(arguments(earlier, **SHORT)), overwrite=True)

    with run.lock, pytest.raises(OSError, match="datasets.yaml"):
        run.begin()

    assert not (earlier / "config.yaml").exists()
    assert not list(earlier.glob("model_*.pth"))
    assert not (earlier / "last_checkpoint").exists()


def test_finished_work_is_not_replaced_by_a_run_that_ignores_the_checks(
    earlier, small_dataset
):
    before = {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()}

    with pytest.raises(PreflightError, match="--overwrite"):
        main(arguments(earlier, "--ignore-preflight", **SHORT))

    after = {path: path.read_bytes() for path in before}
    assert after == before


def output_errors(folder, resume):
    report = CheckReport()
    check_output(str(folder), LazyCheckpoint(), report, resume=resume, keeps=True)
    return report.errors


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["inference", "datasets", "inference_TTA"])
def test_a_link_to_a_folder_that_is_gone_is_refused_before_a_run(
    earlier, small_dataset, name, overwrite
):
    shutil.rmtree(earlier / name, ignore_errors=True)
    (earlier / name).symlink_to(earlier / "unmounted")
    before = names(earlier)
    flags = ["--overwrite"] if overwrite else []

    with pytest.raises(
        PreflightError, match=rf"'.*/{name}' is a link to '.*unmounted'"
    ):
        main(arguments(earlier, *flags, **SHORT))

    assert set(names(earlier)) == {*before, ".training.lock"}
    (earlier / "unmounted").mkdir()
    assert "unmounted" not in str(output_errors(earlier, resume=False))


@pytest.mark.parametrize("options", [{"metrics": True}, {"everything": True}])
def test_linked_metrics_are_not_emptied(earlier, tmp_path_factory, options):
    """The trainer has opened the target when the run begins."""
    target = tmp_path_factory.mktemp("elsewhere") / "metrics.json"
    (earlier / "metrics.json").rename(target)
    (earlier / "metrics.json").symlink_to(target)

    with pytest.raises(ConfigError, match=rf"is a link.*'{target}'.* Fix: "):
        clear(earlier, **options)

    assert target.read_text() == "earlier"
    clear(earlier)  # a resumed run goes on there


def test_a_link_to_a_checkpoint_that_was_moved_away(tmp_path):
    (tmp_path / "model_final.pth").symlink_to(tmp_path / "gone.pth")

    assert output_errors(tmp_path, resume=False) == []
    (error,) = output_errors(tmp_path, resume=True)
    assert "start again with --overwrite" in error


@pytest.mark.parametrize("name", ["R-50.pth", "model_0000009_of_other_run.pth"])
def test_weights_of_the_user_in_the_folder_are_no_run_to_resume(tmp_path, name):
    (tmp_path / name).touch()

    assert last_checkpoint(str(tmp_path)) == ""
    assert output_errors(tmp_path, resume=True) == []


@pytest.mark.parametrize(
    "name", ["model_best.pth", "model_final.pth", "last_checkpoint"]
)
def test_a_run_that_crashed_before_its_first_checkpoint_is_not_mixed_with_another_one(
    tmp_path, name
):
    (tmp_path / name).touch()
    (error,) = output_errors(tmp_path, resume=False)
    assert "--overwrite" in error


@pytest.mark.parametrize(
    "late",
    [
        {"SOLVER__LR_SCHEDULER_NAME": "Other"},
        {"MODEL__WEIGHTS": "w.pth"},
    ],
)
def test_a_run_that_is_refused_while_it_is_built_leaves_the_checkpoints(
    earlier, small_dataset, monkeypatch, late
):
    monkeypatch.chdir(earlier)
    stem = {"backbone.bottom_up.stem.conv1.weight": torch.zeros(64, 3, 7, 7)}
    torch.save({"model": stem}, "w.pth")
    written = ("log.txt", "metrics.json")
    kept = [
        path
        for path in earlier.iterdir()
        if path.is_file() and path.name not in written
    ]
    before = [path.read_bytes() for path in kept]

    with pytest.raises((ValueError, ImportError)):
        main(arguments(earlier, "--overwrite", **SHORT, **late))

    assert [path.read_bytes() for path in kept] == before
    for name in written:
        assert (earlier / name).read_text().startswith("earlier")


@pytest.mark.parametrize("eval_only", [False, True])
def test_the_config_is_replaced_as_a_whole(tmp_path, small_dataset, eval_only):
    """A kill or a full disk must not leave half a config."""
    path = tmp_path / ("inference/config.yaml" if eval_only else "config.yaml")
    first = config_of(arguments(tmp_path, SOLVER__BASE_LR=0.1))
    second = config_of(arguments(tmp_path, SOLVER__BASE_LR=0.2))

    begin_run(first, eval_only)
    os.link(path, tmp_path / "earlier.yaml")
    begin_run(second, eval_only)

    assert "BASE_LR: 0.1" in (tmp_path / "earlier.yaml").read_text()
    assert "BASE_LR: 0.2" in path.read_text()


def test_a_finished_run_is_replaced_only_on_request(
    tmp_path, one_thread, small_dataset
):
    main(arguments(tmp_path, **{**SHORT, "SOLVER__MAX_ITER": 2}))
    checkpoint = (tmp_path / "model_final.pth").read_bytes()

    with pytest.raises(PreflightError, match="--overwrite"):
        main(arguments(tmp_path, **SHORT))
    for flag in ("--resume", "--eval-only"):
        with pytest.raises(ConfigError, match=f"--overwrite: .*{flag}"):
            main(arguments(tmp_path, "--overwrite", flag, **SHORT))
    assert (tmp_path / "model_final.pth").read_bytes() == checkpoint

    again = arguments(tmp_path, "--overwrite", **SHORT)
    again.config_file = str(tmp_path / "config.yaml")  # of the run that is replaced
    main(again)
    records = read_metrics(tmp_path / "metrics.json")
    assert [record["iteration"] for record in records] == [0]
    assert not (tmp_path / "model_0000001.pth").exists()


def test_an_output_folder_that_is_a_file_is_named(tmp_path, small_dataset):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(
        UserError, match=rf"OUTPUT_DIR \('{path}'\): .* give another OUTPUT_DIR"
    ):
        main(arguments(path))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("caf\udce9", "not UTF-8, which TensorBoard needs"),
        ("run?1", "'\\?' begins options of an address"),
    ],
)
def test_an_output_folder_of_a_wrong_name_is_refused(
    tmp_path, small_dataset, name, reason
):
    path = tmp_path / name
    with pytest.raises(PreflightError, match=reason):
        main(arguments(path))
    assert not path.exists()
