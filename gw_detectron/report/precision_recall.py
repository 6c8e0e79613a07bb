"""AP and precision over recall for each class."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pycocotools.cocoeval import COCOeval

from ..pictures import class_colors, plain_text
from .detections import Detections
from .run_folder import RunFolder
from .sections import Picture, Section, Table

TASKS = {"bbox": "box", "segm": "mask", "keypoints": "keypoint"}
_LEGEND = 12  # the most classes that a legend names
_THRESHOLDS = {"AP": None, "AP50": 0.5, "AP75": 0.75}


def precision(evaluation: COCOeval, iou: float | None = None) -> np.ndarray:
    """Return the precision over recall of each class.

    Args:
        evaluation: accumulated; all areas and the largest number of detections are taken.
        iou: the threshold; None averages over all.

    Returns:
        (recalls, classes), 0 to 1; NaN for classes without objects.
    """
    values = evaluation.eval["precision"][:, :, :, 0, -1]  # (IoU thresholds, recalls, classes)
    values = np.where(values < 0, np.nan, values)
    return values.mean(0) if iou is None else values[np.isclose(evaluation.params.iouThrs, iou)][0]


def ap_section(run: RunFolder) -> Section:
    """List and plot the AP of each class."""
    found = run.detections
    names, evaluations = found.class_names, found.scores
    columns = {
        f"{TASKS[task]} {metric}": 100 * precision(evaluation, iou).mean(0)
        for task, evaluation in evaluations.items()
        for metric, iou in _THRESHOLDS.items()
    }
    rows = [
        {
            "class": name,
            "objects": sum(not each["iscrowd"] for each in found.truth.loadAnns(found.truth.getAnnIds(catIds=[key]))),
            "detections": sum(result["category_id"] == key for result in found.results),
            **{column: None if np.isnan(values[index]) else float(values[index]) for column, values in columns.items()},
        }
        for index, (key, name) in enumerate(zip(found.category_ids, names, strict=True))
    ]
    images = len(found.truth.imgs)
    text = f"{len(found.results)} detections on {images} images of {run.dataset}. AP in percent, by COCO's rules."
    picture = Picture.from_figure("class_ap", _plot_ap(found))
    table = Table(list(rows[0]), [list(row.values()) for row in rows])
    return Section("AP per class", rows, text, pictures=[[picture]], tables=[table])


def _plot_ap(found: Detections) -> Figure:
    names = found.class_names
    bars = {TASKS[task]: 100 * precision(evaluation).mean(0) for task, evaluation in found.scores.items()}
    order = np.argsort(np.nan_to_num(bars["box"], nan=-1))
    figure = Figure(figsize=(6.5, 1.1 + 0.26 * len(names)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(bars)
    for index, (label, values) in enumerate(bars.items()):
        axes.barh(np.arange(len(names)) - index * height, values[order], height, label=label)
    axes.set_yticks(np.arange(len(names)) - (len(bars) - 1) * height / 2, [plain_text(names[index]) for index in order])
    axes.set(xlabel="AP (%)", xlim=(0, 100), ylim=(-0.9, len(names) - 0.4))
    axes.legend(fontsize="small", loc="lower right")
    axes.grid(axis="x", alpha=0.3)
    return figure


def precision_recall_section(run: RunFolder) -> Section:
    """Plot precision over recall: the mean for each IoU threshold, and each class."""
    found = run.detections
    pictures = [
        [
            Picture.from_figure(f"pr_{task}_mean", _plot_mean(evaluation, f"{TASKS[task]}, mean over classes")),
            Picture.from_figure(f"pr_{task}_classes", _plot_classes(evaluation, found, f"{TASKS[task]}, IoU 0.5")),
        ]
        for task, evaluation in found.scores.items()
    ]
    numbers = {
        task: {
            "recall": evaluation.params.recThrs.round(2).tolist(),
            "precision": {
                name: _plain(np.nanmean(precision(evaluation, iou), axis=1)) for name, iou in _THRESHOLDS.items()
            },
        }
        for task, evaluation in found.scores.items()
    }
    return Section("Precision and recall", numbers, pictures=pictures)


def _plain(values: np.ndarray) -> list[float]:
    return values.round(4).tolist()


def _precision_axes(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.5, 4), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    return figure, axes


def _plot_mean(evaluation: COCOeval, title: str) -> Figure:
    figure, axes = _precision_axes(title)
    thresholds = evaluation.params.iouThrs
    for index, iou in enumerate(thresholds):
        shade = str(0.25 + 0.55 * index / len(thresholds))
        label = f"IoU {iou:.2f}" if index in (0, len(thresholds) // 2, len(thresholds) - 1) else None
        axes.plot(evaluation.params.recThrs, np.nanmean(precision(evaluation, iou), axis=1), color=shade, label=label)
    mean = np.nanmean(precision(evaluation), axis=1)
    axes.plot(
        evaluation.params.recThrs, mean, color="tab:red", linewidth=2.2, label=f"mean, AP {100 * mean.mean():.1f}"
    )
    axes.legend(fontsize="small")
    return figure


def _plot_classes(evaluation: COCOeval, found: Detections, title: str) -> Figure:
    figure, axes = _precision_axes(title)
    curves, colors = precision(evaluation, 0.5), class_colors(found.metadata)
    for index, name in enumerate(found.class_names):
        if not np.isnan(curves[0, index]):
            label = f"{plain_text(name)}, AP50 {100 * curves[:, index].mean():.1f}"
            axes.plot(evaluation.params.recThrs, curves[:, index], color=colors[index], label=label)
    if len(axes.lines) <= _LEGEND:
        axes.legend(fontsize="small")
    return figure
