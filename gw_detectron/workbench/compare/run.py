"""Run a comparison: its processes side by side, what is left after an interruption, and its results."""

import contextlib
import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog

from ...atomic import atomic_write, remove_unfinished
from ...config import changed_config
from ...errors import ConfigError, RunError, check_minimum, summarize_names
from ...modeling.build import object_count_keys
from ...weights import open_start_weights
from ...weights.opening import local_file
from ...weights.reading import sha256_of
from ..console import safe_imports
from ..dataset.datasets_yaml import existing_path, record_datasets
from ..dataset.source import registered_datasets
from ..run.config_checks import preflight
from ..run.folder import lock_output
from ..run.train import run_config, use_recipe
from .job import (
    LOG,
    PATIENCE,
    RESULT,
    engine_args,
    measure,
    read_result,
    run_in_process,
    train,
    write_json,
)
from .page import write_comparison
from .plan import SEARCH_SEED, Costs, Job, Plan, norm_keys, schedule_keys

SETTINGS, RESULTS, RECOMMENDED = "settings.json", "results.jsonl", "recommended.yaml"
_SEEDS, _MOST_SEEDS = 3, 10
_LEAST_ITERATIONS = 20
_SHARE = 0.9  # of the time is planned
#: of scored runs: seeds, evaluations; the first pair for which start and evaluations take at most a third of the time
_EXTENTS = ((_SEEDS, 4), (_SEEDS, 2), (1, 2), (1, 1))
_CONTEXT = multiprocessing.get_context(
    "forkserver"
)  # processes that start with the imports done, and without CUDA


@dataclass(frozen=True)
class Comparison:
    """What to compare, and how long.

    Args:
        config_file: the config; its norms in the backbone are replaced.
        norms: see :func:`gw_detectron.workbench.compare.plan.norm_keys`.
        output: the folder; a comparison there is continued.
        flags: further flags of ``gw-detectron train`` by their names, such as ``train_json``.
        opts: config keys for all runs, as KEY VALUE KEY VALUE.
        test: ``val_json`` and ``val_images`` of the images that are scored; empty for those that choose the rates.
        rates: learning rates to try; empty for half, once and twice the config's.
        iterations: of a scored run; 0 to derive them from ``minutes``.
        minutes: time for everything; 0 for no limit.
        seeds: scored runs of each norm; 0 means 3, and with ``minutes`` as many as the time allows.
        jobs: runs side by side.
        equal_time: also compare after equal time: faster norms are trained for more iterations.
    """

    config_file: str
    norms: Sequence[str]
    output: Path
    flags: Mapping[str, Any] = field(default_factory=dict)
    opts: Sequence[str] = ()
    test: Mapping[str, str] = field(default_factory=dict)
    rates: Sequence[float] = ()
    iterations: int = 0
    minutes: float = 0.0
    seeds: int = 0
    jobs: int = 1
    equal_time: bool = True


def compare(what: Comparison, report: Callable[[str], object] = print) -> dict[str, Any]:
    """Compare norms; or continue, and finish the runs that an interruption has left.

    A script that calls it needs ``if __name__ == "__main__":``, as for any use of processes. ``report`` gets lines of
    progress. What is finished is kept if an error ends the comparison.

    Returns:
        The content of ``comparison.json``.

    Raises:
        ConfigError: what cannot be compared, or the folder has another comparison.
        RunError: a run failed, or AP is 0 in all runs.
    """
    check_minimum("--jobs", what.jobs)
    check_minimum("--seeds", what.seeds, 0)
    if not what.iterations and not what.minutes > 0:
        raise ConfigError(
            "--minutes: neither a time nor --iterations given. Fix: give e.g. --minutes 60."
        )
    if (gpus := what.flags.get("num_gpus", 1)) > 1:
        fix = f"leave it out; --jobs {gpus} trains on {gpus} GPUs, and SOLVER.IMS_PER_BATCH is the batch of one"
        raise ConfigError(f"--num-gpus ({gpus}): each run uses one GPU. Fix: {fix}.")
    runs = _Runs(what, report)
    with safe_imports(), contextlib.closing(lock_output(str(runs.folder))):
        runs.prepare()
        runs.finish()
        results = {
            job: found
            for job, found in runs.write_results().items()
            if job.norm not in runs.failed
        }
        if not results:
            raise RunError(
                "all norms failed, see the messages above. Fix: their causes; then repeat the command."
            )
        runs.check_ap(results)
        numbers = write_comparison(runs.folder, runs.plan, runs.costs.times, results)
        if recommended := numbers["recommended"]:
            runs.write_config(recommended["norm"], recommended["rate"])
    if runs.failed:
        raise RunError(
            f"{summarize_names(sorted(runs.failed))}: a run failed; the other norms are compared. Fix: see the "
            "messages above; the same command tries the failed runs again."
        )
    return numbers


