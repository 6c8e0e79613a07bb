"""Several runs on one page: curves over each other, and differences per class."""

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..atomic import atomic_folder
from ..errors import ConfigError
from .page import write_page
from .run_folder import RunFolder
from .sections import TASKS, Picture, Section, Table, average_precision, make_axes, summary

PAGE, NUMBERS = "runs.html", "runs.json"


def write_side_by_side(folders: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> dict[str, Any]:
    """Write ``runs.html`` and ``runs.json`` about runs that were evaluated on the same images.

    Args:
        folders: ``OUTPUT_DIR`` of each run. Differences are to the first one.
        output: the folder to write. An earlier page there is replaced.

    Returns:
        The content of ``runs.json``.

    Raises:
        MissingFileError: a folder holds no run.
        DataError: a run has no predictions.
        ConfigError: the runs have other classes or images, or a folder is given twice.
    """
    names = [Path(folder).resolve().name for folder in folders]
    labels = names if len(set(names)) == len(names) else list(map(str, folders))
    runs = {label: RunFolder(folder) for label, folder in zip(labels, folders, strict=True)}
    if len(runs) < len(labels):
        raise ConfigError(f"RUN_FOLDER ({', '.join(labels)}): one is given twice. Fix: give each once.")
    first = labels[0]
    for label, run in runs.items():
        for kind in ("class_names", "truth"):
            ours, theirs = (getattr(each.detections, kind) for each in (run, runs[first]))
            if (ours != theirs) if kind == "class_names" else (ours.dataset["images"] != theirs.dataset["images"]):
                what = "classes" if kind == "class_names" else "images"
                raise ConfigError(
                    f"RUN_FOLDER ('{label}'): was evaluated on other {what} than '{first}'. Fix: evaluate both on the "
                    "same dataset: gw-detectron eval."
                )
    facts = {label: summary(run).numbers for label, run in runs.items()}
    classes = {label: {row["class"]: row for row in average_precision(run).numbers} for label, run in runs.items()}
    sections = {
        "Summary": Section(tables=[_summary(facts)]),
        "Curves": Section(
            text="Time is that of the training iterations, without evaluations.",
            pictures=[[_curve(runs, "total_loss", 0.0), _curve(runs, "AP", 0.0), _curve(runs, "AP", 1.0)]],
        ),
        "AP per class": Section(text=f"In brackets: minus {first}.", tables=_classes(classes)),
    }
    numbers = json.loads(json.dumps({"runs": facts, "classes": classes}), parse_constant=lambda _: None)
    with atomic_folder(output, [PAGE, NUMBERS]) as place:
        write_page(place / PAGE, " and ".join(labels), sections)
        (place / NUMBERS).write_text(json.dumps(numbers, indent=2) + "\n")
    return numbers


def _summary(facts: dict[str, dict[str, Any]]) -> Table:
    tasks = list(next(iter(facts.values()))["scores"])
    rows = [
        [label, *(each["scores"].get(task, {}).get("AP") for task in tasks), each.get("iterations"), each["norms"]]
        for label, each in facts.items()
    ]
    return Table(["run", *(f"{TASKS[task]} AP" for task in tasks), "iterations", "norms"], rows)


def _curve(runs: dict[str, RunFolder], metric: str, over_time: float) -> Picture:
    """Plot the loss, or the AP of every task, over iterations or seconds."""
    label = "seconds of training" if over_time else "iteration"
    figure, axes = make_axes(5.5, 3.8, xlabel=label, ylabel="loss" if metric == "total_loss" else "AP")
    for number, (name, run) in enumerate(runs.items()):
        times = [record["time"] for record in run.metrics if "time" in record]
        unit = statistics.median(times) if over_time and times else 1.0
        keys = [metric] if metric == "total_loss" else [f"{task}/{metric}" for task in TASKS]
        for key, style in zip(keys, ("-", "--", ":"), strict=False):
            points = [(unit * record["iteration"], record[key]) for record in run.metrics if key in record]
            if points:
                text = name if metric == "total_loss" else f"{name}, {TASKS[key.partition('/')[0]]}"
                marker = "" if metric == "total_loss" else "."
                axes.plot(*zip(*points, strict=True), style, marker=marker, color=f"C{number % 10}", label=text)
    axes.set_ylim(bottom=0)
    if axes.lines:
        axes.legend(fontsize="small")
    return Picture.from_figure(f"{metric}_{label.partition(' ')[0]}", figure)


def _classes(classes: dict[str, dict[str, dict[str, Any]]]) -> list[Table]:
    """List AP of each class and task, and the difference to the first run."""
    first, *others = classes
    tables = []
    for column in (f"{task} AP" for task in TASKS.values()):
        if not all(column in row for rows in classes.values() for row in rows.values()):
            continue
        rows = []
        for name, row in classes[first].items():
            cells: list[Any] = [name, row["objects"], row[column]]
            for other in others:
                value = classes[other][name][column]
                unknown = value is None or row[column] is None
                cells.append(None if unknown else f"{value:.1f} ({value - row[column]:+.1f})")
            rows.append(cells)
        tables.append(Table([column, "objects", first, *others], rows))
    return tables
