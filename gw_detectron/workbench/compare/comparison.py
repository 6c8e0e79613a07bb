"""Compare norms: what is asked, what is left after an interruption, and the results."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from ...atomic import remove_unfinished, write_json, write_text
from ...config import changed_config, flat_items
from ...errors import (
    ConfigError,
    RunError,
    check_minimum,
    existing_path,
    summarize_names,
)
from ...modeling.build import object_count_keys
from ...weights import open_start_weights
from ...weights.opening import local_file
from ...weights.reading import sha256_of
from ...weights.recording import software_versions
from ..console import safe_imports
from ..dataset.datasets_yaml import DATASETS_FILE
from ..dataset.layouts import YAML, is_layout
from ..dataset.registration import record_datasets
from ..dataset.source import own_sources
from ..report.html import write_page
from ..run import RunRequest, prepare
from ..run.checks import check_run
from ..run.folder import RESULT, lock_output
from ..run.request import DatasetFlags
from ..run.timing import LEAST_ITERATIONS
from ..signals import end_processes
from .jobs import measure, train
from .plan import SEARCH_SEED, Costs, Job, Plan, check_plan, norm_keys, schedule_keys
from .processes import PATIENCE, Processes, read_result, result_of
from .schedule import EXTENTS, Schedule, affordable
from .verdict import summarize
from .verdict_page import verdict_sections

PAGE = "comparison.html"
NUMBERS = "comparison.json"
SETTINGS = "settings.json"
RESULTS = "results.jsonl"
RECOMMENDED = "recommended.yaml"

Report = Callable[[str], object]


@dataclass(frozen=True)
class Comparison:
    """A comparison: of which norms, and how long.

    Args:
        base: the run that is repeated: its config, keys and flags. Its datasets choose the rates; its
            norms in the backbone, learning rate, schedule and seed are replaced.
        norms: see :func:`gw_detectron.workbench.compare.plan.norm_keys`.
        output: the folder; a comparison there is continued.
        scored: the datasets of the scored runs; None for those of ``base``.
        rates: learning rates to try; empty for half, once and twice the config's.
        iterations: of a scored run; 0 to derive them from ``minutes``.
        minutes: time for everything; 0 for no limit.
        seeds: scored runs of each norm; 0 means 3, and with ``minutes`` as many as the time allows.
        jobs: runs side by side.
        equal_time: also compare after equal time: faster norms are trained for more iterations.
    """

    base: RunRequest
    norms: Sequence[str]
    output: Path
    scored: DatasetFlags | None = None
    rates: Sequence[float] = ()
    iterations: int = 0
    minutes: float = 0.0
    seeds: int = 0
    jobs: int = 1
    equal_time: bool = True

    @property
    def folder(self) -> Path:
        return Path(self.output).absolute()

    def request(
        self, folder: Path, keys: Mapping[str, Any], *, scored: bool
    ) -> RunRequest:
        """Return a run in a folder: the keys come after the user's, except for periods."""
        data = self.base.data
        if scored and self.scored:
            data = self.scored
        opts = list(self.base.opts)
        for key, value in {**keys, "OUTPUT_DIR": str(folder)}.items():
            is_chosen = key.endswith("_PERIOD") and self.base.changes(key)
            if not is_chosen:
                opts += [key, value]
        return replace(self.base, data=data, opts=tuple(opts))


def compare(what: Comparison, report: Report = print) -> dict[str, Any]:
    """Compare norms; or continue, and finish the runs that an interruption has left.

    A script that calls it needs ``if __name__ == "__main__":``, as for any use of processes.
    ``report`` gets lines of progress. What is finished is kept if an error ends the comparison.

    Returns:
        The content of ``comparison.json``.

    Raises:
        ConfigError: a comparison is not possible, or the folder has another one.
        RunError: a run failed, or AP is 0 in all runs.
    """
    _check(what)
    cfg, datasets = _checked_config(what, report)
    if not what.rates:
        rate = cfg.SOLVER.BASE_LR
        what = replace(what, rates=(rate / 2, rate, rate * 2))
    processes = Processes(cfg.MODEL.DEVICE, what.jobs)

    with safe_imports(), contextlib.closing(lock_output(str(what.folder))):
        remove_unfinished(what.folder)
        begin = time.monotonic()
        what = _read_labels_once(what, cfg)
        inputs = {**_inputs(what, cfg), **datasets}
        settings = _settings(what, cfg, inputs, processes, report)
        costs = Costs(**settings["costs"])
        schedule = Schedule(
            _plan(what, settings["iterations"], costs),
            costs,
            settings["evaluations"],
            side_by_side=what.jobs,
            most_seeds=what.seeds,
            minutes=what.minutes,
            begin=begin,
            results=_finished_runs(what.folder),
        )
        report(_described(cfg, schedule))
        _run_all(what, cfg, schedule, processes, report)
        numbers = _conclude(what, cfg, schedule)

    if schedule.failed:
        raise RunError(
            f"{summarize_names(sorted(schedule.failed))}: a run failed; the other norms are "
            "compared. Fix: see the messages above; the same command tries the failed runs again."
        )
    return numbers