class _Runs:
    """The state of a comparison: its configs, plan and results."""

    def __init__(self, what: Comparison, report: Callable[[str], object]) -> None:
        self.what, self.report, self.folder = what, report, Path(what.output).absolute()
        Plan(
            what.norms, what.rates or [1.0], what.iterations or 2, {}
        )  # refuses what it cannot use
        if what.test:
            if not what.flags.get("val_json"):
                raise ConfigError(
                    "--test-json: needs --val-json for the rates, not --val-fraction or --datasets."
                )
            for part, exists in (("json", os.path.isfile), ("images", os.path.isdir)):
                existing_path(what.test.get(f"val_{part}", ""), f"--test-{part}", exists)
        self.cfg = self._checked_config()
        base = self.cfg.SOLVER.BASE_LR
        self.rates = list(what.rates) or [base / 2, base, base * 2]
        self.results: dict[Job, dict[str, Any]] = {}
        self.failed: set[str] = set()
        gpus = torch.cuda.device_count() if self.cfg.MODEL.DEVICE != "cpu" else 0
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        self.gpus: list[str | None] = [*visible.split(",")[:gpus]] if gpus > 1 else [None]
        self.threads = int(os.environ.get("OMP_NUM_THREADS") or 0) or max(
            1, torch.get_num_threads() // what.jobs
        )
        self.most = what.seeds or (_MOST_SEEDS if what.minutes else _SEEDS)
        self.seeds = 1 if what.minutes else self.most

    def _checked_config(self) -> CfgNode:
        """Return the config, once the images of --test-json and each norm are checked; repeated warnings show once."""
        warnings: dict[str, None] = {}
        for scored in (
            (True, False) if self.what.test else (False,)
        ):  # the last images stay registered
            args = engine_args(self._flags(scored), self._opts(self.folder, {}))
            cfg = run_config(args)
            use_recipe(cfg, args)
            if len(cfg.DATASETS.TEST) != 1:  # several have scores of their own, not one AP
                fix = "add DATASETS.TEST \"('NAME',)\" with the name of one"
                raise ConfigError(
                    f"DATASETS.TEST ({cfg.DATASETS.TEST}): a comparison scores one dataset. Fix: {fix}."
                )
            if not object_count_keys(cfg):
                raise ConfigError(
                    f"--config-file ('{self.what.config_file}'): it detects no objects, so it has no AP."
                )
            for norm in self.what.norms[:1] if scored else self.what.norms:
                found = preflight(
                    changed_config(cfg, norm_keys(norm)), open_start_weights(cfg.MODEL.WEIGHTS)
                )
                found.errors = [
                    f"{norm}{' with --test-json' if scored else ''}: {text}"
                    for text in found.errors
                ]
                if not self.what.flags.get("ignore_preflight"):
                    found.raise_errors()
                warnings |= dict.fromkeys(found.errors + found.warnings)
        for text in warnings:
            self.report(f"Warning: {text}")
        return cfg

    def prepare(self) -> None:
        """Measure the norms and fix the plan; or read both from the folder."""
        os.environ.setdefault(
            "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
        )  # a look for GPUs must not start CUDA before a fork
        _CONTEXT.set_forkserver_preload(["gw_detectron.workbench.compare.job"])
        remove_unfinished(self.folder)
        asked: dict[str, Any] = {"norms": list(self.what.norms), "rates": self.rates}
        asked |= {"flags": dict(self.what.flags), "test": dict(self.what.test)}
        data = {
            name: MetadataCatalog.get(name)
            for name in (*self.cfg.DATASETS.TRAIN, *self.cfg.DATASETS.TEST)
        }
        files = {
            name: each.get("source") or each.get("json_file") for name, each in data.items()
        }
        files |= {
            "--test-json": self.what.test.get("val_json"),
            "MODEL.WEIGHTS": local_file(self.cfg.MODEL.WEIGHTS),
        }
        asked["data"] = {
            name: sha256_of(path)
            for name, path in files.items()
            if path and os.path.isfile(path)
        }
        asked["config"] = changed_config(self.cfg, {"OUTPUT_DIR": ""}).dump()
        if self.what.iterations:
            asked["iterations"] = self.what.iterations
        path = self.folder / SETTINGS
        settings = json.loads(path.read_text()) if path.exists() else {}
        if settings and (
            other := [key for key, value in asked.items() if settings.get(key) != value]
        ):
            raise ConfigError(
                f"--output ('{self.folder}'): has a comparison with other values of {', '.join(other)}. Fix: give "
                "another folder, or the values of that comparison."
            )
        if not settings:
            costs, iterations, evaluations = (
                self._measure(),
                self.what.iterations,
                _EXTENTS[0][1],
            )
            if not iterations:
                iterations, evaluations = self._affordable(costs)
            settings = {
                **asked,
                "iterations": iterations,
                "evaluations": evaluations,
                "costs": costs._asdict(),
            }
            write_json(path, settings)
        self.costs, self.evaluations = Costs(**settings["costs"]), settings["evaluations"]
        times = self.costs.times if self.what.equal_time else {}
        self.plan = Plan(self.what.norms, self.rates, settings["iterations"], times)
        for run in self.folder.glob(
            "runs/*/"
        ):  # a killed comparison's runs end at their next step
            lock_output(str(run), wait=True).close()
        for found in self.folder.glob(f"runs/*/{RESULT}"):
            result = read_result(found.parent)
            self.results[Job(*(result[name] for name in Job._fields))] = result
        self.start = (
            time.monotonic()
            - sum(result["seconds"] for result in self.results.values()) / self.what.jobs
        )

    def _measure(self) -> Costs:
        """Time an iteration of each norm and an evaluation, with nothing else running."""
        self.report(f"Timing an iteration of {len(self.what.norms)} norms ...")
        folder = self.folder / "timing"
        keys = {"SOLVER.BASE_LR": 1e-6, "SEED": SEARCH_SEED}
        opts = {
            norm: self._opts(folder, {**norm_keys(norm), **keys}) for norm in self.what.norms
        }
        (folder / RESULT).unlink(missing_ok=True)
        process = self._start(measure, folder, self._flags(scored=False), opts)
        try:
            process.join()
        finally:
            _stop([process])
        costs = Costs(**_result(folder, process))
        self.report(
            "\n".join(
                f"  {norm}: {1000 * seconds:.0f} ms" for norm, seconds in costs.times.items()
            )
        )
        return costs

    def _affordable(self, costs: Costs) -> tuple[int, int]:
        """Return the iterations and evaluations of a scored run for which the time is enough."""
        on_gpu = self.cfg.MODEL.DEVICE != "cpu"  # where runs side by side slow each other
        workers = (1 + self.what.jobs) / 2 if on_gpu else self.what.jobs
        seconds = _SHARE * 60 * self.what.minutes * workers
        plan = Plan(
            self.what.norms, self.rates, 1000, costs.times if self.what.equal_time else {}
        )
        for seeds, evaluations in _EXTENTS:
            runs = [
                job for norm in plan.norms for job in plan.runs(norm, self.what.seeds or seeds)
            ]
            fixed = sum(costs.seconds(job._replace(iterations=0), evaluations) for job in runs)
            if fixed <= seconds / 3:
                break
        thousand = sum(costs.seconds(job, evaluations) for job in runs) - fixed
        iterations = int(1000 * (seconds - fixed) / thousand)
        if iterations < _LEAST_ITERATIONS:
            least = (fixed + thousand * _LEAST_ITERATIONS / 1000) / (60 * workers * _SHARE)
            raise ConfigError(
                f"--minutes ({self.what.minutes:g}): not enough for {_LEAST_ITERATIONS} iterations per run. "
                f"Fix: give {math.ceil(least)} or more, fewer norms, --rates or validation images."
            )
        return iterations, evaluations

    def _flags(self, scored: bool) -> dict[str, Any]:
        images = self.what.test if scored else {}
        return {**self.what.flags, **images, "config_file": self.what.config_file}

    def _opts(self, folder: Path, keys: Mapping[str, Any]) -> list[Any]:
        """Return config keys as words: periods, then the user's keys, then the run's."""
        given = {
            key: value
            for key, value in keys.items()
            if not (key.endswith("_PERIOD") and key in self.what.opts)
        }
        words = [word for pair in {**given, "OUTPUT_DIR": str(folder)}.items() for word in pair]
        return [*self.what.opts, *words]

    def _start(self, work: Callable[..., Any], folder: Path, *args: Any) -> BaseProcess:
        (folder / LOG).unlink(missing_ok=True)  # an earlier attempt's
        running: list[str | None] = [
            process.name for process in multiprocessing.active_children()
        ]
        gpu = min(self.gpus, key=running.count)
        process = _CONTEXT.Process(
            target=run_in_process, name=gpu, args=(work, folder, self.threads, gpu, *args)
        )
        process.start()
        return process

    def finish(self) -> None:
        """Run what is not finished, some at a time."""
        running: dict[Job, BaseProcess] = {}
        try:
            while True:
                self.write_results()  # also those that an interruption has left out
                for job in self._waiting(running)[: self.what.jobs - len(running)]:
                    schedule = schedule_keys(
                        self.cfg, job.iterations, job.evaluations(self.evaluations)
                    )
                    keys = {
                        **norm_keys(job.norm),
                        **schedule,
                        "SOLVER.BASE_LR": job.rate,
                        "SEED": job.seed,
                    }
                    folder = self.folder / "runs" / job.name
                    flags = self._flags(job.seed != SEARCH_SEED)
                    running[job] = self._start(
                        train, folder, job, flags, self._opts(folder, keys)
                    )
                if not running:
                    return
                connection.wait([process.sentinel for process in running.values()])
                for job in [
                    job for job, process in running.items() if process.exitcode is not None
                ]:
                    self._ended(job, running.pop(job))
        finally:
            _stop(running.values())

    def _waiting(self, running: Collection[Job]) -> list[Job]:
        ap = {job: result["AP"] for job, result in self.results.items()}
        searching = {norm for norm in self.plan.norms if self.plan.search(norm, ap)[1] is None}
        if not searching:
            self.check_ap(job for job in ap if job.seed == SEARCH_SEED)
        while True:
            open_jobs = [
                job for job in self.plan.jobs(ap, self.seeds) if job not in self.results
            ]
            left = [
                job for job in open_jobs if job not in running and job.norm not in self.failed
            ]
            if left or searching - self.failed or self.seeds >= self.most:
                return left
            if (
                time.monotonic() - self.start + self._seconds_left(self.seeds + 1)
                > 60 * self.what.minutes
            ):
                return left
            self.seeds += 1

    def check_ap(self, jobs: Iterable[Job]) -> None:
        """Raise RunError if finished runs have AP 0, all of them."""
        found = [self.results[job]["AP"] for job in jobs]
        if found and not any(found):
            raise RunError(
                f"AP is 0 in all {len(found)} runs: nothing to compare. Fix: give more iterations or minutes, other "
                "--rates, or check the annotations by a single `gw-detectron train`."
            )

    def _seconds_left(self, seeds: int) -> float:
        """Estimate the time of unfinished runs from finished ones."""
        done = sum(self.costs.seconds(job, self.evaluations) for job in self.results)
        seconds = sum(result["seconds"] for result in self.results.values())
        runs = [
            job
            for norm in self.plan.norms
            if norm not in self.failed
            for job in self.plan.runs(norm, seeds)
        ]
        total = sum(self.costs.seconds(job, self.evaluations) for job in runs)
        return max(0.0, total - done) * seconds / max(done, 1e-9) / self.what.jobs

    def _ended(self, job: Job, process: BaseProcess) -> None:
        try:
            result = self.results[job] = _result(self.folder / "runs" / job.name, process)
        except RunError as error:
            self.failed.add(job.norm)
            self.report(f"FAILED {error} {job.norm} is left out.")
            return
        end = (
            "diverged: AP 0" if result["diverged"] else f"{result['score']} {result['AP']:.1f}"
        )
        self.report(
            f"{job.norm}, rate {job.rate:g}, seed {job.seed}, {job.iterations} iterations: {end} "
            f"({result['seconds']:.0f} s). {len(self.results)} runs done, about "
            f"{self._seconds_left(self.seeds) / 60:.0f} min left."
        )

    def write_config(self, norm: str, rate: float) -> None:
        """Write the config to continue with: the norm and its rate, with the schedule of the given config."""
        cfg = changed_config(
            self.cfg,
            {**norm_keys(norm), "SOLVER.BASE_LR": rate, "OUTPUT_DIR": "output/recommended"},
        )
        with atomic_write(self.folder / RECOMMENDED) as temporary:
            temporary.write_text(cfg.dump())
        record_datasets(
            registered_datasets(cfg.DATASETS.TRAIN, cfg.DATASETS.TEST), str(self.folder)
        )

    def write_results(self) -> dict[Job, dict[str, Any]]:
        """Write the lines of the finished runs of the plan, in its order; return them."""
        known = self.plan.jobs(
            {job: found["AP"] for job, found in self.results.items()}, self.most
        )
        results = {job: self.results[job] for job in known if job in self.results}
        with atomic_write(self.folder / RESULTS) as temporary:
            temporary.write_text(
                "".join(json.dumps(result) + "\n" for result in results.values())
            )
        return results


def _stop(processes: Collection[BaseProcess]) -> None:
    """End processes; a training writes a checkpoint first."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(PATIENCE)
        process.kill()
        process.join()


def _result(folder: Path, process: BaseProcess) -> dict[str, Any]:
    """Return the result of a process that has ended, or raise the error that has ended it."""
    process.join()
    if (folder / RESULT).exists():  # the exit status may be a loader worker's
        return read_result(folder)
    log, code = folder / LOG, process.exitcode or 0
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    reason = text.rpartition("\nError: " if "\nError: " in text else "\n")[2]
    if code < 0:
        reason = f"killed by signal {-code} ({signal.strsignal(-code)}). Fix: if memory was full, lower --jobs"
    elif not text:
        reason = 'no output. Fix: see the messages above; a script has to call it under if __name__ == "__main__"'
    raise RunError(f"{reason} (log: {log}).")
