"""Runs of several processes: gradients, empty batches, unequal data, failing processes, two machines, resuming."""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from detectron2.utils import comm

from gw_detectron.checkpoint import StartWeights
from gw_detectron.cli import Interrupted, errors_reported
from gw_detectron.data import make_synthetic, register_synthetic
from gw_detectron.engine import get_parser, launch, main
from gw_detectron.engine.launch import in_all_processes, launch_from_args
from gw_detectron.engine.trainer import check_same_start
from gw_detectron.errors import ConfigError, NonFiniteError, PreflightError, UserError

from ..reliability.forked_run import child
from ..tiny_run import DATA, ROOT, arguments, environment, words

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")

CASES = str(ROOT / "tests" / "engine" / "distributed_cases.py")
LIMIT = 280  # seconds for a whole run on a busy machine
END = 60  # seconds within which all processes end after one of them has failed
TWO_IMAGES_EACH = {processes: {"SOLVER__IMS_PER_BATCH": 2 * processes} for processes in (2, 4)}


class Launched:
    """torchrun with the processes that it starts.

    Args:
        errors: a file for stderr, which a pipe would have to read all the time.
    """

    def __init__(self, data: Path, errors: Path, launcher: tuple[str, ...], case: str, arguments: list[str]) -> None:
        self.errors = errors
        with errors.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *launcher, CASES, case, *arguments],
                env=environment(data, GLOO_SOCKET_IFNAME="lo", FAILED_FILE=str(errors.with_suffix(".failed"))),
                stdout=subprocess.DEVNULL,
                stderr=file,
            )

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill torchrun and its workers, each of which has its own process group."""
        try:
            workers = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        except OSError:
            workers = []
        for pid in (self.process.pid, *map(int, workers)):
            if self.process.poll() is None or pid != self.process.pid:
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def wait(self) -> int:
        return self.process.wait(LIMIT)

    def stderr(self) -> str:
        return self.errors.read_text()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("datasets")
    make_synthetic(root, DATA)
    return root


def one_machine(processes: int) -> tuple[str, ...]:
    return ("--standalone", "--nproc-per-node", str(processes))


def run(data: Path, output: Path, processes: int, case: str, *flags: str, **overrides: object) -> list[dict]:
    """Run a case that has to succeed; return what its processes noted."""
    output.mkdir(exist_ok=True)
    command = words(output, *flags, **TWO_IMAGES_EACH[processes] | overrides)
    with Launched(data, output / "stderr.txt", one_machine(processes), case, command) as launched:
        assert launched.wait() == 0, launched.stderr()[-5000:]
    noted = output / "processes.pt"
    return torch.load(noted, weights_only=True) if noted.exists() else []


@pytest.fixture(scope="module")
def two_processes(data, tmp_path_factory) -> tuple[Path, list[dict]]:
    output = tmp_path_factory.mktemp("output")
    return output, run(data, output, 2, "train")


def test_two_processes_train_the_same_parameters(two_processes):
    noted = two_processes[1]
    assert noted[0]["parameters"] == noted[1]["parameters"]
    assert noted[0]["state"] == noted[1]["state"], "the evaluation has shared the running statistics of BN"
    assert [each["without gradient"] for each in noted] == [[], []]
    assert [each["local"] for each in noted] == [(0, 2), (1, 2)]


def test_the_main_process_writes_checkpoints(two_processes):
    output, noted = two_processes
    assert noted[0]["saved"] > 0 and noted[1]["saved"] == 0
    assert sorted(path.name for path in output.glob("model*")) == ["model_0000001.pth", "model_final.pth"]
    assert "Starting training from iteration 0" in (output / "log.txt").read_text()
    assert "Starting training from iteration 0" in (output / "log.txt.rank1").read_text()


@pytest.mark.slow
def test_a_run_is_resumed_with_another_number_of_processes(data, two_processes, tmp_path):
    output = tmp_path / "output"
    shutil.copytree(two_processes[0], output)
    noted = run(data, output, 4, "train", "--resume", SOLVER__MAX_ITER=5)

    assert len({each["parameters"] for each in noted}) == 1
    assert noted[0]["parameters"] != two_processes[1][0]["parameters"]
    assert "Starting training from iteration 3" in (output / "log.txt.rank3").read_text()
    lines = map(json.loads, (output / "metrics.json").read_text().splitlines())
    assert [line["iteration"] for line in lines if "total_loss" in line] == [2, 4]
    assert [each["saved"] for each in noted[1:]] == [0, 0, 0]

    # Four processes evaluate three images, so the last one has none. All use what the checkpoint contains.
    register_synthetic(data, DATA)
    try:
        again = main(arguments(tmp_path / "one", "--eval-only", MODEL__WEIGHTS=output / "model_final.pth"))
    finally:
        register_synthetic()
    assert again["bbox"] == pytest.approx(noted[0]["results"]["bbox"], nan_ok=True)
    assert again["segm"] == pytest.approx(noted[0]["results"]["segm"], nan_ok=True)
    predictions = [
        json.loads((folder / "inference" / "coco_instances_results.json").read_text())
        for folder in (output, tmp_path / "one")
    ]
    assert predictions[0] == predictions[1] != []


@pytest.mark.slow
def test_resuming_is_refused_where_a_machine_lacks_the_checkpoint(data, two_processes, tmp_path):
    output = tmp_path / "output"
    shutil.copytree(two_processes[0], output)
    command = words(output, "--resume", **TWO_IMAGES_EACH[2], SOLVER__MAX_ITER=5)
    with Launched(data, tmp_path / "stderr.txt", one_machine(2), "train_on_own_disks", command) as launched:
        assert launched.wait() != 0
    assert launched.stderr().count("different weights, in the iterations [3, 0]") == 1, launched.stderr()
    assert (output / "last_checkpoint").read_text() == "model_final.pth"


def test_processes_with_other_weights_are_refused(monkeypatch, capsys):
    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    monkeypatch.setattr(comm, "all_gather", lambda value: [value, value])
    monkeypatch.setattr(comm, "synchronize", lambda: None)
    check_same_start(model, StartWeights("a.pth"), 3)
    other = lambda value: [value, value if isinstance(value, bool) else (value[0], "other")]  # noqa: E731
    monkeypatch.setattr(comm, "all_gather", other)
    with pytest.raises(SystemExit):
        check_same_start(model, StartWeights("a.pth"), 3)
    assert "MODEL.WEIGHTS ('a.pth'): the processes start with different weights" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_without_objects_and_regions_takes_part(data, tmp_path):
    norms = {
        "MODEL__RESNETS__NORM": "FrozenBN",
        "MODEL__FPN__NORM": "BW:channels=8,sync=true",
        "MODEL__ROI_BOX_HEAD__NORM": "GW:groups=16",
        "MODEL__ROI_MASK_HEAD__NORM": "BW:channels=8,sync=true",
        # no proposal is so large: only the objects themselves are regions
        "MODEL__PROPOSAL_GENERATOR__MIN_SIZE": 1000,
    }
    noted = run(data, tmp_path, 2, "train_with_empty_batches", "--ignore-preflight", **norms)
    assert len({each["state"] for each in noted}) == 1
    assert [each["without gradient"] for each in noted] == [[], []]
    assert noted[-1]["regions"] == 0 < noted[0]["regions"]


@pytest.fixture(scope="module")
def differences(data, tmp_path_factory) -> dict:
    output = tmp_path_factory.mktemp("gradients")
    run(data, output, 4, "compare_gradients")
    return torch.load(output / "gradients.pt", weights_only=True)


@pytest.mark.slow
class TestGradients:
    """Relative to the largest value of each tensor; the processes have different numbers of images, one has none.

    Rounding: the sum over images is taken in another order, which changes 1e-13 in float64. In float32 it may move an
    activation over the kink of its ReLU; then the gradient of that channel changes, so all gradients are compared.
    """

    @pytest.mark.parametrize("norm", ["GW", "GN", "FrozenBN", "BW:sync=true", "naiveSyncBN"])
    def test_equal_those_of_one_process_with_the_joint_batch(self, differences, norm):
        found = differences[norm]
        assert found["float64"]["gradients"] < 1e-11
        if norm != "naiveSyncBN":  # it subtracts the squared mean, and averages variances without Bessel's correction
            assert found["float32"]["all gradients"] < 2e-2
            assert found["float64"]["statistics"] < 1e-11

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's SyncBatchNorm needs a GPU")
    @pytest.mark.parametrize("norm", ["SyncBN", "nnSyncBN"])
    def test_of_torchs_synchronized_layer_too(self, differences, norm):
        assert differences[norm]["float64"]["gradients"] < 1e-9

    def test_of_bn_differ(self, differences):
        assert differences["BN"]["float64"]["gradients"] > 0.1


def test_accumulated_gradients_are_exchanged_once_and_equal_those_of_the_joint_batch(data, tmp_path):
    run(data, tmp_path, 2, "accumulate_gradients")
    found = torch.load(tmp_path / "accumulated.pt", weights_only=True)
    assert found["difference"] < 1e-11
    assert found["exchanged"] == found["parameters"] > 1e6


REASONS = {
    "user_error": ["Error in process 1: KEY (1): wrong. Fix: give 2."],
    "bug": ["TypeError: a bug"],
    "killed": ["Signal 9 (SIGKILL) received by PID"],
    "hang": ["did not answer for 8 s"],
    "never_joins": ["did not answer for 8 s"],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REASONS)
def test_all_processes_end_if_one_fails(data, tmp_path, kind):
    failed = tmp_path / "stderr.failed"
    flags = ["--dist-timeout", "8"] if kind in ("hang", "never_joins") else []
    command = words(tmp_path / "output", *flags, **TWO_IMAGES_EACH[2], SOLVER__MAX_ITER=9, DATASETS__TEST="()")
    with Launched(data, tmp_path / "stderr.txt", one_machine(2), kind, command) as launched:
        status, ended = launched.wait(), time.time()
    assert status != 0
    assert ended - failed.stat().st_mtime < END
    stderr = launched.stderr()
    for reason in REASONS[kind]:
        assert stderr.count(reason) == 1, stderr
    # the traceback of torchrun itself, and that of a bug
    assert stderr.count("Traceback (most recent") == 1 + (kind == "bug"), stderr
    assert not remaining(tmp_path), "processes are left"


def remaining(folder: Path) -> list[str]:
    """Return the commands of living processes that were given a folder."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(path.read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended
            continue
    return [command for command in commands if str(folder) in command and "distributed_cases" in command]


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def machines(rendezvous: str, processes: int) -> list[tuple[str, ...]]:
    """Return torchrun's arguments on each of two machines that share the loopback interface."""
    port, common = free_port(), ("--nnodes", "2", "--nproc-per-node", str(processes))
    if rendezvous == "static":
        address = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    else:
        address = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test")
    address += ("--local-addr", "127.0.0.1")
    return [(*common, "--node-rank", str(rank), *address) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("rendezvous", "processes"), [("static", 2), ("c10d", 1)])