def _plan(what: Comparison, iterations: int, costs: Costs) -> Plan:
    return Plan(what.norms, what.rates, iterations, costs.times, what.equal_time)


def _described(cfg: CfgNode, schedule: Schedule) -> str:
    """Say how long the runs are, and how short those of the search for rates."""
    plan = schedule.plan
    text = f"Scored runs have {plan.iterations} iterations"
    if len(plan.rates) == 1:
        return f"{text}."
    first = plan.first_search
    images = sum(len(DatasetCatalog.get(name)) for name in cfg.DATASETS.TRAIN)
    batch = cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.ACCUMULATE
    return (
        f"{text}. The search for learning rates begins with {first} iterations, "
        f"{first * batch / images:.2g} passes over the {images} images: a rate that is best so "
        "early need not be the best one."
    )


def _check(what: Comparison) -> None:
    """Refuse what cannot be compared, before the config is read."""
    check_minimum("--jobs", what.jobs)
    check_minimum("--seeds", what.seeds, 0)
    if not what.iterations and not what.minutes > 0:
        raise ConfigError(
            "--minutes: neither a time nor --iterations given. Fix: give e.g. --minutes 60."
        )
    check_plan(what.norms, what.rates or [1.0], what.iterations or 2)
    gpus = what.base.num_gpus
    if gpus > 1:
        raise ConfigError(
            f"--num-gpus ({gpus}): each run uses one GPU. Fix: leave it out; --jobs {gpus} trains "
            f"on {gpus} GPUs, and SOLVER.IMS_PER_BATCH is the batch of one."
        )
    if what.scored:
        _check_scored(what.base.data, what.scored)


def _check_scored(search: DatasetFlags, scored: DatasetFlags) -> None:
    """Check the images that are scored, by the names of their flags."""
    if not search.val_json:
        raise ConfigError(
            "--test-json: needs --val-json for the rates, not --val-fraction or --datasets."
        )
    labels = existing_path("--test-json", scored.val_json or "", os.path.exists)
    if scored.val_images is not None or not is_layout(labels):
        existing_path("--test-images", scored.val_images or "", os.path.isdir)
    if labels.endswith(YAML):
        raise ConfigError(
            f"--test-json ('{labels}'): a data.yaml has photos to train and to choose the rates. Fix: give the "
            "folder of the labels to score on."
        )


def _checked_config(
    what: Comparison, report: Report
) -> tuple[CfgNode, dict[str, dict[str, str]]]:
    """Check each norm, and the images of --test-json.

    Returns:
        The config, whose datasets stay registered, and the digests of all datasets.
    """
    warnings: dict[str, None] = {}  # once each
    digests = {}
    if what.scored:
        tested = _config(what, scored=True)
        _check_norm(what, tested, what.norms[0], " with --test-json", warnings)
        digests["--test-json, "] = _dataset_digests(tested.DATASETS.TEST[0])

    cfg = _config(what, scored=False)  # replaces the datasets above
    for norm in what.norms:
        _check_norm(what, cfg, norm, "", warnings)
    for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST):
        digests[f"dataset '{name}', "] = _dataset_digests(name)

    for text in warnings:
        report(f"Warning: {text}")
    return cfg, digests


def _config(what: Comparison, *, scored: bool) -> CfgNode:
    cfg = prepare(what.request(what.folder, {}, scored=scored)).cfg
    if len(cfg.DATASETS.TEST) != 1:  # several have scores of their own, not one AP
        raise ConfigError(
            f"DATASETS.TEST ({cfg.DATASETS.TEST}): a comparison scores one dataset. Fix: add "
            "DATASETS.TEST \"('NAME',)\" with the name of one."
        )
    if not object_count_keys(cfg):
        raise ConfigError(
            f"--config-file ('{what.base.config_file}'): it detects no objects, so it has no AP."
        )
    return cfg


def _check_norm(
    what: Comparison, cfg: CfgNode, norm: str, images: str, warnings: dict[str, None]
) -> None:
    """Add what the checks of a norm find to the warnings, or raise the errors."""
    weights = open_start_weights(cfg.MODEL.WEIGHTS)
    found = check_run(changed_config(cfg, norm_keys(norm)), weights)
    errors = [f"{norm}{images}: {text}" for text in found.errors]
    if what.base.ignore_preflight:
        warnings |= dict.fromkeys(errors)
    else:
        found.errors = errors
        found.raise_errors()
    warnings |= dict.fromkeys(found.warnings)


