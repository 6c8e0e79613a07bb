"""Runs of several processes: gradients of the joint batch, one checkpoint, failing processes."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import synchronize
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from detectron2.utils import comm

from gw_detectron.errors import ConfigError, NonFiniteError, PreflightError, UserError
from gw_detectron.weights import LazyCheckpoint
from gw_detectron.workbench.commands.train import get_parser
from gw_detectron.workbench.console import errors_reported
from gw_detectron.workbench.run.processes import (
    in_all_processes,
    launch_from_args,
    spare_core,
)
from gw_detectron.workbench.run.start import check_same_start
from gw_detectron.workbench.signals import Interrupted

from ...tiny_run import environment, words
from ..reliability.forked_run import child

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo"
)

CASES = str(Path(__file__).with_name("distributed_cases.py"))
LIMIT = 280  # seconds for a whole run on a busy machine
END = 90  # seconds within which all processes end after one of them has failed
TWO_IMAGES_EACH = {"SOLVER__IMS_PER_BATCH": 4}


@pytest.mark.parametrize(
    ("device", "asked", "before", "threads"),
    [("cpu", "", 3, 2), ("cpu", "", 1, 1), ("cpu", "3", 3, 3), ("cuda", "", 3, 3)],
)
def test_a_core_is_spared(monkeypatch, device, asked, before, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    given = torch.get_num_threads()
    torch.set_num_threads(before)
    try:
        with spare_core(device):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(given)


def launch_two(
    shapes: Path, output: Path, case: str, *flags: str, **overrides: object
) -> tuple[int, str]:
    """Run a case in two processes of torchrun; return its exit status and stderr."""
    output.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = words(output, *flags, **TWO_IMAGES_EACH | overrides)

    ended = subprocess.run(
        [sys.executable, *launcher, CASES, case, *flags],
        env=environment(
            SHAPES=str(shapes),
            GLOO_SOCKET_IFNAME="lo",
            FAILED_FILE=str(output / "failed"),
        ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT,
    )
    return ended.returncode, ended.stderr


@pytest.fixture(scope="module")
def two_processes(shapes, tmp_path_factory) -> tuple[Path, list[dict]]:
    output = tmp_path_factory.mktemp("output")
    status, stderr = launch_two(shapes, output, "train")
    assert status == 0, stderr[-5000:]
    return output, torch.load(output / "processes.pt", weights_only=True)


def test_two_processes_train_the_same_parameters(two_processes):
    _, (first, second) = two_processes
    assert first["parameters"] == second["parameters"]
    assert first["state"] == second["state"], (
        "the evaluation has shared BN's statistics"
    )
    assert first["without gradient"] == second["without gradient"] == []
    assert (first["local"], second["local"]) == ((0, 2), (1, 2))


def test_the_main_process_writes_checkpoints(two_processes):
    output, (first, second) = two_processes
    assert first["saved"] > 0 and second["saved"] == 0
    names = {path.name for path in output.glob("model*")}
    assert names == {"model_0000001.pth", "model_final.pth"}
    for log in ("log.txt", "log.txt.rank1"):
        assert "Starting training from iteration 0" in (output / log).read_text()


@pytest.mark.slow
def test_two_processes_average_weights_and_end_by_patience(shapes, tmp_path):
    schedule = {"SOLVER__MAX_ITER": 30, "SOLVER__STEPS": "()", "TEST__EVAL_PERIOD": 1}
    kept = {"SOLVER__EMA": 0.9, "TEST__BEST": "segm/AP", "TEST__PATIENCE": 2}
    status, stderr = launch_two(shapes, tmp_path, "train", **schedule, **kept)
    assert status == 0, stderr[-5000:]
    assert torch.load(tmp_path / "model_final.pth", weights_only=True)["iteration"] < 29


@pytest.fixture
def process_group(monkeypatch):
    """Stand in for two processes: ``gather`` gives their values for the value of this one."""

    def stand_in(gather, rank=0):
        monkeypatch.setattr(comm, "get_world_size", lambda: 2)
        monkeypatch.setattr(comm, "get_rank", lambda: rank)
        monkeypatch.setattr(comm, "all_gather", gather)
        monkeypatch.setattr(comm, "synchronize", lambda: None)

    return stand_in


def test_processes_with_other_weights_are_refused(process_group, capsys):
    def other_weights(value):
        return [value, value if isinstance(value, bool) else (value[0], "other")]

    model = torch.nn.Linear(2, 2)
    process_group(lambda value: [value, value])
    check_same_start(model, LazyCheckpoint("a.pth"), 3)

    process_group(other_weights)
    with pytest.raises(SystemExit):
        check_same_start(model, LazyCheckpoint("a.pth"), 3)
    assert "MODEL.WEIGHTS ('a.pth')" in capsys.readouterr().err


def test_gradients_equal_those_of_one_process_with_the_joint_batch(shapes, tmp_path):
    """Also where a process has fewer images or none, and where it accumulates them."""
    status, stderr = launch_two(shapes, tmp_path, "compare_gradients")
    assert status == 0, stderr[-5000:]
    found = torch.load(tmp_path / "gradients.pt", weights_only=True)
    assert max(found["GW:groups=16"] + found["BW:channels=16,sync=true"]) < 1e-11
    assert found["BN"][0] > 0.1, "its statistics are those of each process"
    assert found["accumulated"] < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("user_error", "Error in process 1: KEY (1): wrong. Fix: give 2."),
        ("killed", "Signal 9 (SIGKILL) received by PID"),
        ("hang", "did not answer for 30 s"),
    ],
)
def test_all_processes_end_if_one_fails(shapes, tmp_path, kind, reason):
    flags = ["--dist-timeout", "30"] if kind == "hang" else []
    status, stderr = launch_two(
        shapes, tmp_path, kind, *flags, SOLVER__MAX_ITER=9, DATASETS__TEST="()"
    )
    assert status != 0 and time.time() - (tmp_path / "failed").stat().st_mtime < END
    assert stderr.count(reason) == 1, stderr
    assert stderr.count("Traceback (most recent") == 1, "that of torchrun"


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer"),
            True,
        ),
        (
            RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting"),
            True,
        ),
        (dist.DistStoreError("wait timeout after 8000ms"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:446] op.preamble.length"), False),
        (RuntimeError(), False),
    ],
)
def test_a_lost_process_is_reported_and_a_bug_keeps_its_traceback(error, reported):
    def fail(args):
        raise error

    args = get_parser().parse_args(["--num-gpus", "0"])
    with pytest.raises(RuntimeError) as raised:
        launch_from_args(fail, args)

    if reported:
        assert isinstance(raised.value, UserError) and "--dist-timeout" in str(
            raised.value
        )
    else:
        assert raised.value is error


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="speaks about a machine without a GPU"
)
def test_several_processes_without_a_gpu_need_torchrun():
    with pytest.raises(ConfigError, match="--num-gpus 2.*torchrun"):
        launch_from_args(print, get_parser().parse_args(["--num-gpus", "2"]))


@pytest.mark.parametrize(
    "error",
    [
        PreflightError(["one thing", "another"]),
        FileNotFoundError(errno.ENOENT, "No such file", "a.json"),
        OSError(errno.ENOSPC, "No space left on device"),
        NonFiniteError("the covariance holds NaN"),
        MemoryError(),
        RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"
        ),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError(
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
        ),
    ],
    ids=lambda error: f"{type(error).__name__} {str(error)[:12]}",
)
def test_a_user_error_or_a_lack_of_memory_is_one_message(capsys, error):
    with pytest.raises(SystemExit) as ended, errors_reported():
        raise error

    said = capsys.readouterr().err
    assert ended.value.code == 1 and ended.value.__suppress_context__
    assert str(error) in said and "Traceback" not in said


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.ENOENT])
def test_shared_memory_that_cannot_be_used_is_named(monkeypatch, capsys, number):
    class Refused:
        def __init__(self, *args):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(synchronize._multiprocessing, "SemLock", Refused)

    with pytest.raises(SystemExit), errors_reported():
        multiprocessing.Lock()

    assert "/dev/shm: [Errno" in capsys.readouterr().err


def test_an_error_that_is_not_the_users_keeps_its_traceback():
    with pytest.raises(ConnectionResetError), errors_reported():
        raise ConnectionResetError("c")


@pytest.mark.parametrize(
    ("rank", "failed"),
    [(0, [True, True]), (1, [True, True]), (1, [False, True]), (0, [False, True])],
)
def test_an_error_of_several_processes_is_reported_once(
    process_group, capsys, rank, failed
):
    def gather(mine):
        assert mine == failed[rank]
        return failed

    process_group(gather, rank)

    with pytest.raises(SystemExit, match="1"), in_all_processes():
        if failed[rank]:
            raise ConfigError("KEY (1): wrong. Fix: 2.")

    reported = rank == failed.index(True)
    assert ("KEY (1)" in capsys.readouterr().err) == reported


def wait_for_signal(index, folder):
    """A process of Detectron2's launcher."""
    with errors_reported():
        try:
            Path(folder, f"started {index}").touch()
            time.sleep(LIMIT)
        except Interrupted:
            Path(folder, f"stopped {index}").touch()
            raise


@pytest.mark.slow
def test_a_signal_to_the_launcher_stops_its_processes_first(tmp_path, monkeypatch):
    def launch(*args, **options):
        torch.multiprocessing.spawn(wait_for_signal, (str(tmp_path),), nprocs=2)

    monkeypatch.setattr("gw_detectron.workbench.run.processes.launch", launch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    args = get_parser().parse_args(["--num-gpus", "2"])

    with child(lambda report: launch_from_args(print, args), tmp_path / "log") as run:
        deadline = time.monotonic() + LIMIT
        while len(list(tmp_path.glob("started *"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        run.send(signal.SIGTERM)
        assert run.wait() == 143, run.output()

    assert len(list(tmp_path.glob("stopped *"))) == 2
    assert "Traceback" not in run.output()
