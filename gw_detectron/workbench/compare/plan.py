"""What a comparison of norms runs: the norms as config keys, successive halving of learning rates, then the seeds."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from detectron2.config import CfgNode

from ...errors import ConfigError, check_minimum
from ...norms import resolve_norm
from ...norms.positions import whitened_convs

SEARCH_SEED = 0  # of the learning rates; the scored seeds are 1, 2, ...
_SHORTEST = 4  # the first runs of the search have 1 / 4 of the iterations
_SAME_TIME = (
    1.05  # a run that would be longer by less than this factor counts as one of equal time
)


class Job(NamedTuple):
    """One training: of the search for rates, with its seed, or a scored one."""

    norm: str
    rate: float
    seed: int
    iterations: int

    def evaluations(self, scored: int) -> int:
        """Return how often it is evaluated: once in the search, else as often as a scored run."""
        return 1 if self.seed == SEARCH_SEED else scored

    @property
    def name(self) -> str:
        """A name for its folder."""
        return re.sub(
            r"[^\w.+@=-]", "_", f"{self.norm}_lr{self.rate:g}_s{self.seed}_i{self.iterations}"
        )


def norm_keys(norm: str) -> dict[str, str]:
    """Return the config keys of a norm in the backbone.

    It is ``NORM``, a norm name; ``NORM+NORM@POSITIONS``, such as ``BN+GW@S1-B1``: the second norm at these positions;
    or one of the two with ``+WS``, for Weight Standardization. Anything else is a ConfigError.
    """
    text, where = norm.removesuffix("+WS"), f"--norms ('{norm}')"
    text, at, positions = text.partition("@")
    base, plus, whitening = text.partition("+")
    if len({bool(at), bool(plus), bool(whitening), bool(positions)}) > 1 or not base:
        raise ConfigError(
            f"{where}: not a norm. Fix: write e.g. GW, GN+WS, or BN+GW@S1-B1 for BN with GW at S1-B1."
        )
    whitened_convs(positions, where=where)
    for each in filter(None, (base, whitening)):
        resolve_norm(each, where=where)
    keys = {"MODEL.RESNETS.NORM": base, "MODEL.RESNETS.WHITEN_POSITIONS": positions}
    if whitening:
        keys["MODEL.RESNETS.WHITEN_NORM"] = whitening
    return {**keys, "MODEL.RESNETS.CONV": "WS" if norm.endswith("+WS") else ""}


def schedule_keys(cfg: CfgNode, iterations: int, evaluations: int) -> dict[str, Any]:
    """Return the schedule of a config, shortened or lengthened to a number of iterations.

    The steps keep their share. The warm-up does too, but keeps at least its own length or a tenth of the run. AP after
    the last iteration is compared, so there are no validation losses, best weights or patience.
    """
    solver, factor = cfg.SOLVER, iterations / cfg.SOLVER.MAX_ITER
    return {
        "SOLVER.MAX_ITER": iterations,
        "SOLVER.STEPS": tuple(
            sorted({round(step * factor) for step in solver.STEPS} & set(range(1, iterations)))
        ),
        "SOLVER.WARMUP_ITERS": max(
            round(solver.WARMUP_ITERS * factor), min(solver.WARMUP_ITERS, iterations // 10)
        ),
        "SOLVER.CHECKPOINT_PERIOD": max(1, min(solver.CHECKPOINT_PERIOD, iterations // 2)),
        "TEST.EVAL_PERIOD": math.ceil(iterations / evaluations) if evaluations > 1 else 0,
        "TEST.LOSS": False,
        "TEST.BEST": "",
        "TEST.PATIENCE": 0,
    }


class Costs(NamedTuple):
    """Measured seconds: of an iteration of each norm, of an evaluation, and of the start of a run."""

    times: Mapping[str, float]
    evaluation: float
    start: float

    def seconds(self, job: Job, evaluations: int) -> float:
        """Estimate a run; ``evaluations`` is the number in a scored run."""
        return (
            self.start
            + job.evaluations(evaluations) * self.evaluation
            + job.iterations * self.times[job.norm]
        )


@dataclass(frozen=True)
class Plan:
    """The runs of a comparison.

    Args:
        norms: their names, see :func:`norm_keys`.
        rates: learning rates of the search.
        iterations: of the scored runs.
        times: seconds of an iteration of each norm, to compare after equal time too; empty for equal iterations only.
    """

    norms: Sequence[str]
    rates: Sequence[float]
    iterations: int
    times: Mapping[str, float]

    def __post_init__(self) -> None:
        check_minimum("--iterations", self.iterations, 2)
        for flag, values, least in (("--norms", self.norms, 2), ("--rates", self.rates, 1)):
            if len(set(values)) < max(least, len(values)):
                raise ConfigError(
                    f"{flag} ({values}): needs {least} or more, each once. Fix: correct the list."
                )
        if not all(0 < rate < math.inf for rate in self.rates):
            raise ConfigError(
                f"--rates ({self.rates}): not all positive. Fix: give e.g. 0.005 0.01 0.02."
            )

    def search(self, norm: str, ap: Mapping[Job, float]) -> tuple[list[Job], float | None]:
        """Return the runs of the search so far, and the rate once it is chosen.

        The half of the rates with the highest AP goes on to runs of twice the length; of equal ones, the lowest rate.
        """
        rates, jobs = sorted(self.rates), []
        iterations = self.iterations // _SHORTEST
        while len(rates) > 1:
            rung = [
                Job(norm, rate, SEARCH_SEED, max(1, min(iterations, self.iterations)))
                for rate in rates
            ]
            jobs += rung
            if not all(job in ap for job in rung):
                return jobs, None
            rung.sort(key=lambda job: -ap[job])  # stable: the lowest rate first
            rates = sorted(job.rate for job in rung[: (len(rung) + 1) // 2])
            iterations *= 2
        return jobs, rates[0]

    def lengths(self, norm: str) -> list[int]:
        """Return the iterations of a norm's scored runs: equal ones, and those in the time of the slowest norm."""
        longer = (
            round(self.iterations * max(self.times.values()) / self.times[norm])
            if self.times
            else 0
        )
        return [self.iterations, *([longer] if longer > _SAME_TIME * self.iterations else [])]

    def jobs(self, ap: Mapping[Job, float], seeds: int) -> Iterator[Job]:
        """Yield the runs that are known so far, finished ones too, in their order."""
        found = {norm: self.search(norm, ap) for norm in self.norms}
        searches = [job for jobs, _ in found.values() for job in jobs]
        yield from sorted(searches, key=lambda job: job.iterations)
        for seed in range(SEARCH_SEED + 1, seeds + 1):
            for norm, (_, rate) in found.items():
                if rate is not None:
                    yield from (
                        Job(norm, rate, seed, iterations) for iterations in self.lengths(norm)
                    )

    def runs(self, norm: str, seeds: int) -> list[Job]:
        """Return all runs of a norm, some with a rate in place of the one that will be chosen."""
        ap: dict[Job, float] = {}
        while self.search(norm, ap)[1] is None:
            ap = dict.fromkeys(self.search(norm, ap)[0], 0.0)
        seeds_and_lengths = itertools.product(
            range(SEARCH_SEED + 1, seeds + 1), self.lengths(norm)
        )
        return [*ap, *(Job(norm, self.rates[0], *each) for each in seeds_and_lengths)]
