"""The confusion table of a detector."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from ..pictures import plain_text
from .detections import KINDS, ImageMatches
from .run_folder import RunFolder
from .sections import Picture, Section, Table

_NUMBERED = 16  # the most rows whose cells show their number
_LISTED = 15  # confusions in the table


def confusion_table(matches: Sequence[ImageMatches], category_ids: Sequence[int]) -> np.ndarray:
    """Count the pairs of a true and a predicted class.

    Args:
        matches: of all images.
        category_ids: the ids of K classes.

    Returns:
        (K + 1, K + 1) int. Row: true class, the last one background. Column: predicted class, the last one missed.
    """
    places = {category: index for index, category in enumerate(category_ids)}
    table = np.zeros((len(places) + 1, len(places) + 1), dtype=int)
    for image in matches:
        for detection, taken in zip(image.found, image.taken, strict=True):
            row = len(places) if taken is None else places[taken["category_id"]]
            table[row, places[detection["category_id"]]] += 1
        for annotation in image.missed:
            table[places[annotation["category_id"]], -1] += 1
    return table


def confusion_section(run: RunFolder) -> Section:
    """Show which classes are taken for which, missed or found in the background."""
    found, matches = run.detections, run.matches
    iou, score = run.options.iou, run.options.score
    table = confusion_table(matches, found.category_ids)
    rows, columns = [*found.class_names, "background"], [*found.class_names, "missed"]
    kinds = {kind: sum(image.kinds.count(kind) for image in matches) for kind in KINDS}
    kinds["missed"] = sum(len(image.missed) for image in matches)
    off = table.copy()
    np.fill_diagonal(off[:-1, :-1], 0)
    order = np.argsort(-off, axis=None, kind="stable")[:_LISTED]
    pairs = [(rows[i], columns[j], int(off[i, j])) for i, j in zip(*np.unravel_index(order, off.shape), strict=True)]
    numbers = {
        "iou": iou,
        "score": score,
        "kinds": kinds,
        "true": rows,
        "predicted": columns,
        "counts": table.tolist(),
    }
    text = (
        f"Boxes of score {score:g} and more. Each takes, best score first, the free object of any class that it "
        f"overlaps most, by an IoU of {iou:g} or more. A wrong box is a duplicate if its object is taken, a poor box "
        "from an IoU of 0.1, and background below."
    )
    side = 2.6 + 0.42 * min(len(rows), 16) + 0.16 * max(0, len(rows) - 16)
    picture = Picture.from_figure(
        "confusion",
        _plot(table, rows, columns, side),
        min_width=int(60 * side) if len(rows) <= _NUMBERED else int(90 * side),
    )
    tables = [
        Table(["", "boxes or objects"], list(kinds.items())),
        Table(["true class", "predicted class", "times"], [pair for pair in pairs if pair[2]]),
    ]
    return Section("Confusion", numbers, text, pictures=[[picture]], tables=tables)


def _plot(table: np.ndarray, rows: Sequence[str], columns: Sequence[str], side: float) -> Figure:
    figure = Figure(figsize=(side, side * 0.92), layout="constrained")
    axes = figure.subplots()
    share = table / np.maximum(1, table.sum(1, keepdims=True))
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    size = "medium" if len(rows) <= _NUMBERED else 8
    rows, columns = ([plain_text(name) for name in names] for names in (rows, columns))
    axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=size)
    axes.set_yticks(range(len(rows)), rows, fontsize=size)
    axes.set(xlabel="predicted", ylabel="true")
    if len(rows) <= _NUMBERED:
        for (row, column), count in np.ndenumerate(table):
            color = "white" if share[row, column] > 0.6 else "black"
            axes.text(column, row, count or "", ha="center", va="center", color=color, fontsize="small")
    figure.colorbar(image, label="share of the row", shrink=0.7)
    return figure
