"""The sections of a report."""

import contextlib
import io
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from ...errors import UserError
from ...modeling import build_checked_model
from ...norms import norm_summary
from ..images import evenly_spread
from .detections import CORRECT, KINDS, Detections, ImageMatches
from .run_folder import RunFolder

TASKS = {"bbox": "box", "segm": "mask", "keypoints": "keypoint"}
_METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")  # COCO's summary begins with these
_KEYPOINT_METRICS = ("AP", "AP50", "AP75", "APm", "APl")  # small objects have no keypoints
_THRESHOLDS = {"AP": None, "AP50": 0.5, "AP75": 0.75}
_SEGMENTATION = {"sem_seg/mIoU": "mIoU", "panoptic_seg/PQ": "PQ"}
_SCORES = ("AP", "mIoU", "PQ")
_VALIDATION = "validation/"  # begins the names of losses on the validation data
_LONGEST_SIDE = 960  # pixels of a photo in the page


@dataclass(frozen=True)
class Picture:
    """A picture of a report: file name, its content, a line below it, and the media type."""

    file: str
    data: bytes
    caption: str = ""
    media: str = "image/png"

    @classmethod
    def from_figure(cls, name: str, figure: Figure) -> "Picture":
        """Render a figure as PNG."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        return cls(f"{name}.png", buffer.getvalue())

    @classmethod
    def from_photo(cls, name: str, pixels: np.ndarray, caption: str) -> "Picture":
        """Encode (H, W, 3) uint8 RGB as JPEG, a tenth of a PNG, with a longer side of at most 960."""
        image = Image.fromarray(pixels)
        image.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=88)
        return cls(f"{name}.jpg", buffer.getvalue(), caption, "image/jpeg")


@dataclass(frozen=True)
class Table:
    """A table; None in a cell is undefined, and floats have one decimal. Without a header it lists facts."""

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Section:
    """A part of a report: a paragraph, rows of pictures and, below them, tables."""

    numbers: Any = None  # its entry in report.json, where NaN becomes null
    text: str = ""
    pictures: Sequence[Sequence[Picture]] = ()
    tables: Sequence[Table] = ()


def make_axes(width: float, height: float, **settings: Any) -> tuple[Figure, Axes]:
    """Make a figure of a size in inches; ``settings`` go to ``Axes.set``."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set(**settings)
    axes.grid(alpha=0.3)
    return figure, axes


def summary(run: RunFolder) -> Section:
    """Summarize a run as far as its files tell; other sections say what is missing."""
    text = ""
    scores: dict[str, dict[str, float | None]] = {}
    facts: dict[str, Any] = {"folder": str(run.folder), "dataset": run.dataset}
    missing = contextlib.suppress(UserError, OSError)
    with missing:
        scores = {task: _scores(run.detections, task) for task in run.detections.tasks}
    with missing:
        facts["images"] = len(run.records)
    with missing:
        facts["norms"] = norm_summary(build_checked_model(run.cfg, "meta"))
    with missing:
        facts |= _progress(run)
    with missing:
        facts["weights"] = run.weights
        facts |= {"best_by": run.cfg.TEST.BEST} if run.best_iteration else {}
    tables = [
        Table([], [(name.replace("_", " "), str(value)) for name, value in facts.items()])
    ]
    if scores:
        columns = list(dict.fromkeys(name for row in scores.values() for name in row))
        rows = [[TASKS[task], *map(row.get, columns)] for task, row in scores.items()]
        tables.insert(0, Table([f"percent on {run.dataset}", *columns], rows))
        if dense := [name for name in columns if "@" in name]:
            text = (
                f"Images have up to {run.detections.fingerprint.most_of_a_class} objects of a class. COCO's AP counts "
                f"100 boxes or masks per image and class, 20 of keypoints; {dense[0]} counts {dense[0][3:]}."
            )
    return Section({**facts, "scores": scores}, text, tables=tables)


def _scores(found: Detections, task: str) -> dict[str, float | None]:
    """Return the AP of a task in percent, by name; None if undefined."""
    values = dict(
        zip(
            _KEYPOINT_METRICS if task == "keypoints" else _METRICS,
            found.scores[task].stats,
            strict=False,
        )
    )
    standard = {
        name: float(100 * value) if value >= 0 else None for name, value in values.items()
    }
    return standard | found.dense_score(task)


