"""Watch memory, open files, threads and step time: soak.py --minutes 60.

The tiny training of the tests is stopped by SIGTERM and resumed at equal intervals. Every few seconds its resident
memory, open files, threads and the mean CPU time of its steps go to samples.csv; soak.png shows them. The step time is
divided by the time of a fixed convolution at the same moment: other programs slow down both. Each quantity has to be
flat between two restarts: exit status 1 otherwise, or after a failed restart.
"""

import argparse
import csv
import json
import math
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from matplotlib.figure import Figure

from tests.reliability.forked_run import STEP, Child, RunError, child, remove_older_checkpoints, training
from tests.tiny_run import arguments, dataset

QUANTITIES = {"memory": "MB", "files": "open files", "threads": "threads", "step": "convolutions per step"}
RELATIVE = ("memory", "step")  # the others are absolute
# Largest growth from the first to the second half of the time between two restarts.
# Memory: in pieces of 1800 steps a leak of one image of this dataset (20 kB) per step would be 2 %.
# Files and threads: none may be left open.
LIMITS = {"memory": 0.01, "files": 0.5, "threads": 0.5, "step": 0.05}
_IMAGE, _KERNEL = torch.randn(1, 64, 64, 64), torch.randn(64, 64, 3, 3, requires_grad=True)
_WARM_UP = 0.25  # part of a piece that is left out: imports, caches and the first evaluation


def sample(run: Child, seconds: float) -> dict[str, float]:
    """Measure a running child for some seconds.

    The result is empty if the child ended or made no step.
    """
    end = time.monotonic() + seconds
    known = len(run.changes)
    while (left := end - time.monotonic()) > 0:
        if not run.read(min(1.0, left)):
            return {}
    steps = [after.cpu - before.cpu for before, after in pairwise(run.changes[known:]) if before.phase == STEP]
    if not steps:
        return {}
    convolution = min(_time_convolution() for _ in range(3))
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{run.pid}/status").read_text().splitlines())
    return {
        "memory": int(fields["VmRSS"].split()[0]) / 1024,
        "files": len(os.listdir(f"/proc/{run.pid}/fd")),
        "threads": int(fields["Threads"]),
        "step": fmean(steps) / convolution,
    }


def _time_convolution() -> float:
    """Return the CPU time of a convolution of this process, forward and backward, in seconds."""
    begin = time.process_time()
    torch.nn.functional.conv2d(_IMAGE, _KERNEL, padding=1).sum().backward()
    return time.process_time() - begin


def soak(folder: Path, minutes: float, restarts: int, interval: float, *, workers: int = 0) -> list[dict[str, float]]:
    """Train with restarts; return samples with piece and minute.

    Raises:
        RunError: a run failed, or did not continue where it was stopped.
    """
    output = folder / "run"
    torch.set_num_threads(1)
    schedule = {"SOLVER__MAX_ITER": 10_000_000, "SOLVER__STEPS": "()", "SOLVER__CHECKPOINT_PERIOD": 200}
    args = arguments(
        output, "--resume", **schedule, TEST__EVAL_PERIOD=100, DATALOADER__NUM_WORKERS=workers, SOLVER__BASE_LR=0.001
    )
    samples: list[dict[str, float]] = []
    begin = time.monotonic()
    expected = 0
    with dataset(folder / "datasets"), open(folder / "samples.csv", "w", newline="") as file:
        table = csv.DictWriter(file, ["minute", "piece", *QUANTITIES])
        table.writeheader()
        for piece in range(restarts + 1):
            (folder / "log.txt").unlink(missing_ok=True)
            with child(training(args), folder / "log.txt") as run:
                run.expect_start(expected)
                while time.monotonic() - begin < 60 * minutes * (piece + 1) / (restarts + 1):
                    found = sample(run, interval)
                    if found:
                        samples.append({"minute": (time.monotonic() - begin) / 60, "piece": piece, **found})
                        table.writerow({name: round(value, 3) for name, value in samples[-1].items()})
                        file.flush()
                    elif run.status is not None or not Path(f"/proc/{run.pid}").exists():
                        raise RunError(f"ended by itself:\n{run.output()[-3000:]}")
                run.send(signal.SIGTERM)
                run.expect_status(143)
                expected = int((output / "last_checkpoint").read_text()[len("model_") : -len(".pth")]) + 1
            remove_older_checkpoints(output)
            print(f"piece {piece + 1} of {restarts + 1}: {expected} iterations", flush=True)
    return samples


def growth(samples: list[dict[str, float]], name: str) -> tuple[float, float]:
    """Return the growth from the first to the second half of a piece: mean over the pieces and its standard error."""
    found = []
    for piece in sorted({row["piece"] for row in samples}):
        values = [row[name] for row in samples if row["piece"] == piece]
        values = values[int(len(values) * _WARM_UP) :]
        if len(values) > 1:
            first, second = (float(np.median(half)) for half in np.array_split(values, 2))
            found.append((second - first) / (first if name in RELATIVE else 1.0))
    if len(found) < 2:
        return math.nan, math.nan
    return fmean(found), stdev(found) / len(found) ** 0.5


def verdict(rate: float, error: float, limit: float) -> str:
    """Return "flat" or "GROWS" if that is sure by two standard errors, else "unclear"."""
    if rate + 2 * error <= limit:
        return "flat"
    return "GROWS" if rate - 2 * error > limit else "unclear: repeat on a quiet machine, or longer"


def plot(samples: list[dict[str, float]], picture: Path) -> None:
    """Draw the samples over the minutes, with the restarts as vertical lines."""
    figure = Figure(figsize=(9, 9), layout="constrained")
    for axes, (name, unit) in zip(figure.subplots(len(QUANTITIES), 1, sharex=True), QUANTITIES.items(), strict=True):
        for piece in sorted({row["piece"] for row in samples}):
            rows = [row for row in samples if row["piece"] == piece]
            axes.plot([row["minute"] for row in rows], [row[name] for row in rows], color="tab:blue")
            if piece:
                axes.axvline(rows[0]["minute"], color="gray", linewidth=0.7, linestyle="--")
        axes.set(ylabel=unit, ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.axes[0].set_title("A training with restarts (dashed)")
    figure.axes[-1].set_xlabel("minutes")
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--interval", type=float, default=10, help="seconds between samples (%(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="DATALOADER.NUM_WORKERS (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("output/soak"), help="folder to create (%(default)s)")
    args = parser.parse_args()
    if args.output.exists():
        parser.error(f"--output {args.output}: exists. Fix: remove it, or give another folder.")
    args.output.mkdir(parents=True)
    samples = soak(args.output, args.minutes, args.restarts, args.interval, workers=args.workers)
    plot(samples, args.output / "soak.png")
    report = {"minutes": args.minutes, "restarts": args.restarts, "samples": len(samples)}
    verdicts = {}
    for name, unit in QUANTITIES.items():
        rate, error = growth(samples, name)
        verdicts[name] = verdict(rate, error, LIMITS[name])
        report[name] = {"growth": rate, "standard error": error, "verdict": verdicts[name]}
        values = [row[name] for row in samples]
        text = f"{100 * rate:+.2f} % +- {100 * error:.2f} %" if name in RELATIVE else f"{rate:+.2f} +- {error:.2f}"
        print(f"{name:8} {min(values):8.1f} to {max(values):8.1f} {unit:20} {text}: {verdicts[name]}")
    (args.output / "soak.json").write_text(json.dumps(report, indent=1) + "\n")
    raise SystemExit(any(text != "flat" for text in verdicts.values()))


if __name__ == "__main__":
    main()
