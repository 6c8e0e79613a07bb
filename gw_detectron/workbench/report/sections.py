"""The sections of the report of a run."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context

from ...errors import UserError
from ...modeling import build_checked_model
from ...norms import norm_summary
from ..dataset.coco_scores import COCO_TASKS
from ..images import evenly_spread
from ..images.class_names import class_labels
from ..run.folder import VALIDATION_PREFIX
from .detections import CORRECT, KINDS, MISSED, ImageMatches
from .page_parts import Line, Picture, Section, Table, make_axes, plot_lines
from .run_folder import RunFolder

# column -> IoU of a match; None is the mean over COCO's IoUs
_THRESHOLDS = {"AP": None, "AP50": 0.5, "AP75": 0.75}
_SEGMENTATION = {"mIoU": "sem_seg/mIoU", "PQ": "panoptic_seg/PQ"}
NO_OBJECT = "no object"  # row of boxes without a match
_MOST_COUNTS = 25  # classes of a confusion matrix with numbers


def summary(run: RunFolder) -> Section:
    """Summarize a run as far as its files tell; other sections say what is missing."""
    scores: dict[str, dict[str, float | None]] = {}
    facts: dict[str, Any] = {"folder": str(run.folder), "dataset": run.dataset}
    missing = contextlib.suppress(UserError, OSError)
    with missing:
        scores = {task: run.detections.scores(task) for task in run.detections.tasks}
    with missing:
        facts["images"] = len(run.records)
    with missing:
        facts["norms"] = norm_summary(build_checked_model(run.cfg, "meta"))
    with missing:
        facts |= _progress(run)
    with missing:
        facts["weights"] = run.weights
        if run.best_iteration:
            facts["best_by"] = run.cfg.TEST.BEST
            facts["best_after_iteration"] = run.best_iteration

    numbers = {**facts, "scores": scores}
    tables = [Table([], list(shown_facts(numbers).items()))]
    if scores:
        tables.insert(0, score_table({run.dataset: numbers}))
    text = " ".join([*run.notes, _dense_note(run, scores)]).strip()
    return Section(numbers, text, tables=tables)


def shown_facts(numbers: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts of a summary as texts, without the scores."""
    facts = {name.replace("_", " "): str(value) for name, value in numbers.items()}
    del facts["scores"]
    if "iterations" in facts:
        facts["iterations"] += f" of {facts.pop('planned iterations')}"
    return facts


