"""What ends a training: non-finite losses, broken images, a full disk."""

import contextlib
import errno
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from gw_detectron.errors import DataError, FileAccessError, NonFiniteError
from gw_detectron.workbench.console import errors_reported
from gw_detectron.workbench.run import Trainer
from gw_detectron.workbench.run.training_data import build_training_data
from gw_detectron.workbench.signals import obey_parent

from ...tiny_run import arguments, config_of
from ..reliability.forked_run import child, training

pytestmark = pytest.mark.usefixtures("small_dataset", "one_thread")


def trainer_for(tmp_path, **overrides) -> Trainer:
    return Trainer(
        config_of(arguments(tmp_path, **{"DATASETS__TEST": "()", **overrides}))
    )


# the second stops before there is a loss
@pytest.mark.parametrize("norm", ["GW", "GW:solver=zca"])
def test_a_loss_that_is_not_finite_ends_the_run_before_it_changes_the_weights(
    tmp_path, norm
):
    class WithNan(Trainer):
        @classmethod
        def build_train_loader(cls, cfg):
            for batch in super().build_train_loader(cfg):
                batch[1]["image"] = batch[1]["image"].float()
                batch[1]["image"][0, 3, 5] = float("nan")
                yield batch

    trainer = WithNan(config_of(arguments(tmp_path, MODEL__RESNETS__WHITEN_NORM=norm)))

    with pytest.raises(NonFiniteError, match=r"iteration 0(.|\n)*SOLVER.BASE_LR"):
        trainer.train()

    assert all(value.isfinite().all() for value in trainer.model.parameters())
    assert "Traceback" not in (tmp_path / "log.txt").read_text()


def test_an_unexpected_error_keeps_its_traceback_in_the_log(tmp_path):
    trainer = trainer_for(tmp_path)
    trainer.model.roi_heads.forward = lambda *args: torch.zeros(2) @ torch.zeros(3)
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        trainer.train()
    assert "Traceback" in (tmp_path / "log.txt").read_text()


def test_a_training_goes_on_when_the_reader_of_its_output_has_ended(tmp_path):
    def work(report):
        reading, writing = os.pipe()
        os.dup2(writing, sys.stdout.fileno())
        os.close(writing)
        os.close(reading)
        training(arguments(tmp_path / "run", SOLVER__MAX_ITER=2, SOLVER__STEPS="()"))(
            report
        )

    with child(work, tmp_path / "errors") as run:
        assert run.wait() == 0, run.output()

    assert "Error" not in run.output()
    assert "Evaluated on" in (tmp_path / "run" / "log.txt").read_text()


@contextlib.contextmanager
def files_limited_to(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_full_during_a_checkpoint_leaves_the_earlier_one(tmp_path):
    trainer = trainer_for(tmp_path)  # its checkpointer refers to it weakly
    checkpointer = trainer.checkpointer
    checkpointer.save("model_0000001")
    file = tmp_path / "model_0000001.pth"
    good = file.read_bytes()

    with files_limited_to(1_000_000):
        for name in ("model_0000001", "model_0000003"):
            with pytest.raises(FileAccessError, match=f"{name}.pth"):
                checkpointer.save(name)

    assert file.read_bytes() == good
    assert [path for path in tmp_path.iterdir() if "model" in path.name] == [file]
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000001.pth"
    checkpointer.load(str(file))


def refuse_connection():
    raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused by tracker")


def refuse_permission():
    raise PermissionError(errno.EACCES, "denied", "mask.png")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


#: what a mapper in a worker does -> error of the run, words that it or the screen has
CAUSES = {
    "missing file": (
        lambda: Path("depth/1.png").read_bytes(),
        SystemExit,
        "'depth/1.png'",
    ),
    "no permission": (refuse_permission, SystemExit, "denied: 'mask.png'"),
    "no connection": (refuse_connection, ConnectionRefusedError, "refused by tracker"),
    "wrong key": (lambda: {}["polygons"], KeyError, "polygons"),
    "killed": (kill, SystemExit, "DATALOADER.NUM_WORKERS"),
}


@pytest.mark.parametrize(("fail", "error", "words"), CAUSES.values(), ids=CAUSES)
def test_the_error_of_a_worker_keeps_its_cause(tmp_path, capsys, fail, error, words):
    class Failing(Trainer):
        @classmethod
        def build_train_loader(cls, cfg):
            return build_training_data(cfg, lambda record: fail())

    args = arguments(tmp_path, DATASETS__TEST="()", DATALOADER__NUM_WORKERS=1)
    with pytest.raises(error) as raised, errors_reported():
        Failing(config_of(args)).train()

    said = capsys.readouterr().err + str(raised.value)
    assert words in said
    assert ("NUM_WORKERS" in said) == (fail is kill)
    assert error is not SystemExit or "Traceback" not in said


def test_a_worker_that_its_parent_ends_has_not_failed():
    """Else torch adds a traceback to the error of a run, after its last line."""

    def work(ready):
        obey_parent(0)
        ready.set()
        time.sleep(300)

    context = multiprocessing.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=work, args=(ready,), daemon=True)
    worker.start()
    assert ready.wait(60)

    worker.terminate()

    worker.join(60)
    assert worker.exitcode == 0


def test_the_error_of_a_hook_is_not_taken_for_one_of_a_worker(tmp_path):
    trainer = trainer_for(tmp_path, DATALOADER__NUM_WORKERS=1)
    trainer.after_step = refuse_connection

    with pytest.raises(ConnectionRefusedError, match="by tracker"):
        trainer.train()

    assert "by tracker" in (tmp_path / "log.txt").read_text()


def test_a_damaged_image_is_named(tmp_path, small_dataset):
    folder = small_dataset / "train"
    trainer = trainer_for(tmp_path)  # the checks would find the damage
    kept = {path: path.read_bytes() for path in folder.iterdir()}

    try:
        for path, content in kept.items():
            path.write_bytes(content[:200])
        with pytest.raises(DataError, match=rf"'{folder}/0000..\.jpg'") as raised:
            trainer.train()
    finally:
        for path, content in kept.items():
            path.write_bytes(content)

    assert "Traceback" not in str(raised.value)
