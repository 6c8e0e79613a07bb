"""Benchmark of detectors that predict on one image: a trained one and its exported files."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from gw_detectron.data import synthetic_images
from gw_detectron.data.images import read_image
from gw_detectron.errors import ConfigError, check_minimum
from gw_detectron.prediction import open_predictor

from .environment import describe
from .table import Row, Table
from .timing import Step, time_alternating


@dataclass(frozen=True)
class DetectorSettings:
    """Settings of the detector benchmark.

    Args:
        device: of trained detectors; exported files run on the CPU.
        models: run folders, checkpoints and exported files. Times are also divided by that of the first one.
        image: file of the image; "" for a drawn scene.
        repeats: rounds of timed predictions.

    Raises:
        ConfigError: a model is given twice, or a number is too small.
    """

    device: torch.device
    models: Sequence[str]
    image: str = ""
    repeats: int = 20

    def __post_init__(self) -> None:
        check_minimum("--repeats", self.repeats, 1)
        for model in self.models:
            if list(self.models).count(model) > 1:
                raise ConfigError(f"MODEL ('{model}'): given twice. Fix: give each model once.")

    @property
    def header(self) -> dict[str, str]:
        """The settings that two runs must share for comparable ratios."""
        return {"device": self.device.type, "image": self.image or "drawn"}

    def read_image(self) -> np.ndarray:
        """Return the image, (H, W, 3) RGB."""
        return read_image(self.image, "RGB") if self.image else np.array(synthetic_images(1)[0])


def plan_detectors(settings: DetectorSettings) -> Table:
    """Return the table that :func:`run_detectors` will measure, with 1 for every ratio."""
    height, width = settings.read_image().shape[:2]
    image = f"{height}x{width}"
    rows: list[Row] = [{"detector": model, "image": image, "note": "", "to_first": 1.0} for model in settings.models]
    return Table("detector", settings.header, rows)


def run_detectors(settings: DetectorSettings, command: str) -> Table:
    """Time the predictions of each detector, side by side.

    A prediction is what a user waits for: resizing, the network, masks pasted into the image.

    Raises:
        UserError: the image or a model cannot be opened.
    """
    image, planned = settings.read_image(), plan_detectors(settings)
    device = "cpu" if settings.device.type == "cpu" else None  # None: exported files run on the CPU
    steps = {model: Step(partial(open_predictor(model, device=device), image)) for model in settings.models}
    times = time_alternating(steps, settings.repeats, torch.device("cpu"), "predictions")  # the results are there
    first = times[settings.models[0]]["median_ms"]
    rows: list[Row] = []
    for row in planned.rows:
        found = times[row["detector"]]
        rows.append({**row, **found, "to_first": found["median_ms"] / first})
    return Table("detector", {**describe(settings.device, ["fp32"], command), **planned.header}, rows)
