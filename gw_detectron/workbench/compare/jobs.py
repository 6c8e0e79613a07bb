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
from ..run.timing import evaluation_seconds, step_seconds
from .plan import Costs, Job


def train(folder: Path, job: Job, request: RunRequest) -> dict[str, Any]:
    """Train, or continue a training, and return its result.

    AP is AP@N if there is one, and 0 if a loss is not finite.
    """
    start = time.perf_counter()
    diverged = ""
    evaluated = {}
    try:
        evaluated = main(replace(request, resume=True)) or {}
    except NonFiniteError as error:
        diverged = first_line(error)

    scores = {
        task: _percent(evaluated[task]) for task in COCO_TASKS if task in evaluated
    }
    lines = read_metrics(folder / METRICS)
    name = _score_name(scores, lines)
    task, _, score = name.partition("/")
    return {
        **job._asdict(),
        "score": name,
        "AP": scores.get(task, {}).get(score, 0.0),
        "diverged": diverged,
        "scores": scores,
        "curve": _curve(lines, name, job.iterations),
        "seconds": round(time.perf_counter() - start, 1),
        "versions": software_versions(),
    }


def _percent(evaluation: Mapping[str, Any]) -> dict[str, float | None]:
    """Return an evaluation in percent, with None for NaN; AP is 0 without any detection."""
    scores = {
        name: None if math.isnan(value) else round(float(value), 3)
        for name, value in evaluation.items()
    }
    scores["AP"] = scores.get("AP") or 0.0
    return scores


def _score_name(scores: Mapping[str, Any], lines: list[dict[str, Any]]) -> str:
    """Return the name of the AP of the main task, also of a run that diverged after evaluations."""
    names = set().union(*lines)
    for task, values in scores.items():
        names |= {f"{task}/{score}" for score in values}
    main = "bbox"
    for task in COCO_TASKS:
        if f"{task}/AP" in names:
            main = task
    return ap_name(main, names)


def _curve(
    lines: list[dict[str, Any]], name: str, last: int
) -> list[tuple[int, float]]:
    """Return a score by iteration.

    A run that is killed after its end is evaluated again, which is no further point.
    """
    curve = {}
    for line in lines:
        value = line.get(name, math.nan)
        if not math.isnan(value):
            curve[min(line["iteration"] + 1, last)] = round(value, 3)
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

    times = step_seconds(trainers)
    return Costs(times, evaluation_seconds(trainer), start)._asdict()