def _progress(run: RunFolder) -> dict[str, Any]:
    """Read iterations, speed and the scores of segmentation from the metrics."""
    iterations = max(
        (each["iteration"] + 1 for each in run.metrics if "total_loss" in each), default=0
    )
    facts: dict[str, Any] = {"iterations": iterations}
    if times := [each["time"] for each in run.metrics if "time" in each]:
        facts["seconds_per_iteration"] = round(statistics.median(times), 4)
    if not run.is_evaluated:
        evaluated = [
            each["iteration"] + 1
            for each in run.metrics
            if any(key.endswith("/AP") for key in each)
        ]
        if evaluated:  # Detectron2 logs the last evaluation after the last iteration
            facts["evaluated_after_iteration"] = min(
                run.best_iteration or evaluated[-1], iterations
            )
        last = {key: value for each in run.metrics for key, value in each.items()}
        facts |= {
            name: round(last[key], 1) for key, name in _SEGMENTATION.items() if key in last
        }
    return facts


def curves(run: RunFolder) -> Section:
    """Plot losses, dashed on the validation data, learning rate and scores of a run over its iterations."""
    last = {
        name: value
        for record in run.metrics
        for name, value in record.items()
        if _is_loss(name)
    }
    pictures = [
        _curve(run, "losses", "loss", _is_loss, ""),
        _curve(run, "learning_rate", "learning rate", lambda name: name == "lr", ""),
        _curve(
            run,
            "evaluation",
            "percent",
            lambda name: name.rpartition("/")[2].split("@")[0] in _SCORES,
            "o",
        ),
    ]
    text = "Dashed: losses on the validation data. Dotted: the best weights."
    return Section({"last_losses": last}, text, pictures=[pictures])


def _is_loss(name: str) -> bool:
    return name.removeprefix(_VALIDATION).startswith(("loss", "total_loss"))


def _curve(
    run: RunFolder, name: str, label: str, wanted: Callable[[str], bool], marker: str
) -> Picture:
    figure, axes = make_axes(5.5, 3.8, xlabel="iteration", ylabel=label)
    colors: dict[str, Any] = {}
    for metric in sorted({key for record in run.metrics for key in record if wanted(key)}):
        points = [
            (record["iteration"], record[metric]) for record in run.metrics if metric in record
        ]
        trained = metric.removeprefix(_VALIDATION)  # sorted before its validation
        style: dict[str, Any] = {"label": metric, "marker": marker}
        if trained != metric:
            style = {"linestyle": "--", "marker": ".", "color": colors.get(trained)}
        (line,) = axes.plot(
            *zip(*points, strict=True),
            linewidth=2.2 if trained == "total_loss" else 1.3,
            **style,
        )
        colors[metric] = line.get_color()
    if not marker:  # AP on a scale from 0 would look flat
        axes.set_ylim(bottom=0)
    if axes.lines:
        if run.best_iteration:
            axes.axvline(run.best_iteration - 1, color="gray", linestyle=":", label="best")
        axes.legend(fontsize="small")
    else:
        axes.text(0.5, 0.5, "none logged", ha="center", va="center", transform=axes.transAxes)
    return Picture.from_figure(f"curve_{name}", figure)


def average_precision(run: RunFolder) -> Section:
    """List the AP of each class."""
    found = run.detections
    columns = {
        f"{TASKS[task]} {metric}": 100 * found.precision(task, iou).mean(0)
        for task in found.tasks
        for metric, iou in _THRESHOLDS.items()
    }
    objects = Counter(
        each["category_id"] for each in found.truth.anns.values() if not each.get("iscrowd")
    )
    detections = Counter(each["category_id"] for each in found.results)
    rows = [
        {
            "class": name,
            "objects": objects[key],
            "detections": detections[key],
            **{
                column: None if np.isnan(values[index]) else float(values[index])
                for column, values in columns.items()
            },
        }
        for index, (key, name) in enumerate(
            zip(found.category_ids, found.class_names, strict=True)
        )
    ]
    text = f"{len(found.results)} detections on {len(found.truth.imgs)} images of {run.dataset}. AP in percent."
    table = Table(list(rows[0]), [list(row.values()) for row in rows])
    return Section(rows, text, tables=[table])


def recall(run: RunFolder) -> Section:
    """Plot precision over recall, and tell why objects are not found at any score."""
    found = run.detections
    figure, axes = make_axes(
        5.5, 3.8, xlabel="recall in %", ylabel="precision in %", xlim=(0, 100), ylim=(0, 105)
    )
    for number, task in enumerate(found.tasks):
        for iou, style in ((0.5, "-"), (0.75, "--")):
            curve = 100 * np.nanmean(found.precision(task, iou), axis=1)
            label = f"{TASKS[task]}, {'OKS' if task == 'keypoints' else 'IoU'} {iou:g}"
            shown = np.where(curve > 0, curve, np.nan)  # the curve ends with the recall
            axes.plot(
                np.linspace(0, 100, len(curve)), shown, style, color=f"C{number}", label=label
            )
    axes.legend(fontsize="small")
    reasons = found.unfound()
    total = sum(not each.get("iscrowd") for each in found.truth.anns.values())
    missed = sum(reasons.values())
    text = (
        f"Boxes of any score find {total - missed} of {total} objects ({1 - missed / max(total, 1):.0%}) at an IoU of "
        f"0.5; the table says why the others are not found. The model gives up to {run.cfg.TEST.DETECTIONS_PER_IMAGE} "
        "detections per image (TEST.DETECTIONS_PER_IMAGE). Curves are class means, and end with the recall."
    )
    table = Table(["objects not found", ""], list(reasons.items()))
    numbers = {"objects": total, "found": total - missed, "not_found": reasons}
    return Section(
        numbers, text, pictures=[[Picture.from_figure("recall", figure)]], tables=[table]
    )


