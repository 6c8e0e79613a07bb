"""The page about several runs: scores side by side, and curves over each other."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib import rc_context

from ...atomic import check_replaceable
from ...errors import ConfigError
from ..dataset.coco_scores import COCO_TASKS, ap_name
from .html import write_folder
from .page_parts import Line, Section, Table, plot_lines
from .run_folder import RunFolder
from .sections import average_precision, score_table, shown_facts, summary

_FILES = ("runs.json", "runs.html")
PAGE = _FILES[1]
_DASHES = {"bbox": "-", "segm": "--", "keypoints": ":"}


@dataclass(frozen=True)
class Curve(Line):
    """A line over iterations, and the seconds of one; 0 if they are not known."""

    seconds: float = 0.0

    def over_time(self) -> Line:
        points = [(self.seconds * iteration, value) for iteration, value in self.points]
        return replace(self, points=points)


def comparison_sections(
    scores: Sequence[Table],
    curves: Sequence[Curve],
    *,
    losses: Sequence[Curve] = (),
    verdict: str = "",
    note: str = "",
) -> dict[str, Section]:
    """Return the sections that a page about several runs begins with.

    Args:
        scores: tables with rows for each run.
        curves: the scores during the training.
        losses: the losses; there is no plot without them.
        verdict: a text above the scores.
        note: a text about the curves.
    """
    timed = [curve.over_time() for curve in curves if curve.seconds]
    row = [
        plot_lines(curves, xlabel="iteration", ylabel="AP"),
        plot_lines(timed, xlabel="seconds of training", ylabel="AP"),
    ]
    if losses:
        row.insert(0, plot_lines(losses, xlabel="iteration", ylabel="loss"))
    text = f"{note} Time is that of training iterations, without evaluations."
    return {
        "Scores": Section(text=verdict, tables=scores),
        "Curves": Section(text=text.strip(), pictures=[row]),
    }


@rc_context({"text.parse_math": False})  # names of runs may have dollar signs
def write_side_by_side(
    folders: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]
) -> dict[str, Any]:
    """Write ``runs.html`` and ``runs.json`` to ``output``, and return the numbers in ``runs.json``.

    The runs were evaluated on the same images; differences are to the first one. An earlier page is
    replaced.
    """
    check_replaceable(Path(output), _FILES)
    runs = _open_runs(folders)
    facts = {}
    classes = {}
    losses = []
    curves = []
    for number, (label, run) in enumerate(runs.items()):
        facts[label] = summary(run).numbers
        classes[label] = {row["class"]: row for row in average_precision(run).numbers}
        style = {"color": f"C{number}"}
        losses.append(Curve(run.logged("total_loss"), label, style))
        curves += _score_curves(run, label, style)

    tables = [score_table(facts), _facts_table(facts)]
    sections = comparison_sections(tables, curves, losses=losses)
    first, *_ = runs
    sections["AP per class"] = Section(
        text=f"In brackets: minus {first}.",
        tables=_class_tables(classes),
    )
    numbers = {"runs": facts, "classes": classes}
    title = f"Runs {' and '.join(runs)}"
    return write_folder(output, _FILES, title, sections, numbers)


def _facts_table(facts: Mapping[str, Mapping[str, Any]]) -> Table:
    """List the facts of runs, with a column for each run: the norms of one are a long text."""
    shown = {label: shown_facts(numbers) for label, numbers in facts.items()}
    names = dict.fromkeys(name for values in shown.values() for name in values)
    rows = []
    for name in names:
        values = {label: texts.get(name) for label, texts in shown.items()}
        rows.append({"": name, **values})
    return Table.from_rows(rows)


def _open_runs(folders: Sequence[str | os.PathLike[str]]) -> dict[str, RunFolder]:
    """Open runs by their labels: the names of the folders or, where two are equal, the paths.

    They are different ones, which were evaluated on the same classes, images and annotations.
    """
    paths = [Path(os.path.realpath(folder)) for folder in folders]
    if len(set(paths)) < len(paths):
        raise ConfigError(
            f"RUN ({', '.join(map(str, folders))}): one is given twice. Fix: give each once."
        )
    names = [path.name for path in paths]
    labels = names if len(set(names)) == len(names) else list(map(str, folders))
    runs = {
        label: RunFolder(folder) for label, folder in zip(labels, folders, strict=True)
    }

    first = labels[0]
    expected = _ground_truth(runs[first])
    for label, run in runs.items():
        if _ground_truth(run) != expected:
            raise ConfigError(
                f"RUN ('{label}'): was evaluated on other classes, images or annotations than "
                f"'{first}'. Fix: evaluate both on the same dataset: gw-detectron eval RUN."
            )
    return runs


def _ground_truth(run: RunFolder) -> list[Any]:
    content = run.detections.truth.dataset
    return [content["categories"], content["images"], content["annotations"]]


def _score_curves(run: RunFolder, label: str, style: Mapping[str, Any]) -> list[Curve]:
    """Return the AP of every task of a run, or its AP@N if there is one."""
    curves = []
    for name, task in COCO_TASKS.items():
        score = ap_name(name, run.metric_names)
        points = run.logged(score)
        if points:
            text = f"{label}, {task.noun} {score.partition('/')[2]}"
            marked = {**style, "linestyle": _DASHES[name]}
            curves.append(Curve(points, text, marked, run.seconds_per_iteration))
    return curves


def _class_tables(
    classes: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> list[Table]:
    """List AP of each class and task, and the difference to the first run."""
    first, *others = classes
    tables = []
    for task in COCO_TASKS.values():
        column = f"{task.noun} AP"
        if not all(column in row for rows in classes.values() for row in rows.values()):
            continue

        rows = []
        for name, row in classes[first].items():
            cells = {column: name, "objects": row["objects"], first: row[column]}
            for other in others:
                cells[other] = _with_difference(
                    classes[other][name][column], row[column]
                )
            rows.append(cells)
        tables.append(Table.from_rows(rows))
    return tables


def _with_difference(value: float | None, first: float | None) -> str | None:
    if value is None or first is None:
        return None
    return f"{value:.1f} ({value - first:+.1f})"
