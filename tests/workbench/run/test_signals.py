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
from gw_detectron.workbench.commands.train import run_here as main
from gw_detectron.workbench.console import errors_reported
from gw_detectron.workbench.run import Trainer
from gw_detectron.workbench.run.hooks import SignalHook
from gw_detectron.workbench.signals import Interrupted

from ...tiny_run import ROOT, arguments, environment, words
from ..reliability.forked_run import CHECKPOINT, EVALUATION, STEP, child, training

LONG = {
    "SOLVER__MAX_ITER": 500,
    "SOLVER__STEPS": "()",
    "SOLVER__CHECKPOINT_PERIOD": 500,
}

SIGNALS = [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]

pytestmark = pytest.mark.usefixtures("small_dataset")


def train_long(folder, *flags, **overrides):
    return training(arguments(folder, *flags, **{**LONG, **overrides}))


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_a_signal_finishes_the_step_and_writes_a_checkpoint(tmp_path, number, status):
    output, log = tmp_path / "run", tmp_path / "log"
    work = train_long(output, DATASETS__TEST="()", DATALOADER__NUM_WORKERS=2)

    # as a terminal and a scheduler do; workers live until the step is finished
    with child(work, log) as run:
        assert run.wait_for(STEP, 3)
        run.send_to_all(number)
        assert run.wait() == status, run.output()
        assert not run.processes(), "a worker outlived the run"

    steps = run.count(STEP)
    name = f"model_{steps - 1:07d}.pth"
    assert (output / "last_checkpoint").read_text() == name
    checkpoint = read_weights_file(output / name).value
    assert checkpoint["iteration"] == checkpoint["trainer"]["iteration"] == steps - 1

    said = run.output()
    last = said.strip().splitlines()[-1]
    assert "Traceback" not in said
    assert last.startswith(
        f"Stopped by {number.name}. Iteration {steps - 1} is finished"
    )
    assert f"--resume --config-file {output}/config.yaml" in last
    assert last in (output / "log.txt").read_text()

    with child(train_long(output, "--resume", DATASETS__TEST="()"), log) as resumed:
        assert resumed.wait_for(STEP)
    assert f"Starting training from iteration {steps}" in resumed.output()


@pytest.mark.parametrize("repeated", [False, True])
def test_a_signal_in_an_evaluation_ends_it_and_keeps_the_finished_step(
    tmp_path, monkeypatch, repeated
):
    inference = "detectron2.modeling.GeneralizedRCNN.inference"
    monkeypatch.setattr(inference, lambda *_: time.sleep(100))
    output = tmp_path / "run"
    work = train_long(output, TEST__EVAL_PERIOD=3, DATALOADER__NUM_WORKERS=2)

    with child(work, tmp_path / "log") as run:
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

        def step_and_stop(trainer):
            step(trainer)
            signal.raise_signal(signal.SIGTERM)

        Trainer.run_step = step_and_stop
        train_long(tmp_path / "run", SOLVER__MAX_ITER=1)(report)

    with child(work, tmp_path / "log") as run:
        assert run.wait() == 143, run.output()

    assert (tmp_path / "run" / "last_checkpoint").read_text() == "model_final.pth"
    assert not run.count(EVALUATION)


@pytest.mark.parametrize("under_torchrun", [False, True])
def test_a_second_ctrl_c_stops_at_once_but_torchruns_own_does_not(
    monkeypatch, under_torchrun
):
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    hook = SignalHook(checkpoint_period=10)
    hook._receive(signal.SIGINT, None)

    stops = contextlib.nullcontext() if under_torchrun else pytest.raises(Interrupted)
    with stops:
        hook._receive(signal.SIGINT, None)

    assert hook.received == signal.SIGINT


def test_handlers_are_restored(tmp_path):
    def handlers():
        return [signal.getsignal(number) for number, _ in SIGNALS]

    before = handlers()
    main(
        arguments(tmp_path, SOLVER__MAX_ITER=1, SOLVER__STEPS="()", DATASETS__TEST="()")
    )
    with pytest.raises(KeyError), errors_reported():
        assert handlers()[0] != before[0]
        raise KeyError

    assert handlers() == before


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_a_signal_outside_a_training_is_one_line(capsys, number, status):
    with pytest.raises(SystemExit) as ended, errors_reported(), errors_reported():
        signal.raise_signal(number)

    assert ended.value.code == status
    assert capsys.readouterr().err.strip() == f"Stopped by {number.name}."


@pytest.mark.slow
def test_two_processes_stop_after_the_same_step(small_dataset, tmp_path):
    output, log = tmp_path / "run", tmp_path / "log"
    schedule = {
        **LONG,
        "SOLVER__CHECKPOINT_PERIOD": 4,
        "DATASETS__TEST": "()",
        "SOLVER__IMS_PER_BATCH": 4,
    }
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    scripts = [
        str(ROOT / "tests" / "tiny_run.py"),
        str(ROOT / "tools" / "train_net.py"),
    ]

    with log.open("w") as file:
        run = subprocess.Popen(
            [sys.executable, *launcher, *scripts, *words(output, **schedule)],
            env=environment(SHAPES=str(small_dataset)),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 280
            while not (output / "last_checkpoint").exists():
                assert run.poll() is None and time.monotonic() < deadline, (
                    log.read_text()
                )
                time.sleep(0.05)
            run.send_signal(signal.SIGTERM)
            run.wait(280)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()

    said = log.read_text()
    stops = re.findall(
        r"\nStopped by SIGTERM. Iteration (\d+) is finished; checkpoint", said
    )
    assert run.returncode != 0
    assert len(stops) == 1, said
    checkpoint = output / (output / "last_checkpoint").read_text()
    assert read_weights_file(checkpoint).value["iteration"] == int(stops[0])
    # torchrun shows its own traceback
    ours = said.partition("torch/distributed/run.py")[0]
    assert "gw_detectron/workbench" not in ours.partition("Stopped by")[2], said
