"""What the processes of a comparison do: one training, or the timing of all norms."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import NonFiniteError, first_line
from ...weights.recording import software_versions
from ..dataset.coco_scores import COCO_TASKS, ap_name
from ..run import RunRequest, Trainer, main, prepare
from ..run.folder import METRICS, read_metrics
from ..run.processes import spare_core
from ..run.timing import evaluation_seconds, step_seconds
from .plan import Costs, Job


def train(folder: Path, job: Job, request: RunRequest) -> dict[str, Any]:
    """Train, or continue a training, and return its result, from its metrics.

    AP is AP@N if there is one, and 0 without any detection or if a loss is not finite.
    """
    start = time.perf_counter()
    diverged = ""
    try:
        main(replace(request, resume=True))
    except NonFiniteError as error:
        diverged = first_line(error)

    lines = read_metrics(folder / METRICS)
    name = _score_name(set().union(*lines))
    evaluations = [line for line in lines if name in line]
    scores = {}
    if evaluations and not diverged:
        scores = _scores(evaluations[-1])
    return {
        **job._asdict(),
        "score": name,
        "AP": scores.get(name) or 0.0,
        "diverged": diverged,
        "scores": scores,
        "curve": _curve(evaluations, name, job.iterations),
        "seconds": round(time.perf_counter() - start, 1),
        "versions": software_versions(),
    }


def _score_name(logged: set[str]) -> str:
    """Return the name of the AP of the main task, also of a run that diverged later."""
    main_task = "bbox"
    for task in COCO_TASKS:
        if f"{task}/AP" in logged:
            main_task = task
    return ap_name(main_task, logged)


def _scores(evaluation: Mapping[str, float]) -> dict[str, float | None]:
    """Return the scores of an evaluation in percent by their names, with None for NaN."""
    scores = {}
    for name, value in evaluation.items():
        if name.partition("/")[0] in COCO_TASKS:
            scores[name] = None if math.isnan(value) else round(value, 3)
    return scores


def _curve(
    evaluations: list[dict[str, Any]], name: str, last: int
) -> list[tuple[int, float]]:
    """Return a score by iteration.

    A run that is killed after its end is evaluated again, which is no further point.
    """
    curve = {}
    for line in evaluations:
        if not math.isnan(line[name]):
            curve[min(line["iteration"] + 1, last)] = round(line[name], 3)
    return list(curve.items())


def measure(folder: Path, requests: Mapping[str, RunRequest]) -> dict[str, Any]:
    """Measure :class:`.plan.Costs`; the iterations of the norms in turn, each as the median."""
    begin = time.perf_counter()
    start = 0.0
    trainers = {}
    for norm, request in requests.items():
        cfg = prepare(request).cfg
        trainer = Trainer(cfg, ignore_preflight=request.ignore_preflight)
        trainers[norm] = trainer
        start = start or time.perf_counter() - begin

    with spare_core(cfg.MODEL.DEVICE):  # as in a training
        times = step_seconds(trainers)
        evaluation = evaluation_seconds(trainer)
    return Costs(times, evaluation, start)._asdict()