def test_two_machines_train_the_same_parameters(data, tmp_path, rendezvous, processes):
    folders = [tmp_path / "first", tmp_path / "second"]
    commands = [words(folder, **TWO_IMAGES_EACH[2 * processes], DATASETS__TEST="()") for folder in folders]
    first, second = machines(rendezvous, processes)
    with (
        Launched(data, tmp_path / "first.txt", first, "train", commands[0]) as one,
        Launched(data, tmp_path / "second.txt", second, "train", commands[1]) as two,
    ):
        assert one.wait() == 0, one.stderr()[-5000:]
        assert two.wait() == 0, two.stderr()[-5000:]
    noted = torch.load(folders[0] / "processes.pt", weights_only=True)
    assert torch.load(folders[1] / "processes.pt", weights_only=True) == noted
    assert len({each["parameters"] for each in noted}) == 1
    assert [each["local"] for each in noted] == [(rank, processes) for _ in folders for rank in range(processes)]
    written = [sorted(path.name for path in folder.glob("model*")) for folder in folders]
    assert sum(map(len, written)) == 2 and [] in written, "one machine writes the checkpoints"


@pytest.mark.slow
def test_a_machine_that_is_lost_ends_the_run_on_the_other(data, tmp_path):
    first, second = machines("static", 1)
    commands = [
        words(tmp_path / str(rank), **TWO_IMAGES_EACH[2], SOLVER__MAX_ITER=9000, SOLVER__CHECKPOINT_PERIOD=9000)
        for rank in (0, 1)
    ]
    with (
        Launched(data, tmp_path / "first.txt", first, "train", commands[0]) as one,
        Launched(data, tmp_path / "second.txt", second, "train", commands[1]) as two,
    ):
        deadline = time.monotonic() + LIMIT
        while not (tmp_path / "0" / "metrics.json").exists():
            assert one.process.poll() is None and time.monotonic() < deadline, one.stderr()
            time.sleep(0.1)
        two.kill()
        killed = time.monotonic()
        assert one.wait() != 0
        assert time.monotonic() - killed < END
    assert "process group: another process ended" in one.stderr()


