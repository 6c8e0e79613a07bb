"""tools/train_net.py as a user starts it: in its own processes, killed, resumed, under torchrun, with bad input."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gw_detectron.data.synthetic import make_synthetic

from ..tiny_run import DATA, ROOT, environment, words

TINY_RUN = str(ROOT / "tests" / "tiny_run.py")
TRAIN_NET = str(ROOT / "tools" / "train_net.py")
TWO_PROCESSES = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
LIMIT = 200  # seconds after which a run that hangs is ended


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("datasets")
    make_synthetic(root, DATA)
    return root


def start(data: Path, *command: str, launcher: tuple[str, ...] = (), output: int = subprocess.PIPE):
    return subprocess.Popen(
        [sys.executable, *launcher, TINY_RUN, *command],
        env=environment(data),
        stdout=output,
        stderr=output,
        text=True,
        start_new_session=True,
    )


def run(data: Path, *command: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    with start(data, *command, launcher=launcher) as process:
        try:
            stdout, stderr = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the workers too, which hold the pipes open
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def metrics(output: Path) -> dict[int, dict]:
    path = output / "metrics.json"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["iteration"]: line for line in lines if "total_loss" in line}


@pytest.mark.slow
def test_a_killed_run_resumes_where_its_last_checkpoint_is(data, tmp_path):
    schedule = {
        "SOLVER__MAX_ITER": 50,
        "SOLVER__STEPS": "(30,)",
        "SOLVER__CHECKPOINT_PERIOD": 10,
        "SOLVER__BASE_LR": 0.002,
    }
    tag = tmp_path / "last_checkpoint"
    deadline = time.monotonic() + LIMIT
    with start(data, TRAIN_NET, *words(tmp_path, **schedule), output=subprocess.DEVNULL) as process:
        try:
            # by then its second checkpoint and the first line of metrics are there
            while not (tag.exists() and tag.read_text() >= "model_0000019.pth" and metrics(tmp_path)):
                assert process.poll() is None and time.monotonic() < deadline, "it ended, or never got so far"
                time.sleep(0.02)
        finally:
            process.send_signal(signal.SIGKILL)
    killed_after = tag.read_text()
    assert killed_after < "model_0000049.pth"
    before = metrics(tmp_path)

    resumed = run(data, TRAIN_NET, *words(tmp_path, "--resume", **schedule))

    assert resumed.returncode == 0, resumed.stderr
    first = int(killed_after.removeprefix("model_").removesuffix(".pth")) + 1
    assert f"Starting training from iteration {first}" in resumed.stdout
    curve = metrics(tmp_path)
    assert list(curve)[: len(before)] == list(before)
    assert list(curve)[-1] == 49
    assert all(math.isfinite(line["total_loss"]) for line in curve.values())
    assert curve[39]["lr"] == pytest.approx(0.0002) and curve[19]["lr"] == pytest.approx(0.002)
    final = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert final["iteration"] == 49
    assert all(value.isfinite().all() for value in final["model"].values())
    assert (tmp_path / "inference" / "coco_instances_results.json").exists()
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_truncated_last_checkpoint_is_named_and_not_started_over(data, tmp_path):
    whole = {"model": {"a": torch.zeros(1000)}}
    torch.save(whole, tmp_path / "model_0000001.pth")
    torch.save(whole, tmp_path / "model_0000003.pth")
    os.truncate(tmp_path / "model_0000003.pth", 2000)
    (tmp_path / "last_checkpoint").write_text("model_0000003.pth")

    ended = run(data, TRAIN_NET, *words(tmp_path, "--resume"))

    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr + ended.stdout
    assert "model_0000003.pth" in ended.stderr and "cut off" in ended.stderr
    assert "Fix: write model_0000001.pth" in ended.stderr
    assert not (tmp_path / "metrics.json").exists()


EMPTY_REGIONS = """
import sys
import torch
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from gw_detectron.cli import errors_reported
from gw_detectron.engine import Trainer, get_parser, main, setup
from gw_detectron.engine.launch import launch_from_args


def both(args):
    cfg = setup(args)
    trainer = Trainer(cfg)
    for batch, _ in zip(trainer._trainer.data_loader, range(2)):
        if comm.get_rank() == 1:  # no object, so nothing for the mask head
            batch = [{**record, "instances": record["instances"][:0]} for record in batch]
        with EventStorage():
            sum(trainer.model(batch).values()).backward()
    parameters = [(n, p) for n, p in trainer.model.named_parameters() if p.requires_grad]
    without = [n for n, p in parameters if p.grad is None or not p.grad.isfinite().all()]
    assert not without, without
    sums = comm.all_gather([float(p.grad.sum()) for _, p in parameters])
    assert sums[0] == sums[1]
    if comm.is_main_process():
        print("local ranks", comm.all_gather(comm.get_local_rank()), "gradients agree")
    else:
        comm.all_gather(comm.get_local_rank())
    main(args)


with errors_reported():
    launch_from_args(both, get_parser().parse_args())
"""


def test_two_processes_under_torchrun_on_the_cpu(data, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(EMPTY_REGIONS)
    # a mask head without regions has to take part in the statistics of the other process
    norms = {"MODEL__FPN__NORM": "BW:channels=8,sync=true", "MODEL__ROI_MASK_HEAD__NORM": "BW:channels=8,sync=true"}

    ended = run(
        data, str(script), *words(tmp_path / "output", SOLVER__IMS_PER_BATCH=4, **norms), launcher=TWO_PROCESSES
    )

    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "local ranks [0, 1] gradients agree" in ended.stdout
    assert list(metrics(tmp_path / "output")) == [2]
    assert (tmp_path / "output" / "model_final.pth").exists()
    assert "Evaluation results for segm" in ended.stdout
