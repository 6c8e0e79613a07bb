"""Which runs of a comparison come next, and what the time allows."""

import math
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError, RunError
from ..run.timing import LEAST_ITERATIONS, PLANNED_SHARE
from .plan import Costs, Job, Plan

SEEDS = 3
_MOST_SEEDS = 10
_TOLERANCE = 1.05  # of the time may be used by the last seed
#: of scored runs: seeds, evaluations; the first pair for which start and evaluations take at most a
#: third of the time, and the iterations are enough
EXTENTS = ((SEEDS, 4), (SEEDS, 2), (1, 2), (1, 1))


def affordable(
    plan: Plan,
    costs: Costs,
    minutes: float,
    seeds: int,
    workers: float,
    spent: float = 0.0,
) -> tuple[int, int]:
    """Return the iterations and evaluations of a scored run for which the time is enough.

    Args:
        plan: any number of iterations; they are replaced.
        minutes: the time for everything.
        seeds: scored runs of each norm; 0 to choose them, too.
        workers: how many runs end in the time of one, because they run side by side.
        spent: seconds that are gone already.
    """
    seconds = (PLANNED_SHARE * 60 * minutes - spent) * workers
    for chosen, evaluations in EXTENTS:
        runs = plan.all_jobs(seeds or chosen)
        fixed = sum(costs.besides_training(job, evaluations) for job in runs)
        training = sum(job.iterations * costs.times[job.norm] for job in runs)
        per_iteration = training / plan.iterations
        iterations = int((seconds - fixed) / per_iteration)
        if fixed <= seconds / 3 and iterations >= LEAST_ITERATIONS:
            break

    if iterations < LEAST_ITERATIONS:
        needed = fixed + per_iteration * LEAST_ITERATIONS
        least = math.ceil((needed / workers + spent) / (60 * PLANNED_SHARE))
        raise ConfigError(
            f"--minutes ({minutes:g}): not enough for {LEAST_ITERATIONS} iterations per run. Fix: "
            f"give {least} or more, fewer norms, --rates or validation images."
        )
    return iterations, evaluations


@dataclass
class Schedule:
    """The runs that are finished, those that are left, and their time.

    Args:
        plan: the runs.
        costs: their parts.
        evaluations: of a scored run.
        side_by_side: the number of runs at a time.
        most_seeds: scored runs of each norm; 0 for 3, or with ``minutes`` as many as the time
            allows.
        minutes: time for everything; 0 for no limit.
        begin: of the comparison, by time.monotonic().
        results: those of finished runs.
    """

    plan: Plan
    costs: Costs
    evaluations: int
    side_by_side: int
    most_seeds: int
    minutes: float
    begin: float
    results: dict[Job, dict[str, Any]]
    failed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.minutes:
            self.most_seeds = self.most_seeds or _MOST_SEEDS
            self.seeds = 1
        else:
            self.most_seeds = self.most_seeds or SEEDS
            self.seeds = self.most_seeds
        self.begin -= self._seconds_of_results() / self.side_by_side

    def _seconds_of_results(self) -> float:
        return sum(result["seconds"] for result in self.results.values())

    @property
    def ap(self) -> dict[Job, float]:
        """The AP of the finished runs."""
        return {job: result["AP"] for job, result in self.results.items()}

    def in_order(self) -> dict[Job, dict[str, Any]]:
        """Return the results of the runs of the plan, in its order."""
        planned = self.plan.jobs(self.ap, self.most_seeds)
        return {job: self.results[job] for job in planned if job in self.results}

    def waiting(self, running: Collection[Job]) -> list[Job]:
        """Return the runs that can start.

        There is a further seed if no run is left and the time allows it.
        """
        ap = self.ap
        norms = [norm for norm in self.plan.norms if norm not in self.failed]
        is_searching = any(self.plan.search(norm, ap)[1] is None for norm in norms)
        if not is_searching:
            self.check_ap(job for job in ap if job.is_search)

        begun = {*self.results, *running}
        while True:
            left = [
                job
                for job in self.plan.jobs(ap, self.seeds)
                if job.norm in norms and job not in begun
            ]
            if left or is_searching or not self._has_time_for_a_seed():
                return left
            self.seeds += 1

    def check_ap(self, jobs: Iterable[Job]) -> None:
        """Raise RunError if finished runs have AP 0, all of them."""
        aps = [self.results[job]["AP"] for job in jobs]
        if aps and not any(aps):
            raise RunError(
                f"AP is 0 in all {len(aps)} runs: nothing to compare. Fix: give more iterations or "
                "minutes, other --rates, or check the annotations by a single `gw-detectron train`."
            )

    def _has_time_for_a_seed(self) -> bool:
        if self.seeds >= self.most_seeds:
            return False
        passed = time.monotonic() - self.begin
        needed = passed + self.seconds_left(self.seeds + 1)
        return needed <= _TOLERANCE * 60 * self.minutes

    def seconds_left(self, seeds: int) -> float:
        """Estimate the time of unfinished runs from finished ones."""
        runs = [job for job in self.plan.all_jobs(seeds) if job.norm not in self.failed]
        total = self._estimate(runs)
        done = self._estimate(
            job for job in self.results if job.norm not in self.failed
        )
        measured = self._estimate(self.results)
        slower = self._seconds_of_results() / max(measured, 1e-9)
        return max(0.0, total - done) * slower / self.side_by_side

    def _estimate(self, jobs: Iterable[Job]) -> float:
        return sum(self.costs.seconds(job, self.evaluations) for job in jobs)
