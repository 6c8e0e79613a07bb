"""The settings of a comparison's folder: what its runs follow from, and how long they are."""

import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from detectron2.config import CfgNode

from ...atomic import write_json
from ...config import changed_config, flat_items
from ...errors import ConfigError, summarize_names
from ...weights.opening import local_file
from ...weights.reading import sha256_of
from ...weights.recording import software_versions
from ..run.timing import LEAST_ITERATIONS
from .comparison import Comparison, Report
from .jobs import measure, train
from .plan import SEARCH_SEED, Costs, Job, Plan, norm_keys
from .processes import Processes
from .schedule import EXTENTS, affordable

SETTINGS = "settings.json"

#: what results depend on, by groups and names
Inputs = Mapping[str, Mapping[str, Any]]


class Settings(NamedTuple):
    """The length of scored runs, how often they are evaluated, and what the parts of a run cost."""

    iterations: int
    evaluations: int
    costs: Costs


def read_or_measure(
    comparison: Comparison,
    cfg: CfgNode,
    datasets: Inputs,
    processes: Processes,
    report: Report,
) -> Settings:
    """Return the settings of the folder or, for a new comparison, write them after a measurement.

    Raises:
        ConfigError: the comparison in the folder has other inputs; the error names them.
    """
    inputs = {**_inputs(comparison, cfg), **datasets}
    asked = json.loads(json.dumps(inputs))
    path = comparison.folder / SETTINGS
    if path.exists():
        written = json.loads(path.read_text())
        _check_same_inputs(comparison, written.get("inputs", {}), asked)
        costs = Costs(**written["costs"])
        return Settings(written["iterations"], written["evaluations"], costs)

    begin = time.monotonic()
    costs = _measure(comparison, cfg, processes, report)
    iterations = comparison.iterations
    evaluations = EXTENTS[0][1]
    if not iterations:
        # of any length
        plan = Plan(
            comparison.norms, comparison.rates, 1000, costs.times, comparison.equal_time
        )
        # runs side by side on a GPU slow each other
        on_gpu = cfg.MODEL.DEVICE != "cpu"
        workers = (1 + comparison.jobs) / 2 if on_gpu else comparison.jobs
        spent = time.monotonic() - begin
        iterations, evaluations = affordable(
            plan, costs, comparison.minutes, comparison.seeds, workers, spent
        )

    settings = Settings(iterations, evaluations, costs)
    values = {**settings._asdict(), "costs": costs._asdict()}
    write_json(path, {"inputs": asked, **values})
    return settings


def _inputs(comparison: Comparison, cfg: CfgNode) -> dict[str, dict[str, Any]]:
    """Return what the results depend on beside the datasets."""
    asked = {"--norms": list(comparison.norms), "--rates": list(comparison.rates)}
    if comparison.iterations:
        asked["--iterations"] = comparison.iterations
    weights = local_file(cfg.MODEL.WEIGHTS)
    if weights:
        asked["the file of MODEL.WEIGHTS"] = sha256_of(weights)
    keys = changed_config(cfg, {"OUTPUT_DIR": ""})
    return {
        "": asked,
        "key ": dict(flat_items(keys)),
        "version of ": {**software_versions(), "platform": ""},  # the kernel's
    }


def _check_same_inputs(comparison: Comparison, earlier: Inputs, asked: Inputs) -> None:
    """Refuse to continue a comparison whose runs would be others."""
    differences = []
    for group in {**earlier, **asked}:
        before = earlier.get(group, {})
        now = asked.get(group, {})
        for name in {**before, **now}:
            if before.get(name) != now.get(name):
                values = f"{before.get(name)!s:.40} -> {now.get(name)!s:.40}"
                differences.append(f"{group}{name} ({values})")
    if differences:
        raise ConfigError(
            f"--output ('{comparison.folder}'): the comparison there has other "
            f"{summarize_names(differences, 6)}. Fix: give another folder, or what it was started with."
        )


def _measure(
    comparison: Comparison, cfg: CfgNode, processes: Processes, report: Report
) -> Costs:
    """Time an iteration of each norm, an evaluation and the rest of a run, with nothing else running."""
    report(f"Timing an iteration of {len(comparison.norms)} norms, and a short run ...")
    folder = comparison.folder / "timing"
    requests = {}
    for norm in comparison.norms:
        keys = {**norm_keys(norm), "SOLVER.BASE_LR": 1e-6, "SEED": SEARCH_SEED}
        requests[norm] = comparison.request(folder, keys, scored=False)

    costs = Costs(**processes.run(measure, folder, requests))
    for norm, seconds in costs.times.items():
        report(f"  {norm}: {1000 * seconds:.0f} ms")
    if not comparison.minutes:
        return costs

    job = Job(comparison.norms[0], min(comparison.rates), SEARCH_SEED, LEAST_ITERATIONS)
    folder = folder / "run"
    begin = time.monotonic()
    processes.run(train, folder, job, comparison.job_request(folder, job, cfg, 1))
    seconds = time.monotonic() - begin
    rest = seconds - costs.evaluation - job.iterations * costs.times[job.norm]
    return costs._replace(start=max(rest, costs.start))
