"""Several runs on one page: curves over each other, and differences per class."""

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context

from ...atomic import check_replaceable
from ...errors import ConfigError
from .page import files_of, write_folder
from .run_folder import RunFolder
from .sections import TASKS, Picture, Section, Table, average_precision, make_axes, summary

PAGE = "runs.html"


@rc_context({"text.parse_math": False})  # as names of runs may
def write_side_by_side(
    folders: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]
) -> dict[str, Any]:
    """Write ``runs.html`` and ``runs.json`` to ``output``, and return the numbers in ``runs.json``.

    The runs were evaluated on the same images; differences are to the first one. An earlier page is replaced.
    """
    check_replaceable(Path(output), files_of(PAGE))
    names = [Path(folder).resolve().name for folder in folders]
    labels = names if len(set(names)) == len(names) else list(map(str, folders))
    runs = {label: RunFolder(folder) for label, folder in zip(labels, folders, strict=True)}
    if len(runs) < len(labels):
        raise ConfigError(
            f"RUN_FOLDER ({', '.join(labels)}): one is given twice. Fix: give each once."
        )
    first = labels[0]
    parts = ("categories", "images", "annotations")
    evaluated_on = {
        label: [run.detections.truth.dataset[part] for part in parts]
        for label, run in runs.items()
    }
    if others := [label for label in labels if evaluated_on[label] != evaluated_on[first]]:
        raise ConfigError(
            f"RUN_FOLDER ('{others[0]}'): was evaluated on other classes, images or annotations than '{first}'. Fix: "
            "evaluate both on the same dataset: gw-detectron eval."
        )
    facts = {label: summary(run).numbers for label, run in runs.items()}
    classes = {
        label: {row["class"]: row for row in average_precision(run).numbers}
        for label, run in runs.items()
    }
    sections = {
        "Summary": Section(tables=[_summary(facts)]),
        "Curves": Section(
            text="Time of the training iterations, without evaluations.",
            pictures=[
                [_curve(runs, "loss"), _curve(runs, "AP"), _curve(runs, "AP", over_time=True)]
            ],
        ),
        "AP per class": Section(text=f"In brackets: minus {first}.", tables=_classes(classes)),
    }
    return write_folder(
        output, PAGE, " and ".join(labels), sections, {"runs": facts, "classes": classes}
    )


def _summary(facts: dict[str, dict[str, Any]]) -> Table:
    scores = {
        label: {
            f"{TASKS[task]} {'AP@N' if '@' in name else name}": value
            for task, values in each["scores"].items()
            for name, value in values.items()
            if name.partition("@")[0] == "AP"
        }
        for label, each in facts.items()
    }
    columns = list(dict.fromkeys(name for each in scores.values() for name in each))
    rows = [
        [label, *map(scores[label].get, columns), each.get("iterations"), each.get("norms")]
        for label, each in facts.items()
    ]
    return Table(["run", *columns, "iterations", "norms"], rows)


def _curve(runs: dict[str, RunFolder], metric: str, *, over_time: bool = False) -> Picture:
    """Plot the loss, or the AP of every task (AP@N if there is one), over iterations or seconds."""
    label = "seconds of training" if over_time else "iteration"
    figure, axes = make_axes(5.5, 3.8, xlabel=label, ylabel=metric)
    styles = (
        {"total_loss": "-"}
        if metric == "loss"
        else {"bbox/AP": ".-", "segm/AP": ".--", "keypoints/AP": ".:"}
    )
    for number, (name, run) in enumerate(runs.items()):
        times = [record["time"] for record in run.metrics if "time" in record]
        unit = statistics.median(times) if over_time and times else 1.0
        for score, style in styles.items():
            key = next(
                (
                    name
                    for record in run.metrics
                    for name in record
                    if name.startswith(f"{score}@")
                ),
                score,
            )
            points = [
                (unit * record["iteration"], record[key])
                for record in run.metrics
                if key in record
            ]
            if points:
                text = (
                    name
                    if metric == "loss"
                    else f"{name}, {TASKS[key.partition('/')[0]]} {key.partition('/')[2]}"
                )
                axes.plot(
                    *zip(*points, strict=True), style, color=f"C{number % 10}", label=text
                )
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
        rows = [
            [
                name,
                row["objects"],
                row[column],
                *(_cell(classes[other][name][column], row[column]) for other in others),
            ]
            for name, row in classes[first].items()
        ]
        tables.append(Table([column, "objects", first, *others], rows))
    return tables


def _cell(value: float | None, first: float | None) -> str | None:
    return None if value is None or first is None else f"{value:.1f} ({value - first:+.1f})"