def _confusion(run: RunFolder) -> tuple[Picture, list[dict[str, Any]]]:
    """Plot which class the objects of each class are found as, and list the counts."""
    found, names = run.detections, run.detections.class_names
    place = {key: index for index, key in enumerate(found.category_ids)}
    counts = np.zeros((len(place), len(place) + 1), int)
    for image in run.matches:
        for box, match in zip(image.found, image.matched, strict=True):
            if match:
                counts[place[match["category_id"]], place[box["category_id"]]] += 1
        for each in image.missed:
            counts[place[each["category_id"]], -1] += 1
    kept = np.flatnonzero(counts.any(1) | counts[:, :-1].any(0))
    counts, names = counts[kept][:, [*kept, -1]], [*(names[index] for index in kept), "missed"]
    shares = counts / counts.sum(1, keepdims=True).clip(1)
    side = min(3 + 0.3 * len(names), 16)
    figure, axes = make_axes(side, side, xlabel="found as", ylabel="objects of the class")
    axes.grid(visible=False)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.axvline(len(kept) - 0.5, color="black")  # missed is not a class
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(kept)), names[:-1])
    for (row, column), share in np.ndenumerate(shares):
        if share and len(kept) <= 25:
            color = "white" if share > 0.6 else "black"
            axes.text(
                column, row, str(counts[row, column]), ha="center", va="center", color=color
            )
    numbers = [
        {
            "class": name,
            "found_as": {names[index]: int(row[index]) for index in np.flatnonzero(row)},
        }
        for name, row in zip(names, counts, strict=False)
    ]
    return Picture.from_figure("confusion", figure), numbers


def predictions(run: RunFolder) -> Section:
    """Draw ground truth and detections of images with objects, which are spread over the dataset."""
    images = [image for image in run.matches if image.found or image.missed] or run.matches
    chosen = enumerate(evenly_spread(images, run.images), 1)
    text = f"Ground truth, and detections with a score of at least {run.score:g}. Errors are named."
    return Section(
        text=text, pictures=[_photos(run, f"image_{number}", image) for number, image in chosen]
    )


def errors(run: RunFolder) -> Section:
    """Count the kinds of errors, and draw the images with the most missed objects and wrong boxes."""
    kinds = {kind: sum(image.kinds.count(kind) for image in run.matches) for kind in KINDS}
    kinds["missed"] = sum(len(image.missed) for image in run.matches)
    images = sorted(run.matches, key=lambda image: -image.errors)[: run.images]
    images = [image for image in images if image.errors]
    files = {key: image["file_name"] for key, image in run.detections.truth.imgs.items()}
    worst = [
        {"image": each.image_id, "file": files[each.image_id], "errors": each.errors}
        for each in images
    ]
    text = (
        f"Boxes with a score of at least {run.score:g} are matched to the unmatched object of any class with the "
        "largest IoU, at least 0.5. A box without a match is a duplicate of a matched object, poor (IoU from 0.1), or "
        "background."
    )
    confusion, counts = _confusion(run)
    pictures = [
        [confusion],
        *(_photos(run, f"error_{number}", image) for number, image in enumerate(images, 1)),
    ]
    table = Table(["", "boxes or objects"], list(kinds.items()))
    numbers = {"kinds": kinds, "confusion": counts, "images": worst}
    return Section(numbers, text, pictures=pictures, tables=[table])


def _photos(run: RunFolder, name: str, image: ImageMatches) -> list[Picture]:
    """Draw the objects of an image, and its detections."""
    found, objects = run.detections, run.detections.truth.imgToAnns[image.image_id]
    file = found.truth.imgs[image.image_id]["file_name"]
    missed = {id(each) for each in image.missed}
    truth = found.draw(
        image.image_id, objects, ["missed" if id(each) in missed else "" for each in objects]
    )
    kinds = [kind.replace(CORRECT, "") for kind in image.kinds]
    boxes = found.draw(image.image_id, image.found, kinds)
    wrong = sum(map(bool, kinds))
    return [
        Picture.from_photo(
            f"{name}_truth", truth, f"{file}: {len(missed)} of {len(objects)} objects missed"
        ),
        Picture.from_photo(
            f"{name}_found", boxes, f"{file}: {wrong} of {len(kinds)} boxes wrong"
        ),
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
