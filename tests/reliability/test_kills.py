"""SIGKILL at random moments loses nothing; KILLS=30 tries more of them.

A training is killed in steps, checkpoint writes and evaluations, and resumed until its end. After each kill
last_checkpoint names a complete file, the resumed run continues there and removes unfinished files, and the final state
equals that of an uninterrupted run bit for bit. Generated data, an export and converted weights are whole or not there.
"""

import hashlib
import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from detectron2.modeling import build_backbone

from gw_detectron.config import read_config
from gw_detectron.data import SyntheticConfig, make_synthetic
from gw_detectron.export import Normalization, export_backbone
from gw_detectron.weights import convert_file, read_weights_file

from ..tiny_run import arguments, words
from ..weights.synthetic import authors_state, make_network, training_checkpoint
from .forked_run import CHECKPOINT, EVALUATION, STEP, child, training

KILLS = int(os.environ.get("KILLS", "6"))
ITERATIONS = 20
LONGEST = {STEP: 0.2, CHECKPOINT: 0.15, EVALUATION: 0.5}  # seconds of a phase, to choose a moment in it

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_dataset", "one_thread")]


def train(folder: Path, kill: str, moments: random.Random, start: int) -> bool:
    """Start or resume a training and kill it in a phase; return whether it ended by itself."""
    schedule = {"SOLVER__MAX_ITER": ITERATIONS, "SOLVER__STEPS": "(10,)", "SOLVER__CHECKPOINT_PERIOD": 2}
    log = folder.with_suffix(".txt")
    log.unlink(missing_ok=True)
    with child(training(arguments(folder, "--resume", **schedule, TEST__EVAL_PERIOD=5)), log) as run:
        if start < ITERATIONS:  # otherwise only the last evaluation is left to do
            assert run.wait_for(STEP) and f"Starting training from iteration {start}\n" in run.output(), run.output()
            assert not [path for path in folder.glob(".*.tmp") if f".{run.pid}." not in path.name]
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
    moments, kills = random.Random(3), Counter()
    train(tmp_path / "uninterrupted", "", moments, start=0)
    expected = newest_checkpoint(tmp_path / "uninterrupted")
    folder, start = tmp_path / "killed", 0
    while kills.total() < KILLS or start:
        kind = min(LONGEST, key=lambda kind: (kills[kind], moments.random())) if kills.total() < KILLS else ""
        ended = train(folder, kind, moments, start)
        kills[kind] += not ended
        if start or ended or (folder / "last_checkpoint").exists():
            found = newest_checkpoint(folder)
            assert found["iteration"] + 1 >= start
            start = found["iteration"] + 1
        if ended:
            assert start == ITERATIONS
            for key in ("model", "trainer"):
                states = [state[key] if key == "model" else state[key]["_trainer"] for state in (found, expected)]
                torch.testing.assert_close(*states, rtol=0, atol=0)
            shutil.rmtree(folder)
            start = 0
    assert kills.total() >= KILLS


def generate(folder: Path) -> None:
    make_synthetic(folder, SyntheticConfig(num_train=30, num_val=5))


def export(folder: Path) -> None:
    _, config, *opts = words(folder)
    cfg = read_config(config, opts)
    export_backbone(build_backbone(cfg), folder / "out", Normalization.from_config(cfg), file_format="safetensors")


def convert(folder: Path) -> None:
    source = folder.parent / "source.pth"
    if not source.exists():
        torch.save(training_checkpoint(authors_state(make_network("R-18", "S1-B2"))), source)
    convert_file(source, folder / "converted.pkl", overwrite=True)


def result(folder: Path) -> dict[str, str]:
    """Hash the finished files by name; those of an export have times in them, except its tensors."""
    files = [
        path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".lock"
    ]
    timed = (".md", ".json") if (folder / "out").exists() else ()
    return {
        str(path): "" if path.suffix in timed else hashlib.sha256((folder / path).read_bytes()).hexdigest()
        for path in files
        if not any(part.startswith(".") or "part" in Path(part).suffix for part in path.parts)
    }


@pytest.mark.parametrize("work", [generate, export, convert])
def test_killed_work_leaves_a_whole_result_or_none(work, tmp_path):
    folder, log, moments = tmp_path / "result", tmp_path / "log", random.Random(5)

    def attempt(seconds: float | None) -> float:
        folder.mkdir(exist_ok=True)
        begin = time.monotonic()
        with child(lambda report: (report("begin"), work(folder)), log) as run:
            assert run.wait_for("begin")
            if seconds is not None:
                time.sleep(seconds)
                run.kill()
            assert run.wait() == 0 or seconds is not None, run.output()[-3000:]
        return time.monotonic() - begin

    seconds, expected = attempt(None), result(folder)
    assert expected
    for _ in range(max(1, KILLS // 3)):
        if moments.random() < 0.5:  # otherwise the attempt replaces an earlier result
            shutil.rmtree(folder)
        attempt(moments.uniform(0, seconds))
        assert result(folder) in ({}, expected)
        attempt(None)
        assert result(folder) == expected
        assert not [path for path in folder.iterdir() if path.name.endswith(".tmp") or "part" in path.suffix]
