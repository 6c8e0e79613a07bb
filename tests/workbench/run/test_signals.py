"""SIGTERM and Ctrl-C: the step is finished, a checkpoint is written, the status tells the signal."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from gw_detectron.weights import read_weights_file
from gw_detectron.workbench.console import errors_reported
from gw_detectron.workbench.run import Trainer, main

from ...tiny_run import ROOT, arguments, environment, words
from ..reliability.forked_run import CHECKPOINT, EVALUATION, STEP, child, training

LONG = {"SOLVER__MAX_ITER": 500, "SOLVER__STEPS": "()", "SOLVER__CHECKPOINT_PERIOD": 500}

pytestmark = pytest.mark.usefixtures("small_dataset")


def train_long(folder, *flags, **overrides):
    return training(arguments(folder, *flags, **{**LONG, **overrides}))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_and_writes_a_checkpoint(tmp_path, number, status):
    output = tmp_path / "run"
    with child(
        train_long(output, DATASETS__TEST="()", DATALOADER__NUM_WORKERS=2), tmp_path / "log"
    ) as run:
        assert run.wait_for(STEP, 3)
        run.send_to_all(
            number
        )  # as a terminal and a scheduler do; workers live until the step is finished
        assert run.wait() == status, run.output()
        assert not run.processes(), "a worker outlived the run"
    steps = run.count(STEP)
    name = f"model_{steps - 1:07d}.pth"
    assert (output / "last_checkpoint").read_text() == name
    checkpoint = read_weights_file(output / name).value
    assert checkpoint["iteration"] == checkpoint["trainer"]["iteration"] == steps - 1
    assert "Traceback" not in run.output()
    last = run.output().strip().splitlines()[-1]
    assert last.startswith(
        f"Stopped by {number.name}. Iteration {steps - 1} is finished; checkpoint"
    )
    assert (
        f"--resume --config-file {output}/config.yaml" in last
        and last in (output / "log.txt").read_text()
    )
    with child(
        train_long(output, "--resume", DATASETS__TEST="()"), tmp_path / "log"
    ) as resumed:
        assert resumed.wait_for(STEP, 1)
    assert f"Starting training from iteration {steps}" in resumed.output()


@pytest.mark.parametrize("repeated", [False, True])
def test_a_signal_in_an_evaluation_ends_it_and_keeps_the_finished_step(
    tmp_path, monkeypatch, repeated
):
    monkeypatch.setattr(
        "detectron2.modeling.GeneralizedRCNN.inference", lambda *_: time.sleep(100)
    )
    output = tmp_path / "run"
    with child(
        train_long(output, TEST__EVAL_PERIOD=3, DATALOADER__NUM_WORKERS=2), tmp_path / "log"
    ) as run:
        assert run.wait_for(EVALUATION)
        while len(run.processes()) < 4:  # two of the evaluation
            assert run.read(0.05)
        time.sleep(1)  # an error of a handler within a fork is ignored
        run.send_to_all(signal.SIGTERM)
        if repeated:  # a launcher repeats its signal
            assert run.wait_for(CHECKPOINT)
            run.send(signal.SIGTERM)
        assert run.wait() == 143, run.output()
    assert (output / "last_checkpoint").read_text() == "model_0000002.pth"
    assert run.count(CHECKPOINT) == 2, "the checkpoint and its name"
    assert "Traceback" not in run.output() and "Evaluation results" not in run.output()


def test_a_stop_in_the_last_step_skips_the_evaluation(tmp_path):
    def work(report):
        step = Trainer.run_step
        Trainer.run_step = lambda trainer: (
            step(trainer),
            trainer.iter and signal.raise_signal(signal.SIGTERM),
        )
        train_long(tmp_path / "run", SOLVER__MAX_ITER=2)(report)

    with child(work, tmp_path / "log") as run:
        assert run.wait() == 143, run.output()
    assert (tmp_path / "run" / "last_checkpoint").read_text() == "model_final.pth"
    assert not run.count(EVALUATION)


def test_handlers_are_restored(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    main(arguments(tmp_path, SOLVER__MAX_ITER=1, SOLVER__STEPS="()", DATASETS__TEST="()"))
    with pytest.raises(KeyError), errors_reported():
        assert signal.getsignal(signal.SIGTERM) != before[0]
        raise KeyError
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_ctrl_c_outside_a_training_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended, errors_reported(), errors_reported():
        raise KeyboardInterrupt
    assert ended.value.code == 130 and capsys.readouterr().err.strip() == "Stopped by SIGINT."
    with pytest.raises(SystemExit) as ended, errors_reported():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143 and capsys.readouterr().err.strip() == "Stopped by SIGTERM."


@pytest.mark.slow
def test_two_processes_stop_after_the_same_step(small_dataset, tmp_path):
    output = tmp_path / "run"
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
    schedule = {
        **LONG,
        "SOLVER__CHECKPOINT_PERIOD": 4,
        "DATASETS__TEST": "()",
        "SOLVER__IMS_PER_BATCH": 4,
    }
    command = [
        str(ROOT / "tests" / "tiny_run.py"),
        str(ROOT / "tools" / "train_net.py"),
        *words(output, **schedule),
    ]
    with (tmp_path / "log").open("w+") as log:
        run = subprocess.Popen(
            [sys.executable, *launcher, *command],
            env=environment(SHAPES=str(small_dataset)),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 280
            while not (output / "last_checkpoint").exists():
                assert run.poll() is None and time.monotonic() < deadline, (
                    tmp_path / "log"
                ).read_text()[-3000:]
                time.sleep(0.05)
            run.send_signal(signal.SIGTERM)
            run.wait(280)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    said = (tmp_path / "log").read_text()
    stops = re.findall(
        r"\nStopped by SIGTERM. Iteration (\d+) is finished; checkpoint '.*'. Continue with",
        said,
    )
    assert len(stops) == 1, said[-3000:]
    checkpoint = output / (output / "last_checkpoint").read_text()
    assert read_weights_file(checkpoint).value["iteration"] == int(stops[0])
    assert run.returncode != 0
    ours = said.partition("torch/distributed/run.py")[0]  # torchrun shows its own traceback
    assert "gw_detectron/engine" not in ours.partition("Stopped by")[2], said[-3000:]
