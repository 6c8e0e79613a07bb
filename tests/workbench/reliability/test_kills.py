"""SIGKILL at random moments loses nothing; KILLS=30 tries more of them.

A training is killed in steps, checkpoint writes and evaluations, and resumed until its end. After each kill
last_checkpoint names a complete file, the resumed run continues there and removes unfinished files, and the final state
equals that of an uninterrupted run bit for bit.
"""

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from gw_detectron.weights import read_weights_file

from ...tiny_run import arguments
from .forked_run import CHECKPOINT, EVALUATION, STEP, child, training

KILLS = int(os.environ.get("KILLS", "6"))
ITERATIONS = 20
#: seconds of a phase, to choose a moment in it
LONGEST = {STEP: 0.2, CHECKPOINT: 0.15, EVALUATION: 0.5}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_dataset", "one_thread")]


def train(folder: Path, kill: str, moments: random.Random, start: int) -> bool:
    """Start or resume a training and kill it in a phase; return whether it ended by itself."""
    schedule = {
        "SOLVER__MAX_ITER": ITERATIONS,
        "SOLVER__STEPS": "(10,)",
        "SOLVER__CHECKPOINT_PERIOD": 2,
        "TEST__EVAL_PERIOD": 5,
    }
    log = folder.with_suffix(".txt")
    log.unlink(missing_ok=True)

    with child(training(arguments(folder, "--resume", **schedule)), log) as run:
        if start < ITERATIONS:  # otherwise only the last evaluation is left to do
            assert run.wait_for(STEP), run.output()
            assert f"Starting training from iteration {start}\n" in run.output()
            unfinished = [path.name for path in folder.glob(".*.tmp")]
            assert all(f".{run.pid}." in name for name in unfinished)

        if kill and run.wait_for(kill, moments.randint(1, 3)):
            time.sleep(moments.uniform(0, LONGEST[kill]))
            run.kill()
        assert run.wait() in (0, -9), run.output()
    return run.status == 0


def newest_checkpoint(folder: Path) -> dict:
    """Read the file that last_checkpoint names, and remove the others."""
    name = (folder / "last_checkpoint").read_text()
    for path in folder.glob("model_*.pth"):
        if path.name != name:
            path.unlink()
    checkpoint = read_weights_file(folder / name).value
    assert all(value.isfinite().all() for value in checkpoint["model"].values())
    return checkpoint


def run_alone() -> None:
    """Run this file in a fresh process: no fork works where a test has started autograd's threads."""
    clean = {name: value for name, value in os.environ.items() if "PYTEST_" not in name}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", __file__]
    subprocess.run(command, env=clean, check=True)


def test_a_killed_training_loses_nothing(tmp_path):
    if "PYTEST_XDIST_WORKER" in os.environ:
        run_alone()
        return

    moments = random.Random(3)
    kills = Counter()
    train(tmp_path / "uninterrupted", "", moments, start=0)
    expected = newest_checkpoint(tmp_path / "uninterrupted")

    folder, start = tmp_path / "killed", 0
    while kills.total() < KILLS or start:
        kind = ""
        if kills.total() < KILLS:
            kind = min(LONGEST, key=lambda kind: (kills[kind], moments.random()))
        ended = train(folder, kind, moments, start)
        kills[kind] += not ended

        if start or ended or (folder / "last_checkpoint").exists():
            found = newest_checkpoint(folder)
            assert found["iteration"] + 1 >= start
            start = found["iteration"] + 1

        if ended:
            assert start == ITERATIONS
            assert_equal(found["model"], expected["model"])
            assert_equal(found["trainer"]["_trainer"], expected["trainer"]["_trainer"])
            shutil.rmtree(folder)
            start = 0


def assert_equal(state: dict, expected: dict) -> None:
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
