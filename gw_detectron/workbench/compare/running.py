"""Compare norms: the runs, some side by side, what an interruption has left, and the results."""

import contextlib
import json
import time
from dataclasses import dataclass, replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog

from ...atomic import remove_unfinished, write_json, write_text
from ...config import changed_config
from ...errors import RunError, summarize_names
from ..console import safe_imports
from ..dataset.registration import record_datasets
from ..report.html import write_page
from ..run.folder import RESULT, lock_output
from ..signals import end_processes
from .comparison import Comparison, Report, check, read_labels_once
from .jobs import train
from .plan import Job, Plan, norm_keys
from .processes import PATIENCE, Processes, result_of, take_result
from .schedule import Schedule
from .settings import read_or_measure
from .verdict import summarize
from .verdict_page import verdict_sections

PAGE = "comparison.html"
NUMBERS = "comparison.json"
RESULTS = "results.jsonl"
RECOMMENDED = "recommended.yaml"


def compare(comparison: Comparison, report: Report = print) -> dict[str, Any]:
    """Compare norms; or continue, and finish the runs that an interruption has left.

    A script that calls it needs ``if __name__ == "__main__":``, as for any use of processes.
    ``report`` gets lines of progress. What is finished is kept if an error ends the comparison.

    Returns:
        The content of ``comparison.json``.

    Raises:
        ConfigError: a comparison is not possible, or the folder has another one.
        RunError: a run failed, or AP is 0 in all runs.
    """
    cfg, datasets = check(comparison, report)
    if not comparison.rates:
        rate = cfg.SOLVER.BASE_LR
        comparison = replace(comparison, rates=(rate / 2, rate, rate * 2))
    processes = Processes(cfg.MODEL.DEVICE, comparison.jobs)

    with safe_imports(), contextlib.closing(lock_output(str(comparison.folder))):
        remove_unfinished(comparison.folder)
        begin = time.monotonic()
        comparison = read_labels_once(comparison, cfg)
        settings = read_or_measure(comparison, cfg, datasets, processes, report)
        costs = settings.costs
        plan = Plan(
            comparison.norms,
            comparison.rates,
            settings.iterations,
            costs.times,
            comparison.equal_time,
        )
        schedule = Schedule(
            plan,
            costs,
            settings.evaluations,
            side_by_side=comparison.jobs,
            most_seeds=comparison.seeds,
            minutes=comparison.minutes,
            begin=begin,
            results=_finished_runs(comparison.folder),
        )
        report(_described(cfg, plan))
        runs = _Runs(comparison, cfg, schedule, report)
        runs.run_all(processes)
        numbers = runs.conclude()

    if schedule.failed:
        raise RunError(
            f"{summarize_names(sorted(schedule.failed))}: a run failed; the other norms are "
            "compared. Fix: see the messages above; the same command tries the failed runs again."
        )
    return numbers


def _finished_runs(folder: Path) -> dict[Job, dict[str, Any]]:
    """Return the results of earlier calls, once no run of a killed one is left."""
    for run in folder.glob("runs/*/"):
        # it ends at its next step
        with contextlib.closing(lock_output(str(run), wait=True)):
            pass
    results = {}
    for path in folder.glob(f"runs/*/{RESULT}"):
        result = take_result(path.parent)
        results[Job(*(result[name] for name in Job._fields))] = result
    return results


def _described(cfg: CfgNode, plan: Plan) -> str:
    """Say how long the runs are, and how short those of the search for rates."""
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


@dataclass
class _Runs:
    """The runs of a schedule, their results and the folder of both."""

    comparison: Comparison
    cfg: CfgNode
    schedule: Schedule
    report: Report

    def run_all(self, processes: Processes) -> None:
        """Run what is not finished, some at a time."""
        running: dict[Job, BaseProcess] = {}
        try:
            while True:
                # also those that an interruption has left out
                self._write_results()
                free = self.comparison.jobs - len(running)
                for job in self.schedule.waiting(running)[:free]:
                    running[job] = self._start(job, processes)
                if not running:
                    return

                connection.wait([process.sentinel for process in running.values()])
                ended = [
                    job
                    for job, process in running.items()
                    if process.exitcode is not None
                ]
                for job in ended:
                    self._take_result(job, running.pop(job))
        finally:
            end_processes(running.values(), PATIENCE)

    def _folder(self, job: Job) -> Path:
        return self.comparison.folder / "runs" / job.name

    def _start(self, job: Job, processes: Processes) -> BaseProcess:
        folder = self._folder(job)
        evaluations = self.schedule.evaluations
        request = self.comparison.job_request(folder, job, self.cfg, evaluations)
        return processes.start(train, folder, job, request)

    def _take_result(self, job: Job, process: BaseProcess) -> None:
        schedule = self.schedule
        try:
            result = result_of(self._folder(job), process)
        except RunError as error:
            schedule.failed.add(job.norm)
            self.report(f"FAILED {error} {job.norm} is left out.")
            return

        schedule.results[job] = result
        score = f"{result['score']} {result['AP']:.1f}"
        end = "diverged: AP 0" if result["diverged"] else score
        minutes = schedule.seconds_left(schedule.seeds) / 60
        self.report(
            f"{job.norm}, rate {job.rate:g}, seed {job.seed}, {job.iterations} iterations: {end} "
            f"({result['seconds']:.0f} s). {len(schedule.results)} runs done, about {minutes:.0f} min "
            "left."
        )

    def _write_results(self) -> None:
        """Write a line for each finished run of the plan, in its order."""
        results = self.schedule.in_order().values()
        lines = [json.dumps(result) + "\n" for result in results]
        write_text(self.comparison.folder / RESULTS, "".join(lines))

    def conclude(self) -> dict[str, Any]:
        """Compare the norms without a failed run; write the page, the numbers and the config."""
        schedule = self.schedule
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

        folder = self.comparison.folder
        plan = schedule.plan
        numbers = summarize(plan, results)
        sections = verdict_sections(numbers, plan, results)
        write_page(folder / PAGE, f"Comparison of {', '.join(plan.norms)}", sections)
        write_json(folder / NUMBERS, numbers)
        if numbers["recommended"]:
            self._write_config(**numbers["recommended"])
        return numbers

    def _write_config(self, norm: str, rate: float) -> None:
        """Write the config to continue with: the given one with the norm and its rate."""
        keys = {"SOLVER.BASE_LR": rate, "OUTPUT_DIR": "output/recommended"}
        recommended = changed_config(self.cfg, {**norm_keys(norm), **keys})
        write_text(self.comparison.folder / RECOMMENDED, recommended.dump())
        record_datasets(self.cfg, str(self.comparison.folder))
