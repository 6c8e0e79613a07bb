"""Time steps and evaluations before a run, and the iterations that a number of minutes allows."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from detectron2.evaluation import inference_context
from detectron2.utils import comm
from detectron2.utils.events import EventStorage

from ...errors import ConfigError
from .trainer import Trainer

_WARM_UP = 2
_ROUNDS = 15
_LEAST_ROUNDS = 3
_LONGEST = 30.0  # seconds of timing with more rounds than the least
_IMAGES = 8  # of a timed evaluation
LEAST_ITERATIONS = 20
_MOST_EVALUATIONS = 5
# a training from scratch with fewer of both has hardly begun to learn
_FEW_ITERATIONS = 500
_FEW_PASSES = 3
# of the time is planned; checkpoints and slower steps need the rest
PLANNED_SHARE = 0.95
# of the planned time that several evaluations may take
_EVALUATING_SHARE = 0.2


def step_seconds(
    trainers: Mapping[str, Trainer],
    average: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """Time the steps of trainers in turn; return the average of each.

    The steps change their weights, and the trainers take no further batch.
    """
    times: dict[str, list[float]] = {name: [] for name in trainers}
    begin = time.perf_counter()
    for iteration in range(_WARM_UP + _ROUNDS):
        is_enough = iteration >= _WARM_UP + _LEAST_ROUNDS
        if is_enough and _slowest(time.perf_counter() - begin) > _LONGEST:
            break
        for name, trainer in trainers.items():
            times[name].append(_one_step(trainer, iteration))

    for trainer in trainers.values():
        trainer.end_loading()
    return {
        name: _slowest(average(seconds[_WARM_UP:])) for name, seconds in times.items()
    }


def _one_step(trainer: Trainer, iteration: int) -> float:
    trainer.iter = iteration
    start = time.perf_counter()
    with EventStorage(iteration):
        trainer.run_step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _slowest(seconds: float) -> float:
    """Return the largest number of all processes, which then decide alike."""
    return max(comm.all_gather(seconds))


def evaluation_seconds(trainer: Trainer) -> float:
    """Estimate the seconds of an evaluation on all validation data from its first images."""
    seconds = 0.0
    for name in trainer.cfg.DATASETS.TEST:
        data = Trainer.build_test_loader(trainer.cfg, name)
        batches = list(itertools.islice(data, _IMAGES))
        # a first time compiles kernels
        _inference_seconds(trainer, batches[:1])
        passed = _inference_seconds(trainer, batches)
        seconds += passed * len(data) / len(batches)
    return _slowest(seconds)


def _inference_seconds(trainer: Trainer, batches: list[Any]) -> float:
    start = time.perf_counter()
    with inference_context(trainer.model), torch.no_grad():
        for batch in batches:
            trainer.model(batch)
    return time.perf_counter() - start


def check_minutes(minutes: float) -> None:
    """Raise ConfigError unless it is a time."""
    if not 0 < minutes < math.inf:
        raise ConfigError(
            f"--minutes ({minutes:g}): not a time above 0. Fix: give e.g. 60 for an hour."
        )


class Budget(NamedTuple):
    """What a number of minutes allows."""

    iterations: int
    evaluations: int
    reason: str


def budget_of(minutes: float, step: float, evaluation: float) -> Budget:
    """Return the iterations and evaluations that fit into minutes, from the seconds of each.

    Several evaluations take at most a fifth of the time, but there is one in any case.

    Raises:
        ConfigError: the time is not enough for 20 iterations and an evaluation.
    """
    seconds = PLANNED_SHARE * 60 * minutes
    for evaluations in range(_MOST_EVALUATIONS, 0, -1):
        spent = evaluations * evaluation
        iterations = int((seconds - spent) / step)
        if spent <= _EVALUATING_SHARE * seconds and iterations >= LEAST_ITERATIONS:
            break

    if iterations < LEAST_ITERATIONS:
        least = (evaluation + LEAST_ITERATIONS * step) / (60 * PLANNED_SHARE)
        raise ConfigError(
            f"--minutes ({minutes:g}): not enough for {LEAST_ITERATIONS} iterations of {_seconds(step)} and an "
            f"evaluation of {_seconds(evaluation)}. Fix: give {least + 0.05:.1f} or more, smaller images or fewer "
            "validation images."
        )
    number = (
        f"each of {evaluations} evaluations" if evaluations > 1 else "an evaluation"
    )
    reason = f"{minutes:g} min, an iteration takes {_seconds(step)}, {number} {_seconds(evaluation)}"
    return Budget(iterations, evaluations, reason)


def few_passes(
    budget: Budget, step: float, evaluation: float, epoch: float, usual: int = 0
) -> str:
    """Return a warning of a length that is much shorter than usual, or "".

    Args:
        step, evaluation: seconds.
        epoch: iterations of a pass over the images.
        usual: the iterations of the recipe; 0 if there is none.
    """
    passes = budget.iterations / epoch
    if usual:
        enough = usual
        is_short = budget.iterations < usual / 2
        why = f"fewer than half of the {usual:,} that --auto takes, so AP may be far lower"
    else:
        enough = min(_FEW_ITERATIONS, math.ceil(_FEW_PASSES * epoch))
        is_short = budget.iterations < enough
        why = "in which a detector from scratch hardly learns anything"
    if not is_short:
        return ""

    training = enough * step
    evaluating = training * _EVALUATING_SHARE / (1 - _EVALUATING_SHARE)
    seconds = training + max(evaluation, evaluating)
    minutes = math.ceil(seconds / (60 * PLANNED_SHARE))
    return (
        f"--minutes: {budget.iterations:,} iterations are {passes:.2g} passes over the images, {why}. Fix: give "
        f"{minutes} or more, smaller images (INPUT.MIN_SIZE_TRAIN, INPUT.MIN_SIZE_TEST) or a GPU."
    )


def _seconds(value: float) -> str:
    """Write a time with two digits."""
    return f"{float(f'{value:.2g}'):g} s"
