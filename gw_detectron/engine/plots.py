"""Plots of a run: training curves, and predictions beside the ground truth."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, DatasetMapper, MetadataCatalog
from detectron2.data.detection_utils import read_image
from detectron2.evaluation import inference_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import DataError
from ..pictures import draw_predictions, draw_record

# metric names of Detectron2's detectors, in the order of the legend
LOSSES = ("total_loss", "loss_cls", "loss_box_reg", "loss_mask", "loss_rpn_cls", "loss_rpn_loc", "loss_rpn_reg")
SCORES = ("bbox/AP", "segm/AP")


def read_metrics(metrics_file: str | Path) -> list[dict]:
    """Read the ``metrics.json`` of a run: one dict per iteration, in order.

    A line cut off by a kill is skipped. If a resumed run repeated an iteration, the later record counts.

    Raises:
        FileNotFoundError: the file does not exist.
        DataError: it contains no complete record.
    """
    by_iteration: dict[int, dict] = {}
    for line in Path(metrics_file).read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        by_iteration.setdefault(record["iteration"], {}).update(record)
    if not by_iteration:
        raise DataError(f"'{metrics_file}': no complete record. Fix: wait until the run has logged its metrics.")
    return [by_iteration[iteration] for iteration in sorted(by_iteration)]


def plot_curves(metrics_file: str | Path, picture: str | Path) -> None:
    """Plot the losses and the AP of a run over its iterations.

    Args:
        metrics_file: the ``metrics.json`` of Detectron2's trainer.
        picture: the PNG file to write.
    """
    records = read_metrics(metrics_file)
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    loss_axes, score_axes = figure.subplots(1, 2, sharex=True)
    _plot_each(loss_axes, records, LOSSES, marker="")
    loss_axes.set(title="Training losses", xlabel="iteration", ylabel="loss", ylim=(0, None))
    _plot_each(score_axes, records, SCORES, marker="o")
    score_axes.set(title="COCO evaluation", xlabel="iteration", ylabel="AP (%)", ylim=(0, 100))
    figure.savefig(picture, dpi=110)


def _plot_each(axes: Axes, records: Iterable[dict], names: Iterable[str], marker: str) -> None:
    for name in names:
        points = [(record["iteration"], record[name]) for record in records if name in record]
        if points:
            axes.plot(
                *zip(*points, strict=True), marker=marker, linewidth=2.2 if name == "total_loss" else 1.3, label=name
            )
    if axes.lines:
        axes.legend()
    else:
        axes.text(0.5, 0.5, "none logged", ha="center", va="center", transform=axes.transAxes)
    axes.grid(alpha=0.3)


def plot_predictions(
    cfg: CfgNode,
    model: torch.nn.Module,
    dataset_name: str,
    picture: str | Path,
    *,
    num_images: int = 4,
    score_threshold: float = 0.5,
) -> None:
    """Draw ground truth and predictions on images of a dataset.

    Args:
        cfg: the config of the model.
        model: a detector; its training mode is restored.
        dataset_name: a registered dataset, whose first images are drawn.
        picture: the PNG file to write.
        num_images: rows of the grid, one image each.
        score_threshold: lowest score of the drawn predictions.
    """
    metadata = MetadataCatalog.get(dataset_name)
    records = DatasetCatalog.get(dataset_name)[:num_images]
    mapper = DatasetMapper(cfg, is_train=False)
    figure = Figure(figsize=(12, 3.5 * len(records)), layout="constrained")
    grid = figure.subplots(len(records), 3, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for row, record in zip(grid, records, strict=True):
        image = read_image(record["file_name"], format="RGB")
        with inference_context(model), torch.no_grad():
            instances = model([mapper(record)])[0]["instances"].to("cpu")
        panels = {
            f"image {record['image_id']}": image,
            "ground truth": draw_record(image, metadata, record, keypoints=instances.has("pred_keypoints")),
            f"prediction, score > {score_threshold:g}": draw_predictions(
                image, metadata, instances[instances.scores > score_threshold]
            ),
        }
        for axes, (title, panel) in zip(row, panels.items(), strict=True):
            axes.imshow(panel)
            axes.set_title(title, fontsize=9)
    figure.savefig(picture, dpi=80)