def test_detectron2s_flags_reach_its_launcher(monkeypatch):
    """They need a GPU per process, so the processes themselves are not started."""
    given = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(launch, "launch", lambda worker, gpus, **options: given.update(options, gpus=gpus))
    machine = ["--num-gpus", "2", "--num-machines", "2", "--machine-rank", "1", "--dist-url", "tcp://127.0.0.1:5"]
    flags = [*machine, "--dist-timeout", "90"]
    launch_from_args(print, get_parser().parse_args(flags))
    assert given["gpus"] == 2 and given["num_machines"] == 2 and given["machine_rank"] == 1
    assert given["dist_url"] == "tcp://127.0.0.1:5" and given["timeout"].total_seconds() == 90


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:5."), True),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv"), True),
        (dist.DistStoreError("wait timeout after 8000ms"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError(), False),
    ],
)
def test_a_lost_process_is_reported_and_a_bug_keeps_its_traceback(error, reported):
    def fail(args):
        raise error

    with pytest.raises(UserError if reported else RuntimeError) as raised:
        launch_from_args(fail, get_parser().parse_args(["--num-gpus", "0", "--dist-timeout", "8"]))
    assert "--dist-timeout" in str(raised.value) if reported else raised.value is error


def test_zero_and_one_gpu_run_in_this_process():
    seen = []
    for flags in (["--num-gpus", "0"], []):
        launch_from_args(lambda args: seen.append(args.num_gpus), get_parser().parse_args(flags))
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
        NonFiniteError("the covariance holds NaN"),
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
