"""The results of a comparison of three norms, by a formula."""

import math

from gw_detectron.workbench.compare.plan import Job, Plan

NORMS = ("BN", "GN", "GW")
BEST = {"BN": 0.01, "GN": 0.02, "GW": 0.08}
TIMES = {"BN": 0.1, "GN": 0.1, "GW": 0.15}
_AP = {"BN": 20, "GN": 24, "GW": 30}


def finished(plan: Plan, seeds: int) -> dict[Job, float]:
    """Run a plan as the command does: what is known, until nothing is left."""
    ap: dict[Job, float] = {}
    while True:
        left = [job for job in plan.jobs(ap, seeds) if job not in ap]
        if not left:
            return ap
        # one at a time: the order of the ends must not matter
        ap[left[0]] = _ap_of(left[0])


def _ap_of(job: Job) -> float:
    """AP that grows with the length, with the same small effect of a seed on all norms."""
    wrong_rate = abs(math.log2(job.rate / BEST[job.norm]))
    longer = job.iterations / 100
    of_seed = 0.1 * job.seed**2
    ap = _AP[job.norm] + longer + of_seed
    return max(0.0, ap - 4 * wrong_rate)
