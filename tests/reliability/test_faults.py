"""Runs on a full disk."""

import subprocess

import pytest

from gw_detectron.weights import read_weights_file

from ..tiny_run import arguments
from .forked_run import STEP, child, training


@pytest.fixture
def disk(tmp_path):
    """Mount a small disk; return its folder and a function to remount it."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> None:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, timeout=20
        )
        if done.returncode:
            pytest.skip(f"needs to mount a tmpfs: {done.stderr.strip()}")

    try:
        mount("size=150m")
    except FileNotFoundError:
        pytest.skip("needs mount")
    yield folder, mount
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def train(tmp_path, output, *flags, **overrides):
    """Train in a child; return its exit status, output and number of steps."""
    (tmp_path / "log").unlink(missing_ok=True)
    with child(training(arguments(output, *flags, DATASETS__TEST="()", **overrides)), tmp_path / "log") as run:
        return run.wait(), run.output(), run.count(STEP)


@pytest.mark.slow
def test_a_run_on_a_full_disk_ends_with_a_sentence_and_resumes_with_more_space(small_dataset, disk, tmp_path):
    folder, mount = disk
    schedule = {"SOLVER__MAX_ITER": 6, "SOLVER__STEPS": "()", "SOLVER__CHECKPOINT_PERIOD": 1}
    status, said, steps = train(tmp_path, folder / "run", **schedule)
    assert status == 1 and 1 < steps < 6, said
    failed = folder / "run" / f"model_{steps - 1:07d}.pth"
    assert str(failed) in said and "No space left on device" in said and "Traceback" not in said
    last = (folder / "run" / "last_checkpoint").read_text()
    assert last == f"model_{steps - 2:07d}.pth"
    assert read_weights_file(folder / "run" / last).value["iteration"] == steps - 2
    assert not list((folder / "run").glob(".*.tmp"))
    mount("remount,size=1g")
    status, said, _ = train(tmp_path, folder / "run", "--resume", **schedule)
    assert status == 0 and f"Starting training from iteration {steps - 1}" in said
