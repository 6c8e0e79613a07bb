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
LONGEST = {
    STEP: 0.2,
    CHECKPOINT: 0.15,
    EVALUATION: 0.5,
}  # seconds of a phase, to choose a moment in it

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_dataset", "one_thread")]


def train(folder: Path, kill: str, moments: random.Random, start: int) -> bool:
    """Start or resume a training and kill it in a phase; return whether it ended by itself."""
    schedule = {
        "SOLVER__MAX_ITER": ITERATIONS,
        "SOLVER__STEPS": "(10,)",
        "SOLVER__CHECKPOINT_PERIOD": 2,
    }
    log = folder.with_suffix(".txt")
    log.unlink(missing_ok=True)
    with child(
        training(arguments(folder, "--resume", **schedule, TEST__EVAL_PERIOD=5)), log
    ) as run:
        if start < ITERATIONS:  # otherwise only the last evaluation is left to do
            assert (
                run.wait_for(STEP)
                and f"Starting training from iteration {start}\n" in run.output()
            ), run.output()
            assert not [
                path for path in folder.glob(".*.tmp") if f".{run.pid}." not in path.name
            ]
        if kill and run.wait_for(kill, moments.randint(1, 3)):
            time.sleep(moments.uniform(0, LONGEST[kill]))
            run.kill()
        assert run.wait() in (0, -9), run.output()[-3000:]
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


def test_a_killed_training_loses_nothing(tmp_path):
    if (
        "PYTEST_XDIST_WORKER" in os.environ
    ):  # where an earlier test may have started autograd's threads: no fork works then
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
        }
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", "0", __file__], env=clean, check=True
        )
        return
    moments, kills = random.Random(3), Counter()
    train(tmp_path / "uninterrupted", "", moments, start=0)
    expected = newest_checkpoint(tmp_path / "uninterrupted")
    folder, start = tmp_path / "killed", 0
    while kills.total() < KILLS or start:
        kind = (
            min(LONGEST, key=lambda kind: (kills[kind], moments.random()))
            if kills.total() < KILLS
            else ""
        )
        ended = train(folder, kind, moments, start)
        kills[kind] += not ended
        if start or ended or (folder / "last_checkpoint").exists():
            found = newest_checkpoint(folder)
            assert found["iteration"] + 1 >= start
            start = found["iteration"] + 1
        if ended:
            assert start == ITERATIONS
            for key in ("model", "trainer"):
                states = [
                    state[key] if key == "model" else state[key]["_trainer"]
                    for state in (found, expected)
                ]
                torch.testing.assert_close(*states, rtol=0, atol=0)
            shutil.rmtree(folder)
            start = 0
    assert kills.total() >= KILLS
