"""One training at a time writes to an output folder."""

import errno
import fcntl
import os
import signal

import pytest

from gw_detectron.engine import main, train
from gw_detectron.engine.output_lock import lock_output, output_unlocked_at_end
from gw_detectron.errors import OutputInUseError

from ..reliability.forked_run import STEP, child, training
from ..tiny_run import arguments


def hold(folder):
    """A function for a child that holds the lock until it is ended."""

    def work(report):
        lock_output(str(folder))
        report("locked")
        signal.pause()

    return work


def test_a_second_training_is_refused_before_it_writes_anything(tmp_path, small_dataset):
    output = tmp_path / "run"
    with child(training(arguments(output, SOLVER__MAX_ITER=500, SOLVER__STEPS="()")), tmp_path / "log") as first:
        assert first.wait_for(STEP)
        before = {path.name for path in output.iterdir()}
        config = (output / "config.yaml").read_bytes()
        message = rf"OUTPUT_DIR \('.*run'\): another training writes there \(host .*, process {first.pid}, since 20"
        with pytest.raises(OutputInUseError, match=message) as refused:
            main(arguments(output, SOLVER__BASE_LR=0.0123))
        assert "Fix: give another folder, or wait" in str(refused.value)
        assert {path.name for path in output.iterdir()} >= before
        assert (output / "config.yaml").read_bytes() == config
        assert "0.0123" not in (output / "log.txt").read_text()
        first.send(signal.SIGKILL)
        first.wait()
    for _ in range(2):  # a killed run holds no lock, and a finished one neither
        main(arguments(output, "--overwrite", SOLVER__MAX_ITER=1, SOLVER__STEPS="()", DATASETS__TEST="()"))
    with child(hold(output), tmp_path / "log") as other:
        assert other.wait_for("locked")
        assert main(arguments(output, "--eval-only", "--resume"))  # may run beside a training


def test_a_checkpoint_to_continue_from_is_chosen_under_the_lock(tmp_path, small_dataset, monkeypatch):
    schedule = {"SOLVER__MAX_ITER": 1, "SOLVER__STEPS": "()", "DATASETS__TEST": "()"}
    main(arguments(tmp_path, **schedule))
    opened = []
    monkeypatch.setattr(train, "open_start_weights", lambda *args, **kwargs: opened.append(args))
    with child(hold(tmp_path), tmp_path / "log") as other:
        assert other.wait_for("locked")
        with pytest.raises(OutputInUseError):
            main(arguments(tmp_path, "--resume", **schedule))
    assert not opened


def test_the_lock_ends_with_its_process_although_a_fork_of_it_lives(tmp_path):
    def work(report):
        lock_output(str(tmp_path))
        if os.fork() == 0:  # as a data-loading worker
            signal.pause()
        report("locked")
        signal.pause()

    with child(work, tmp_path / "log") as holder:
        assert holder.wait_for("locked")
        with pytest.raises(OutputInUseError):
            lock_output(str(tmp_path))
        holder.send(signal.SIGKILL)
        os.waitpid(holder.pid, 0)
        holder.status = -signal.SIGKILL
        assert holder.processes(), "the fork should still live"
        with output_unlocked_at_end():
            lock_output(str(tmp_path))
            lock_output(str(tmp_path))
        os.killpg(holder.pid, signal.SIGKILL)


def test_the_lock_is_released_at_the_end(tmp_path):
    with pytest.raises(KeyError), output_unlocked_at_end():
        lock_output(str(tmp_path))
        raise KeyError
    with child(hold(tmp_path), tmp_path / "log") as holder:
        assert holder.wait_for("locked"), holder.output()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, caplog, code):
    def refuse(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    lock_output(str(tmp_path))
    assert "its file system has no locks" in caplog.text and "start one training only" in caplog.text
