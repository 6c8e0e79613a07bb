"""The runs of a comparison: norms as keys, successive halving of rates, then the seeds."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from detectron2.config import CfgNode

from ...errors import ConfigError, check_minimum
from ...norms import check_positions, resolve_norm

SEARCH_SEED = 0  # of the learning rates; the scored seeds are 1, 2, ...
_SHORTEST = 4  # the first runs of the search have 1 / 4 of the iterations
# a run that would be longer by less than this factor counts as one of equal time
_SAME_TIME = 1.05


class Job(NamedTuple):
    """One training: of the search for rates, with its seed, or a scored one."""

    norm: str
    rate: float
    seed: int
    iterations: int

    @property
    def is_search(self) -> bool:
        return self.seed == SEARCH_SEED

    def evaluations(self, scored: int) -> int:
        """Return how often it is evaluated: once in the search, else as often as a scored run."""
        return 1 if self.is_search else scored

    @property
    def name(self) -> str:
        """A name for its folder."""
        name = f"{self.norm}_lr{self.rate:g}_s{self.seed}_i{self.iterations}"
        return re.sub(r"[^\w.+@=-]", "_", name)


def norm_keys(norm: str) -> dict[str, str]:
    """Return the config keys of a norm in the backbone.

    It is ``NORM``, a norm name; ``NORM+NORM@POSITIONS``, such as ``BN+GW@S1-B1``: the second norm
    at these positions; or one of the two with ``+WS``, for Weight Standardization. Anything else is
    a ConfigError.
    """
    where = f"--norms ('{norm}')"
    text = norm.removesuffix("+WS")
    names, at, positions = text.partition("@")
    base, plus, whitening = names.partition("+")
    is_single = not (plus or at)
    is_pair = bool(whitening and positions)
    if not (base and (is_single or is_pair)):
        raise ConfigError(
            f"{where}: not a norm. Fix: write e.g. GW, GN+WS, or BN+GW@S1-B1 for BN with GW at "
            "S1-B1."
        )
    check_positions(positions, where=where)
    resolve_norm(base, where=where)

    keys = {"MODEL.RESNETS.NORM": base, "MODEL.RESNETS.WHITEN_POSITIONS": positions}
    if whitening:
        resolve_norm(whitening, where=where)
        keys["MODEL.RESNETS.WHITEN_NORM"] = whitening
    keys["MODEL.RESNETS.CONV"] = "" if text == norm else "WS"
    return keys


def schedule_keys(cfg: CfgNode, iterations: int, evaluations: int) -> dict[str, Any]:
    """Return the schedule of a config, shortened or lengthened to a number of iterations.

    The steps keep their share. The warm-up does too, but keeps at least its own length or a tenth
    of the run. AP after the last iteration is compared, so there are no validation losses, best
    weights or patience.
    """
    solver = cfg.SOLVER
    factor = iterations / solver.MAX_ITER
    steps = {round(step * factor) for step in solver.STEPS}
    warm_up = min(solver.WARMUP_ITERS, iterations // 10)

    return {
        "SOLVER.MAX_ITER": iterations,
        "SOLVER.STEPS": tuple(step for step in sorted(steps) if 0 < step < iterations),
        "SOLVER.WARMUP_ITERS": max(round(solver.WARMUP_ITERS * factor), warm_up),
        "SOLVER.CHECKPOINT_PERIOD": max(
            1, min(solver.CHECKPOINT_PERIOD, iterations // 2)
        ),
        "TEST.EVAL_PERIOD": math.ceil(iterations / evaluations)
        if evaluations > 1
        else 0,
        "TEST.LOSS": False,
        "TEST.BEST": "",
        "TEST.PATIENCE": 0,
    }


class Costs(NamedTuple):
    """Measured seconds of an iteration of each norm, of an evaluation, and of a start."""

    times: Mapping[str, float]
    evaluation: float
    start: float

    def seconds(self, job: Job, evaluations: int) -> float:
        """Estimate a run; ``evaluations`` is the number in a scored run."""
        training = job.iterations * self.times[job.norm]
        return self.besides_training(job, evaluations) + training

    def besides_training(self, job: Job, evaluations: int) -> float:
        """Estimate start and evaluations of a run."""
        return self.start + job.evaluations(evaluations) * self.evaluation


def check_plan(norms: Sequence[str], rates: Sequence[float], iterations: int) -> None:
    """Raise ConfigError if a comparison cannot be planned with these values."""
    check_minimum("--iterations", iterations, 2)
    _check_list("--norms", norms, 2)
    _check_list("--rates", rates, 1)
    if not all(0 < rate < math.inf for rate in rates):
        raise ConfigError(
            f"--rates ({rates}): not all positive. Fix: give e.g. 0.005 0.01 0.02."
        )


def _check_list(flag: str, values: Sequence[Any], least: int) -> None:
    if len(set(values)) < max(least, len(values)):
        raise ConfigError(
            f"{flag} ({values}): needs {least} or more, each once. Fix: correct the list."
        )


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison.

    Args:
        norms: their names, see :func:`norm_keys`.
        rates: learning rates of the search.
        iterations: of the scored runs.
        times: seconds of an iteration of each norm.
        equal_time: also compare after equal time: faster norms are trained for more iterations.
    """

    norms: Sequence[str]
    rates: Sequence[float]
    iterations: int
    times: Mapping[str, float]
    equal_time: bool = True

    @property
    def first_search(self) -> int:
        """The iterations of the first runs of the search."""
        return max(1, self.iterations // _SHORTEST)

    def search(
        self, norm: str, ap: Mapping[Job, float]
    ) -> tuple[list[Job], float | None]:
        """Return the runs of the search so far, and the rate once it is chosen.

        The half of the rates with the highest AP goes on to runs of twice the length. Among runs
        of full length, the best one decides; of equal ones, the lowest rate.
        """
        rates = sorted(self.rates)
        jobs: list[Job] = []
        iterations = self.first_search
        while len(rates) > 1:
            length = min(iterations, self.iterations)
            rung = [Job(norm, rate, SEARCH_SEED, length) for rate in rates]
            jobs += rung
            if not all(job in ap for job in rung):
                return jobs, None

            rung.sort(key=lambda job: -ap[job])  # stable: the lowest rate first
            is_last = length == self.iterations
            kept = 1 if is_last else (len(rung) + 1) // 2
            rates = sorted(job.rate for job in rung[:kept])
            iterations *= 2
        return jobs, rates[0]

    def lengths(self, norm: str) -> list[int]:
        """Return the iterations of scored runs: equal ones, and those in equal time if longer."""
        lengths = [self.iterations]
        if self.equal_time:
            factor = max(self.times.values()) / self.times[norm]
            longer = round(self.iterations * factor)
            if longer > _SAME_TIME * self.iterations:
                lengths.append(longer)
        return lengths

    def jobs(self, ap: Mapping[Job, float], seeds: int) -> Iterator[Job]:
        """Yield the runs that are known so far, finished ones too, in their order."""
        rates = {}
        searches: list[Job] = []
        for norm in self.norms:
            jobs, rates[norm] = self.search(norm, ap)
            searches += jobs
        yield from sorted(searches, key=lambda job: job.iterations)

        for seed in range(SEARCH_SEED + 1, seeds + 1):
            for norm, rate in rates.items():
                if rate is not None:
                    for iterations in self.lengths(norm):
                        yield Job(norm, rate, seed, iterations)

    def all_jobs(self, seeds: int) -> list[Job]:
        """Return all runs, some with a rate in place of the one that will be chosen."""
        ap: dict[Job, float] = {}
        while True:
            known = list(self.jobs(ap, seeds))
            if len(known) == len(ap):
                return known
            ap = dict.fromkeys(known, 0.0)