def _read_labels_once(what: Comparison, cfg: CfgNode) -> Comparison:
    """Write labels that are not a COCO json to the comparison's folder, for all its runs."""
    sources = own_sources((*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST))
    if not any(source.labels.layout for source in sources.values()):
        return what
    scored = None
    if what.scored:
        scored = _write_labels(what, "scored")
    search = _write_labels(what, "search")  # the last images stay registered
    return replace(what, base=replace(what.base, data=search), scored=scored)


def _write_labels(what: Comparison, name: str) -> DatasetFlags:
    folder = what.folder / "labels" / name
    prepared = prepare(what.request(folder, {}, scored=name == "scored"))
    record_datasets(prepared.cfg, str(folder))
    return DatasetFlags(datasets=str(folder / DATASETS_FILE))


def _settings(
    what: Comparison,
    cfg: CfgNode,
    inputs: Mapping[str, Any],
    processes: Processes,
    report: Report,
) -> dict[str, Any]:
    """Return what the runs follow from: of the folder or, for a new comparison, measured."""
    asked = json.loads(json.dumps(inputs))
    path = what.folder / SETTINGS
    if path.exists():
        settings = json.loads(path.read_text())
        _check_same_inputs(what, settings.get("inputs", {}), asked)
        return settings

    begin = time.monotonic()
    costs = _measure(what, cfg, processes, report)
    iterations = what.iterations
    evaluations = EXTENTS[0][1]
    if not iterations:
        plan = _plan(what, 1000, costs)  # of any length
        on_gpu = cfg.MODEL.DEVICE != "cpu"  # where runs side by side slow each other
        workers = (1 + what.jobs) / 2 if on_gpu else what.jobs
        spent = time.monotonic() - begin
        iterations, evaluations = affordable(
            plan, costs, what.minutes, what.seeds, workers, spent
        )
    settings = {
        "inputs": asked,
        "iterations": iterations,
        "evaluations": evaluations,
        "costs": costs._asdict(),
    }
    write_json(path, settings)
    return settings


def _inputs(what: Comparison, cfg: CfgNode) -> dict[str, dict[str, Any]]:
    """Return what the results depend on beside the datasets, by groups and names."""
    asked = {"--norms": list(what.norms), "--rates": list(what.rates)}
    if what.iterations:
        asked["--iterations"] = what.iterations
    weights = local_file(cfg.MODEL.WEIGHTS)
    if weights:
        asked["the file of MODEL.WEIGHTS"] = sha256_of(weights)
    keys = changed_config(cfg, {"OUTPUT_DIR": ""})
    return {
        "": asked,
        "key ": dict(flat_items(keys)),
        "version of ": {**software_versions(), "platform": ""},  # the kernel's
    }


def _dataset_digests(name: str) -> dict[str, str]:
    """Return the folder and digests of a registered dataset; of its images, by size and time of change.

    To read the time takes some 10 us for an image, its pixels would take 10 ms.
    """
    annotations = hashlib.sha256()
    images = hashlib.sha256()
    for record in DatasetCatalog.get(name):
        text = json.dumps(record, sort_keys=True, default=str)
        annotations.update(text.encode())
        path = record["file_name"]
        if os.path.isfile(path):
            state = os.stat(path)
            images.update(f"{path} {state.st_size} {state.st_mtime_ns}".encode())
    return {
        "folder of the images": MetadataCatalog.get(name).get("image_root", ""),
        "annotations": annotations.hexdigest(),
        "image files (names, sizes, times)": images.hexdigest(),
    }


def _check_same_inputs(
    what: Comparison, earlier: dict[str, Any], asked: dict[str, Any]
) -> None:
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
            f"--output ('{what.folder}'): the comparison there has other "
            f"{summarize_names(differences, 6)}. Fix: give another folder, or what it was started with."
        )


def _measure(
    what: Comparison,
    cfg: CfgNode,
    processes: Processes,
    report: Report,
) -> Costs:
    """Time an iteration of each norm, an evaluation and the rest of a run, with nothing else running."""
    report(f"Timing an iteration of {len(what.norms)} norms, and a short run ...")
    folder = what.folder / "timing"
    requests = {}
    for norm in what.norms:
        keys = {**norm_keys(norm), "SOLVER.BASE_LR": 1e-6, "SEED": SEARCH_SEED}
        requests[norm] = what.request(folder, keys, scored=False)

    costs = Costs(**_wait(folder, processes.start(measure, folder, requests)))
    for norm, seconds in costs.times.items():
        report(f"  {norm}: {1000 * seconds:.0f} ms")
    if not what.minutes:
        return costs

    job = Job(what.norms[0], min(what.rates), SEARCH_SEED, LEAST_ITERATIONS)
    folder = folder / "run"
    begin = time.monotonic()
    _wait(folder, _start(what, cfg, job, 1, processes, folder))
    seconds = time.monotonic() - begin
    rest = seconds - costs.evaluation - job.iterations * costs.times[job.norm]
    return costs._replace(start=max(rest, costs.start))


