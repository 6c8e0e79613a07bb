"""The sections of a report."""

import contextlib
import io
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from ..data.images import evenly_spread
from ..errors import is_user_error
from ..modeling import build_checked_model
from ..norms import norm_summary
from .detections import CORRECT, KINDS, ImageMatches
from .run_folder import RunFolder

TASKS = {"bbox": "box", "segm": "mask", "keypoints": "keypoint"}
_METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")  # COCO's summary begins with these
_KEYPOINT_METRICS = ("AP", "AP50", "AP75", "APm", "APl")  # small objects have no keypoints
_THRESHOLDS = {"AP": None, "AP50": 0.5, "AP75": 0.75}
_SEGMENTATION = {"sem_seg/mIoU": "mIoU", "panoptic_seg/PQ": "PQ"}
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
    """Make a figure of a size in inches; ``settings`` are those of ``Axes.set``."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set(**settings)
    axes.grid(alpha=0.3)
    return figure, axes


def summary(run: RunFolder) -> Section:
    """Summarize a run as far as its files tell; other sections say what is missing."""
    scores: dict[str, dict[str, float | None]] = {}
    facts: dict[str, Any] = {"folder": str(run.folder), "dataset": run.dataset}
    with _missing_left_out():
        scores = _scores(run)
    with _missing_left_out():
        facts["images"] = len(run.records)
    facts["norms"] = norm_summary(build_checked_model(run.cfg, "meta"))
    with _missing_left_out():
        facts |= _progress(run)
    with _missing_left_out():
        facts["weights"] = run.weights
        facts |= {"best_by": run.cfg.TEST.BEST} if run.best_iteration else {}
    tables = [Table([], [(name.replace("_", " "), str(value)) for name, value in facts.items()])]
    if scores:
        rows = [[TASKS[task], *map(row.get, _METRICS)] for task, row in scores.items()]
        tables.insert(0, Table([f"percent on {run.dataset}", *_METRICS], rows))
    return Section({**facts, "scores": scores}, tables=tables)


@contextlib.contextmanager
def _missing_left_out() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not is_user_error(error):
            raise


def _scores(run: RunFolder) -> dict[str, dict[str, float | None]]:
    """Return task -> AP in percent."""
    return {
        task: {
            name: float(100 * value) if value >= 0 else None
            for name, value in zip(_KEYPOINT_METRICS if task == "keypoints" else _METRICS, found.stats, strict=False)
        }
        for task, found in run.detections.scores.items()
    }


def _progress(run: RunFolder) -> dict[str, Any]:
    """Read iterations, speed and the scores of segmentation from the metrics."""
    iterations = max(each["iteration"] + 1 for each in run.metrics if "total_loss" in each)
    facts: dict[str, Any] = {"iterations": iterations}
    if times := [each["time"] for each in run.metrics if "time" in each]:
        facts["seconds_per_iteration"] = round(statistics.median(times), 4)
    if not run.is_evaluated:
        evaluated = [each["iteration"] + 1 for each in run.metrics if any(key.endswith("/AP") for key in each)]
        if evaluated:  # Detectron2 logs the last evaluation after the last iteration
            facts["evaluated_after_iteration"] = min(run.best_iteration or evaluated[-1], iterations)
        last = {key: value for each in run.metrics for key, value in each.items()}
        facts |= {name: round(last[key], 1) for key, name in _SEGMENTATION.items() if key in last}
    return facts


def curves(run: RunFolder) -> Section:
    """Plot losses, dashed on the validation data, learning rate and scores of a run over its iterations."""
    last = {name: value for record in run.metrics for name, value in record.items() if _is_loss(name)}
    pictures = [
        _curve(run, "losses", "loss", _is_loss, ""),
        _curve(run, "learning_rate", "learning rate", lambda name: name == "lr", ""),
        _curve(run, "evaluation", "percent", lambda name: name.rpartition("/")[2] in ("AP", "mIoU", "PQ"), "o"),
    ]
    text = "Dashed: losses on the validation data. Dotted: the best weights."
    return Section({"last_losses": last}, text, pictures=[pictures])


def _is_loss(name: str) -> bool:
    return name.removeprefix(_VALIDATION).startswith(("loss", "total_loss"))


def _curve(run: RunFolder, name: str, label: str, wanted: Callable[[str], bool], marker: str) -> Picture:
    figure, axes = make_axes(5.5, 3.8, xlabel="iteration", ylabel=label)
    colors: dict[str, Any] = {}
    for metric in sorted({key for record in run.metrics for key in record if wanted(key)}):
        points = [(record["iteration"], record[metric]) for record in run.metrics if metric in record]
        trained = metric.removeprefix(_VALIDATION)  # sorted before its validation
        style: dict[str, Any] = {"label": metric, "marker": marker}
        if trained != metric:
            style = {"linestyle": "--", "marker": ".", "color": colors.get(trained)}
        width = 2.2 if trained == "total_loss" else 1.3
        (line,) = axes.plot(*zip(*points, strict=True), linewidth=width, **style)
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
    rows = [
        {
            "class": name,
            "objects": sum(not each["iscrowd"] for each in found.truth.loadAnns(found.truth.getAnnIds(catIds=[key]))),
            "detections": sum(result["category_id"] == key for result in found.results),
            **{column: None if np.isnan(values[index]) else float(values[index]) for column, values in columns.items()},
        }
        for index, (key, name) in enumerate(zip(found.category_ids, found.class_names, strict=True))
    ]
    text = f"{len(found.results)} detections on {len(found.truth.imgs)} images of {run.dataset}. AP in percent."
    table = Table(list(rows[0]), [list(row.values()) for row in rows])
    return Section(rows, text, tables=[table])


def predictions(run: RunFolder) -> Section:
    """Draw ground truth and detections of images with objects, which are spread over the dataset."""
    images = [image for image in run.matches if image.found or image.missed] or run.matches
    chosen = enumerate(evenly_spread(images, run.images), 1)
    text = f"Ground truth, and detections of score {run.score:g} and more, with what is wrong."
    return Section(text=text, pictures=[_photos(run, f"image_{number}", image) for number, image in chosen])


def errors(run: RunFolder) -> Section:
    """Count the kinds of errors, and draw the images with the most missed objects and wrong boxes."""
    kinds = {kind: sum(image.kinds.count(kind) for image in run.matches) for kind in KINDS}
    kinds["missed"] = sum(len(image.missed) for image in run.matches)
    images = sorted(run.matches, key=lambda image: -image.errors)[: run.images]
    images = [image for image in images if image.errors]
    numbers = [
        {"image": image.image_id, "file": run.detections.file_name(image.image_id), "errors": image.errors}
        for image in images
    ]
    text = (
        f"Boxes of score {run.score:g} and more take the free object of any class with the largest IoU from 0.5. A "
        "wrong box is a duplicate if its object is taken, a poor box from an IoU of 0.1, and background below."
    )
    pictures = [_photos(run, f"error_{number}", image) for number, image in enumerate(images, 1)]
    table = Table(["", "boxes or objects"], list(kinds.items()))
    return Section({"kinds": kinds, "images": numbers}, text, pictures=pictures, tables=[table])


def _photos(run: RunFolder, name: str, image: ImageMatches) -> list[Picture]:
    """Draw the objects of an image, and its detections."""
    found, objects = run.detections, run.detections.objects(image.image_id)
    file = found.file_name(image.image_id)
    missed = {id(each) for each in image.missed}
    truth = found.draw(image.image_id, objects, ["missed" if id(each) in missed else "" for each in objects])
    kinds = [kind.replace(CORRECT, "") for kind in image.kinds]
    boxes = found.draw(image.image_id, image.found, kinds)
    wrong = sum(map(bool, kinds))
    return [
        Picture.from_photo(f"{name}_truth", truth, f"{file}: {len(missed)} of {len(objects)} objects missed"),
        Picture.from_photo(f"{name}_found", boxes, f"{file}: {wrong} of {len(kinds)} boxes wrong"),
    ]


#: heading -> section, in the order of the page
SECTIONS: dict[str, Callable[[RunFolder], Section]] = {
    "Summary": summary,
    "Curves": curves,
    "AP per class": average_precision,
    "Predictions": predictions,
    "Errors": errors,
}
