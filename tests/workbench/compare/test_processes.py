"""The processes of a comparison: their GPU, their end, and what they leave."""

import json
import math
import multiprocessing
import os
import sys
import time

import pytest

from gw_detectron.atomic import write_json
from gw_detectron.errors import NonFiniteError, RunError
from gw_detectron.workbench.compare import jobs, processes
from gw_detectron.workbench.compare.plan import Job
from gw_detectron.workbench.run import RunRequest
from gw_detectron.workbench.run.folder import METRICS
from gw_detectron.workbench.signals import end_processes


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train a job whose run logs lines, and ends well or with an error."""

    def run(*lines, error=None):
        def main(args):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (tmp_path / METRICS).write_text(text)
            if error:
                raise error

        monkeypatch.setattr(jobs, "main", main)
        return jobs.train(tmp_path, Job("GN", 0.1, 1, 4), RunRequest())

    return run


def test_runs_get_the_gpu_with_the_fewest_runs_and_errors_name_their_cause(
    tmp_path, monkeypatch
):
    def run_in_process(work, folder, threads, gpu, seconds):
        os.write(sent, gpu.encode())
        work(seconds)

    received, sent = os.pipe()  # without a lock, which a kill may leave locked
    monkeypatch.setattr(processes, "_CONTEXT", multiprocessing.get_context("fork"))
    monkeypatch.setattr(processes, "run_in_process", run_in_process)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    pool = processes.Processes("cuda", 2)

    first = pool.start(time.sleep, tmp_path, 60)
    second = pool.start(time.sleep, tmp_path, 60)
    used = {os.read(received, 1), os.read(received, 1)}
    assert used == {b"4", b"7"}

    second.kill()
    log = tmp_path / processes.LOG
    log.write_text("\nError: of an earlier attempt")
    with pytest.raises(RunError, match="signal 9"):
        processes.result_of(tmp_path, second)

    third = pool.start(sys.exit, tmp_path, 0)
    with pytest.raises(RunError, match="__main__"):
        processes.result_of(tmp_path, third)
    assert os.read(received, 1) == b"7"
    end_processes([first])


def test_checkpoints_stay_until_the_result_is_there(tmp_path, train):
    (tmp_path / "inference").mkdir()
    for name in (
        "model_final.pth",
        "last_checkpoint",
        "inference/boxes.pth",
        "config.yaml",
    ):
        (tmp_path / name).touch()

    result = train(error=NonFiniteError("the loss is nan"))
    assert result["AP"] == 0
    assert result["diverged"] == "the loss is nan"
    assert (tmp_path / "model_final.pth").exists()
    assert (tmp_path / "inference").exists()

    write_json(tmp_path / processes.RESULT, result)
    for _ in range(2):
        assert processes.take_result(tmp_path) == result
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"config.yaml", METRICS, processes.RESULT}


def test_a_second_evaluation_after_the_end_is_no_further_point(train):
    result = train(
        {"iteration": 1, "bbox/AP": 3.0},
        {"iteration": 3, "bbox/AP": math.nan},
        {"iteration": 4, "bbox/AP": 5.0},
        {"iteration": 4, "bbox/AP": 5.0, "bbox/AP-cat": 6.0, "total_loss": 0.1},
    )

    assert result["curve"] == [(2, 3.0), (4, 5.0)]
    assert result["AP"] == 5
    assert result["scores"] == {"bbox/AP": 5.0, "bbox/AP-cat": 6.0}


def test_a_run_that_diverged_has_the_curve_of_the_others_score(train):
    line = {
        "iteration": 1,
        "bbox/AP": 30.0,
        "bbox/AP@300": 50.0,
        "segm/AP": 10.0,
        "segm/AP@300": 20.0,
        "segm/AP75": 5.0,
    }
    result = train(line, error=NonFiniteError("the loss is nan"))

    assert result["score"] == "segm/AP@300"
    assert result["AP"] == 0
    assert result["curve"] == [(2, 20.0)]


def test_ap_of_all_objects_is_the_score_where_there_is_one(train):
    assert train({"iteration": 4, "bbox/AP": 4.0, "bbox/AP@300": 7.0})["AP"] == 7


def test_no_detection_at_all_is_an_ap_of_0(train):
    result = train({"iteration": 4, "bbox/AP": math.nan, "bbox/AP50": math.nan})

    assert result["AP"] == 0
    assert result["curve"] == []
    assert result["scores"] == {"bbox/AP": None, "bbox/AP50": None}
