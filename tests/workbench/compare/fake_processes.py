"""Processes of a comparison that write results without training."""

import json
import multiprocessing
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from gw_detectron.workbench.compare import jobs, processes
from gw_detectron.workbench.compare.plan import Costs, Job

RESULT = {"score": "bbox/AP", "AP": 1.0, "diverged": "", "curve": [], "seconds": 1.0}


def fake_processes(
    monkeypatch: pytest.MonkeyPatch,
    times: Mapping[str, float],
    train: Callable[[Job], Mapping[str, Any]] = lambda job: {},
    **costs: float,
) -> None:
    """Let processes measure these ``times``, and let ``train`` return what differs from RESULT."""

    def run(work, folder, threads, gpu, *args):
        folder.mkdir(parents=True, exist_ok=True)
        if work is jobs.measure:
            result = Costs(
                times, **{"evaluation": 1.0, "start": 1.0, **costs}
            )._asdict()
        else:
            result = {**args[0]._asdict(), **RESULT, **train(args[0])}
        (folder / processes.RESULT).write_text(json.dumps(result))

    monkeypatch.setattr(processes, "_CONTEXT", multiprocessing.get_context("fork"))
    monkeypatch.setattr(processes, "run_in_process", run)
