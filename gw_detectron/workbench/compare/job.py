"""Entry points of a comparison's processes: one training, or the timing of all norms."""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import parent_process
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import torch
from detectron2.evaluation import inference_on_dataset
from detectron2.utils.events import EventStorage

from ...atomic import atomic_write
from ...errors import NonFiniteError, first_line
from ...weights.recording import software_versions
from ..console import errors_reported
from ..run import Trainer, get_parser, main
from ..run.folder import METRICS, read_metrics
from ..run.train import run_config, use_recipe
from .plan import Costs, Job

LOG, RESULT = "process.txt", "result.json"
PATIENCE = 60.0  # seconds for the checkpoint of a run that is stopped
#: tasks, the main one last
TASKS = ("bbox", "segm", "keypoints")
_WARM_UP, _ROUNDS, _LEAST_ROUNDS = 2, 15, 3
_LONGEST = 30.0  # seconds of timing with more rounds than the least
_IMAGES = 8  # of a timed evaluation


def engine_args(flags: Mapping[str, Any], opts: list[Any]) -> argparse.Namespace:
    """Return the arguments of a run from flags that differ from the defaults, and config keys."""
    return argparse.Namespace(**{**vars(get_parser().parse_args([])), **flags, "opts": opts})


def run_in_process(
    work: Callable[..., Any], folder: Path, threads: int, gpu: str | None, *args: Any
) -> None:
    """Do a part of a comparison in a new process: its output goes to a file, and it ends with its parent."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    multiprocessing.set_start_method(
        None, force=True
    )  # the loaders' workers are forked, as in any other training
    torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with errors_reported():
        write_json(folder / RESULT, work(folder, *args))


def _end_with_parent() -> None:
    """Stop with a checkpoint when the comparison was killed, so that the next call finds no one in the folder."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), SIGTERM)
        time.sleep(PATIENCE)
        os.kill(os.getpid(), SIGKILL)


def write_json(path: Path, content: Any) -> None:
    """Write a json file atomically."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


def read_result(folder: Path) -> dict[str, Any]:
    """Return a result, and remove the gigabytes beside it, which serve only to continue a run without one."""
    result = json.loads((folder / RESULT).read_text())
    for name in ("inference", "datasets"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for checkpoint in (*folder.glob("*.pth"), folder / "last_checkpoint"):
        checkpoint.unlink(missing_ok=True)
    return result


def train(folder: Path, job: Job, flags: Mapping[str, Any], opts: list[Any]) -> dict[str, Any]:
    """Train, or continue a training, and return its result. AP is AP@N if there is one, 0 if a loss is not finite."""
    start, diverged, found = time.perf_counter(), "", {}
    try:
        found = main(engine_args({**flags, "resume": True}, opts)) or {}
    except NonFiniteError as error:
        diverged = first_line(error)
    scores = {task: _scores(found[task]) for task in TASKS if task in found}
    lines = read_metrics(folder / METRICS)
    scored = (f"{task}/{name}" for task in scores for name in scores[task])
    names = dict.fromkeys(
        itertools.chain(scored, *lines)
    )  # also of a run that diverged after evaluations
    task = next((task for task in reversed(TASKS) if f"{task}/AP" in names), TASKS[0])
    score = next((name for name in names if name.startswith(f"{task}/AP@")), f"{task}/AP")
    places = [
        (min(line["iteration"] + 1, job.iterations), line.get(score, math.nan))
        for line in lines
    ]
    curve = {place: round(value, 3) for place, value in places if not math.isnan(value)}
    return {
        **job._asdict(),
        "score": score,
        "AP": scores.get(task, {}).get(score.partition("/")[2], 0.0),
        "diverged": diverged,
        "scores": scores,
        "curve": list(curve.items()),  # a run killed after its end is evaluated again
        "seconds": round(time.perf_counter() - start, 1),
        "versions": software_versions(),
    }


def _scores(found: Mapping[str, Any]) -> dict[str, float | None]:
    """Return an evaluation in percent; AP is 0 without any detection."""
    values = {name: float(value) for name, value in found.items()}
    values["AP"] = 0.0 if math.isnan(values.get("AP", math.nan)) else values["AP"]
    return {
        name: None if math.isnan(value) else round(value, 3) for name, value in values.items()
    }


def measure(
    folder: Path, flags: Mapping[str, Any], opts: Mapping[str, list[Any]]
) -> dict[str, Any]:
    """Measure :class:`.plan.Costs`; the iterations of the norms in turn, each as the median."""
    begin, build, trainers = time.perf_counter(), 0.0, {}
    for norm, words in opts.items():
        args = engine_args(flags, words)
        cfg = run_config(args)
        use_recipe(cfg, args)
        trainers[norm] = Trainer(cfg, ignore_preflight=args.ignore_preflight)
        build = build or time.perf_counter() - begin
    times: dict[str, list[float]] = {norm: [] for norm in opts}
    begin = time.perf_counter()
    for iteration in range(_WARM_UP + _ROUNDS):
        if iteration >= _WARM_UP + _LEAST_ROUNDS and time.perf_counter() - begin > _LONGEST:
            break
        for norm, trainer in trainers.items():
            trainer.iter = iteration
            start = time.perf_counter()
            with EventStorage(iteration):
                trainer.run_step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[norm].append(time.perf_counter() - start)
    medians = {norm: statistics.median(found[_WARM_UP:]) for norm, found in times.items()}
    return Costs(medians, _evaluation_seconds(trainer), build)._asdict()


def _evaluation_seconds(trainer: Trainer) -> float:
    """Estimate the seconds of an evaluation from its first images."""
    data = Trainer.build_test_loader(trainer.cfg, trainer.cfg.DATASETS.TEST[0])
    batches = list(itertools.islice(data, _IMAGES))
    inference_on_dataset(trainer.model, batches[:1], None)  # a first time compiles kernels
    begin = time.perf_counter()
    inference_on_dataset(trainer.model, batches, None)
    return (time.perf_counter() - begin) * len(data) / len(batches)
