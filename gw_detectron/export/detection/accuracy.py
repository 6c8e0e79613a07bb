"""Average precision of a model and of its exported file, side by side."""

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, DatasetMapper, build_detection_test_loader
from detectron2.evaluation import COCOEvaluator
from detectron2.structures import Instances

from ...data.dataset_mapper import ImageNamingMapper
from ...errors import ConfigError, ParityError, similar_names
from ..exported_file import ExportedFile
from .calling import detect, postprocess
from .one_image import OneImageProgram
from .program import DetectorProgram

#: largest allowed difference of an AP in percent; resizing inside the file costs up to 0.03
TOLERANCE = 0.1


@dataclass(frozen=True)
class EvaluationImages:
    """Annotated images of a registered dataset, as evaluation reads them.

    Args:
        dataset: its registered name.
        inputs: Detectron2's inputs of a model.
    """

    dataset: str
    inputs: list[dict[str, Any]]

    @classmethod
    def load(cls, cfg: CfgNode, dataset: str, count: int) -> "EvaluationImages":
        """Read the first images of a dataset.

        Raises:
            ConfigError: the dataset is not registered, or the count is below 1.
            RecordError: an image or its record cannot be used.
        """
        if dataset not in DatasetCatalog.list():
            similar = similar_names(dataset, DatasetCatalog.list())
            raise ConfigError(f"dataset ({dataset!r}): not registered.{similar} Fix: give a registered dataset.")
        if count < 1:
            raise ConfigError(f"images ({count}): expected at least 1. Fix: give a number of images, e.g. 100.")
        loader = build_detection_test_loader(cfg, dataset, mapper=ImageNamingMapper(DatasetMapper(cfg, False)))
        return cls(dataset, [item for batch in islice(loader, count) for item in batch])


def compare_accuracy(
    detector: DetectorProgram,
    program: DetectorProgram | OneImageProgram,
    file: ExportedFile,
    images: EvaluationImages,
) -> dict[str, Any]:
    """Compute the AP of a model and of its exported file on the same images, one image at a time.

    Args:
        detector: the model, which takes images as evaluation resizes them.
        program: the exported program.
        file: the exported file.
        images: the images.

    Returns:
        ``dataset``, ``images``, and for ``model`` and ``exported``: task -> AP in percent.

    Raises:
        ParityError: an AP differs by more than :data:`TOLERANCE`.
    """
    tasks = ("bbox", "segm") if "masks" in detector.names else ("bbox",)

    def ap(detections: Callable[[dict[str, Any]], list[Instances]]) -> dict[str, float]:
        evaluator = COCOEvaluator(images.dataset, tasks=tasks, distributed=False, use_fast_impl=False)
        evaluator.reset()
        for item in images.inputs:
            (result,) = detections(item)
            evaluator.process([item], [{"instances": postprocess(result, item["height"], item["width"])}])
        with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
            found = evaluator.evaluate(img_ids=[item["image_id"] for item in images.inputs])
        return {task: values["AP"] for task, values in found.items()}

    expected = ap(lambda item: detector.expected([detector.evaluation_image(item)]))
    found = ap(lambda item: detect(file, [program.evaluation_image(item)]))
    for task, value in expected.items():
        if abs(np.nan_to_num(found[task]) - np.nan_to_num(value)) > TOLERANCE:  # NaN without any detection
            raise ParityError(
                f"exported file: {task} AP {found[task]:.2f} on {len(images.inputs)} images of {images.dataset}, the "
                f"model's is {value:.2f}. Fix: export for larger images (INPUT.MIN_SIZE_TEST) or in another format."
            )
    return {"dataset": images.dataset, "images": len(images.inputs), "model": expected, "exported": found}