def _wait(folder: Path, process: BaseProcess) -> dict[str, Any]:
    try:
        return result_of(folder, process)
    finally:
        end_processes([process], PATIENCE)


def _run_folder(what: Comparison, job: Job) -> Path:
    return what.folder / "runs" / job.name


def _finished_runs(folder: Path) -> dict[Job, dict[str, Any]]:
    """Return the results of earlier calls, once no run of a killed one is left."""
    for run in folder.glob("runs/*/"):
        # it ends at its next step
        with contextlib.closing(lock_output(str(run), wait=True)):
            pass
    results = {}
    for path in folder.glob(f"runs/*/{RESULT}"):
        result = read_result(path.parent)
        results[Job(*(result[name] for name in Job._fields))] = result
    return results


def _run_all(
    what: Comparison,
    cfg: CfgNode,
    schedule: Schedule,
    processes: Processes,
    report: Report,
) -> None:
    """Run what is not finished, some at a time."""
    running: dict[Job, BaseProcess] = {}
    try:
        while True:
            # also those that an interruption has left out
            _write_results(what, schedule)
            free = what.jobs - len(running)
            for job in schedule.waiting(running)[:free]:
                folder = _run_folder(what, job)
                running[job] = _start(
                    what, cfg, job, schedule.evaluations, processes, folder
                )
            if not running:
                return

            connection.wait([process.sentinel for process in running.values()])
            ended = [
                job for job, process in running.items() if process.exitcode is not None
            ]
            for job in ended:
                _take_result(what, schedule, job, running.pop(job), report)
    finally:
        end_processes(running.values(), PATIENCE)


def _start(
    what: Comparison,
    cfg: CfgNode,
    job: Job,
    evaluations: int,
    processes: Processes,
    folder: Path,
) -> BaseProcess:
    keys = {
        **norm_keys(job.norm),
        **schedule_keys(cfg, job.iterations, job.evaluations(evaluations)),
        "SOLVER.BASE_LR": job.rate,
        "SEED": job.seed,
    }
    request = what.request(folder, keys, scored=not job.is_search)
    return processes.start(train, folder, job, request)


def _take_result(
    what: Comparison, schedule: Schedule, job: Job, process: BaseProcess, report: Report
) -> None:
    try:
        result = result_of(_run_folder(what, job), process)
    except RunError as error:
        schedule.failed.add(job.norm)
        report(f"FAILED {error} {job.norm} is left out.")
        return

    schedule.results[job] = result
    score = f"{result['score']} {result['AP']:.1f}"
    end = "diverged: AP 0" if result["diverged"] else score
    minutes = schedule.seconds_left(schedule.seeds) / 60
    report(
        f"{job.norm}, rate {job.rate:g}, seed {job.seed}, {job.iterations} iterations: {end} "
        f"({result['seconds']:.0f} s). {len(schedule.results)} runs done, about {minutes:.0f} min "
        "left."
    )


def _write_results(what: Comparison, schedule: Schedule) -> None:
    """Write a line for each finished run of the plan, in its order."""
    lines = [json.dumps(result) + "\n" for result in schedule.in_order().values()]
    write_text(what.folder / RESULTS, "".join(lines))


def _conclude(what: Comparison, cfg: CfgNode, schedule: Schedule) -> dict[str, Any]:
    """Compare the norms without a failed run; write the page, the numbers and the config."""
    results = {
        job: result
        for job, result in schedule.in_order().items()
        if job.norm not in schedule.failed
    }
    if not results:
        raise RunError(
            "all norms failed, see the messages above. Fix: their causes; then repeat the command."
        )
    schedule.check_ap(results)

    plan = schedule.plan
    numbers = summarize(plan, results)
    sections = verdict_sections(numbers, plan, results)
    write_page(what.folder / PAGE, f"Comparison of {', '.join(plan.norms)}", sections)
    write_json(what.folder / NUMBERS, numbers)
    if numbers["recommended"]:
        _write_config(what.folder, cfg, **numbers["recommended"])
    return numbers


def _write_config(folder: Path, cfg: CfgNode, norm: str, rate: float) -> None:
    """Write the config to continue with: the given one with the norm and its rate."""
    keys = {"SOLVER.BASE_LR": rate, "OUTPUT_DIR": "output/recommended"}
    recommended = changed_config(cfg, {**norm_keys(norm), **keys})
    write_text(folder / RECOMMENDED, recommended.dump())
    record_datasets(cfg, str(folder))
