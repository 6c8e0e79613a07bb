"""How many processes are started, and how their errors are reported."""

import errno
import signal
import time
from pathlib import Path

import pytest
import torch
from detectron2.utils import comm

from gw_detectron.cli import Interrupted, errors_reported
from gw_detectron.engine import get_parser
from gw_detectron.engine.launch import in_all_processes, launch_from_args
from gw_detectron.errors import ConfigError, NonFiniteCovarianceError, PreflightError

from ..reliability.forked_run import child


def test_zero_and_one_gpu_run_in_this_process():
    seen = []
    for words in (["--num-gpus", "0"], []):
        launch_from_args(lambda args: seen.append(args.num_gpus), get_parser().parse_args(words))
    assert seen == [0, 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks about a machine without a GPU")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-gpus 2", "torchrun --nproc_per_node 2"),
        (
            "--num-gpus 0 --num-machines 2 --machine-rank 1",
            "torchrun --nnodes 2 --node_rank 1 --master_addr HOST_OF_RANK_0 --nproc_per_node 2",
        ),
        ("--num-gpus -1", "--num-gpus -1"),
        ("--num-machines 2 --machine-rank 2", "--machine-rank 2"),
        ("--num-gpus 0 --dist-timeout 0", "--dist-timeout 0"),
        ("--num-gpus 0 --dist-timeout 10000000", "--dist-timeout 10000000"),
    ],
)
def test_flags_that_cannot_be_used(words, message):
    with pytest.raises(ConfigError, match=message):
        launch_from_args(print, get_parser().parse_args(words.split()))


@pytest.mark.parametrize(
    "error",
    [
        PreflightError(["one thing", "another"]),
        FileNotFoundError(errno.ENOENT, "No such file", "a.json"),
        OSError(errno.ENOSPC, "No space left on device"),
        NonFiniteCovarianceError("the covariance holds NaN"),
    ],
)
def test_a_user_error_is_one_message(capsys, error):
    with pytest.raises(SystemExit) as ended, errors_reported():
        raise error
    assert ended.value.code == 1 and ended.value.__suppress_context__
    said = capsys.readouterr().err
    assert str(error) in said and "Traceback" not in said


def test_other_errors_keep_their_traceback():
    for error in (TypeError("a"), RuntimeError("b"), ConnectionResetError("c")):
        with pytest.raises(type(error)), errors_reported():
            raise error
    with pytest.raises(ValueError, match="stack expects"), errors_reported():
        raise ValueError("stack expects each tensor to be equal size")


@pytest.mark.parametrize(
    ("rank", "failed"), [(0, [True, True]), (1, [True, True]), (1, [False, True]), (0, [False, True])]
)
def test_an_error_of_several_processes_is_reported_once(monkeypatch, capsys, rank, failed):
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    monkeypatch.setattr(comm, "get_rank", lambda: rank)
    monkeypatch.setattr(comm, "all_gather", lambda mine: failed if mine == failed[rank] else pytest.fail("wrong flag"))
    monkeypatch.setattr(comm, "synchronize", lambda: None)
    with pytest.raises(SystemExit) as ended, in_all_processes():
        if failed[rank]:
            raise ConfigError("KEY (1): wrong. Fix: 2.")
    assert ended.value.code == 1
    reported = rank == failed.index(True)
    assert ("KEY (1): wrong" in capsys.readouterr().err) == reported


def test_processes_that_all_succeed_continue(monkeypatch):
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    monkeypatch.setattr(comm, "all_gather", lambda mine: [mine, False])
    with in_all_processes():
        done = True
    assert done


def wait_for_signal(index, folder):
    """A process of Detectron2's launcher."""
    with errors_reported():
        try:
            Path(folder, f"started {index}").touch()
            time.sleep(60)
        except Interrupted:
            Path(folder, f"stopped {index}").touch()
            raise


@pytest.mark.slow
def test_a_signal_to_the_launcher_stops_its_processes_first(tmp_path, monkeypatch):
    spawn = torch.multiprocessing.spawn
    launch = lambda *args, **kwargs: spawn(wait_for_signal, (str(tmp_path),), nprocs=2)  # noqa: E731
    monkeypatch.setattr("gw_detectron.engine.launch.launch", launch)
    with child(lambda report: launch_from_args(print, get_parser().parse_args([])), tmp_path / "log") as run:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("started *"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        run.send(signal.SIGTERM)
        assert run.wait() == 143, run.output()
    assert len(list(tmp_path.glob("stopped *"))) == 2 and "Traceback" not in run.output()