def score_table(summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    """List the scores in percent of summaries, which have labels; AP@N has one column for all N."""
    rows = []
    for label, numbers in summaries.items():
        for task, scores in numbers["scores"].items():
            row = {"percent": label, "": COCO_TASKS[task].noun}
            for name, value in scores.items():
                row["AP@N" if "@" in name else name] = value
            rows.append(row)
    return Table.from_rows(rows)


def _dense_note(run: RunFolder, scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Explain AP@N if it is among the scores."""
    dense = [name for values in scores.values() for name in values if "@" in name]
    if not dense:
        return ""
    return (
        f"Images have up to {run.detections.fingerprint.most_of_a_class} objects of a class. "
        "COCO's AP counts 100 boxes or masks per image and class, 20 of keypoints; "
        f"AP@N counts {dense[0].partition('@')[2]}."
    )


def _progress(run: RunFolder) -> dict[str, Any]:
    """Read iterations, speed and the scores of segmentation from the metrics."""
    iterations = max((place + 1 for place, _ in run.logged("total_loss")), default=0)
    facts: dict[str, Any] = {"iterations": iterations}
    facts["planned_iterations"] = run.cfg.SOLVER.MAX_ITER

    if run.seconds_per_iteration:
        facts["seconds_per_iteration"] = round(run.seconds_per_iteration, 4)
    if run.is_evaluated:
        return facts

    for name, metric in _SEGMENTATION.items():
        values = run.logged(metric)
        if values:
            facts[name] = round(values[-1][1], 1)
    return facts


def curves(run: RunFolder) -> Section:
    """Plot losses, learning rate and scores of a run over its iterations."""
    losses = [name for name in run.metric_names if "loss" in name]
    scores = [name for name in run.metric_names if _is_score(name)]
    axes: dict[str, Any] = {"xlabel": "iteration", "best": run.best_iteration}
    row = [
        plot_lines(_lines(run, losses), ylabel="loss", **axes),
        plot_lines(_lines(run, ["lr"]), ylabel="learning rate", **axes),
        plot_lines(_lines(run, scores), ylabel="percent", **axes),
    ]
    last = {name: run.logged(name)[-1][1] for name in losses}
    text = "Dashed: losses on the validation data. Dotted: the best weights."
    return Section({"last_losses": last}, text, pictures=[row])


def _is_score(name: str) -> bool:
    score = name.rpartition("/")[2]
    return score.partition("@")[0] in ("AP", *_SEGMENTATION)


def _lines(run: RunFolder, names: Iterable[str]) -> list[Line]:
    """Return metrics over iterations; a loss has one color on training and validation data."""
    colors: dict[str, str] = {}
    lines = []
    for name in names:
        trained = name.removeprefix(VALIDATION_PREFIX)
        color = colors.setdefault(trained, f"C{len(colors)}")
        dashes = "-" if trained == name else "--"
        style = {"color": color, "linestyle": dashes}
        lines.append(Line(run.logged(name), name, style))
    return lines


def average_precision(run: RunFolder) -> Section:
    """List the AP of each class."""
    found = run.detections
    detections = Counter(result["category_id"] for result in found.results)
    objects = Counter(annotation["category_id"] for annotation in found.objects)
    rows: list[dict[str, Any]] = [
        {
            "class": name,
            "objects": objects[category],
            "detections": detections[category],
        }
        for category, name in found.classes.items()
    ]
    for task in found.tasks:
        for score, iou in _THRESHOLDS.items():
            column = f"{COCO_TASKS[task].noun} {score}"
            values = 100 * found.precision(task, iou).mean(0)
            for row, value in zip(rows, values, strict=True):
                row[column] = None if np.isnan(value) else float(value)

    images = len(found.truth.imgs)
    text = f"{len(found.results)} detections on {images} images of {run.dataset}. AP in percent."
    return Section(rows, text, tables=[Table.from_rows(rows)])


def recall(run: RunFolder) -> Section:
    """Plot precision over recall, and tell why objects are not found at any score."""
    found = run.detections
    lines = []
    for number, task in enumerate(found.tasks):
        for iou, dashes in ((0.5, "-"), (0.75, "--")):
            style = {"linestyle": dashes, "color": f"C{number}", "marker": ""}
            lines.append(_precision_line(run, task, iou, style))
    picture = plot_lines(
        lines,
        xlabel="recall in %",
        ylabel="precision in %",
        xlim=(0, 100),
        ylim=(0, 105),
    )

    reasons = found.unfound()
    total = len(found.objects)
    hits = total - sum(reasons.values())
    text = (
        f"Boxes of any score find {hits} of {total} objects ({hits / max(total, 1):.0%}) at an "
        "IoU of 0.5; the table says why the others are not found. The model gives up to "
        f"{run.cfg.TEST.DETECTIONS_PER_IMAGE} detections per image (TEST.DETECTIONS_PER_IMAGE). "
        "Curves are class means, and end with the recall."
    )
    table = Table(["objects not found", ""], list(reasons.items()))
    numbers = {"objects": total, "found": hits, "not_found": reasons}
    return Section(numbers, text, pictures=[[picture]], tables=[table])


def _precision_line(
    run: RunFolder, task: str, iou: float, style: Mapping[str, Any]
) -> Line:
    """Return the mean precision of the classes over recall, in percent."""
    curve = 100 * np.nanmean(run.detections.precision(task, iou), axis=1)
    curve[curve == 0] = np.nan  # the curve ends with the recall
    recalls = np.linspace(0, 100, len(curve))
    points = list(zip(recalls, curve, strict=True))
    overlap = "OKS" if task == "keypoints" else "IoU"
    return Line(points, f"{COCO_TASKS[task].noun}, {overlap} {iou:g}", style)


def predictions(run: RunFolder) -> Section:
    """Draw ground truth and detections of images that are spread over the dataset."""
    images = [image for image in run.matches if image.matches] or run.matches
    pictures = [_photos(run, image) for image in evenly_spread(images, run.most_drawn)]
    text = f"Ground truth, and detections with a score of at least {run.score:.3g}. Errors are named."
    return Section(text=text, pictures=pictures)


def errors(run: RunFolder) -> Section:
    """Count the kinds of errors, and draw the images with the most errors."""
    kinds = dict.fromkeys(KINDS, 0)
    for image in run.matches:
        for match in image.matches:
            kinds[match.kind] += 1
    confusion, counts = _confusion(run)

    worst = sorted(run.matches, key=lambda image: -image.num_errors)[: run.most_drawn]
    photos = []
    listed = []
    for image in worst:
        if image.num_errors:
            photos.append(_photos(run, image))
            file = run.detections.file_of(image)
            entry = {"image": image.image_id, "file": file, "errors": image.num_errors}
            listed.append(entry)

    text = (
        f"Boxes with a score of at least {run.score:.3g} are matched to the unmatched object of any "
        "class with the largest IoU, at least 0.5. A box without a match is a duplicate of a "
        "matched object, poor (IoU from 0.1), or background."
    )
    threshold, f1 = run.detections.best_threshold
    if f1:
        text += (
            " With boxes matched to objects of their class, F1 (harmonic mean of precision and recall) is highest, "
            f"{f1:.2f}, for scores above {threshold:.3g}: predict --score-threshold best takes them."
        )
    table = Table(["", "boxes or objects"], list(kinds.items()))
    numbers = {
        "kinds": kinds,
        "confusion": counts,
        "images": listed,
        "best_threshold": threshold,
        "best_f1": f1,
    }
    return Section(numbers, text, pictures=[[confusion], *photos], tables=[table])


def _confusion(run: RunFolder) -> tuple[Picture, list[dict[str, Any]]]:
    """Plot which class the objects of each class are found as, and list the counts.

    The last row has boxes without an object.
    """
    classes = run.detections.classes
    places = {category: place for place, category in enumerate(classes)}
    counts = np.zeros((len(classes) + 1, len(classes) + 1), int)
    for image in run.matches:
        for _, found, annotation in image.matches:
            row = places[annotation["category_id"]] if annotation else -1
            column = places[found["category_id"]] if found else -1
            counts[row, column] += 1

    seen = np.logical_or(counts.any(axis=1), counts.any(axis=0))
    seen[-1] = True
    names = list(itertools.compress(classes.values(), seen))
    counts = counts[seen][:, seen]
    numbers = []
    for name, values in zip([*names, NO_OBJECT], counts.tolist(), strict=True):
        found_as = dict(zip([*names, MISSED], values, strict=True))
        numbers.append({"class": name, "found_as": found_as})

    labels = class_labels(tuple(names))
    with rc_context({"font.sans-serif": [labels.font]}):
        return _confusion_picture(counts, labels.names), numbers


def _confusion_picture(counts: np.ndarray, names: Sequence[str]) -> Picture:
    """Plot a (C + 1, C + 1) matrix of counts as shares of the rows."""
    columns = [*names, MISSED]
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    side = min(3 + 0.3 * len(columns), 16)
    figure, axes = make_axes(side, side)
    axes.grid(visible=False)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    # missed and no object are no classes
    axes.axvline(len(names) - 0.5, color="black")
    axes.axhline(len(names) - 0.5, color="black")
    axes.set(
        xlabel="found as",
        ylabel="objects of the class",
        yticks=range(len(counts)),
        yticklabels=[*names, NO_OBJECT],
    )
    axes.set_xticks(range(len(columns)), columns, rotation=90)

    if len(names) <= _MOST_COUNTS:
        for row, column in np.argwhere(counts):
            number = str(counts[row, column])
            color = "white" if shares[row, column] > 0.6 else "black"
            axes.text(column, row, number, ha="center", va="center", color=color)
    return Picture.from_figure(figure)


def _photos(run: RunFolder, image: ImageMatches) -> list[Picture]:
    """Draw the objects of an image, and its detections."""
    found = run.detections
    file = found.file_of(image)
    objects = found.truth.imgToAnns[image.image_id]
    missed = [match.annotation for match in image.of_kind(MISSED)]
    notes = [MISSED if annotation in missed else "" for annotation in objects]
    truth = found.draw(image.image_id, objects, notes)
    missing = f"{len(missed)} of {len(objects)} objects missed"

    boxes = []
    kinds = []
    for match in image.matches:
        if match.detection:
            boxes.append(match.detection)
            kinds.append("" if match.kind == CORRECT else match.kind)
    drawn = found.draw(image.image_id, boxes, kinds)
    wrong = f"{len(boxes) - kinds.count('')} of {len(boxes)} boxes wrong"
    return [
        Picture.from_photo(truth, f"{file}: {missing}"),
        Picture.from_photo(drawn, f"{file}: {wrong}"),
    ]


#: heading -> section, in the order of the page
SECTIONS: dict[str, Callable[[RunFolder], Section]] = {
    "Summary": summary,
    "Curves": curves,
    "AP per class": average_precision,
    "Recall": recall,
    "Predictions": predictions,
    "Errors": errors,
}
