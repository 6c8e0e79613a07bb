"""The outputs of an exported detector as Detectron2's Instances."""

from collections.abc import Mapping, Sequence

import torch
from detectron2.modeling.postprocessing import detector_postprocess
from detectron2.structures import Boxes, Instances
from torch import Tensor


def to_instances(size: Sequence[int], outputs: Mapping[str, Tensor]) -> Instances:
    """Wrap the outputs for one image; rows behind the detections are dropped.

    Args:
        size: height and width of the image.
        outputs: boxes, scores, classes, count and possibly masks, by name.
    """
    count = int(outputs["count"])
    result = Instances(tuple(size))
    result.pred_boxes = Boxes(outputs["boxes"][:count])
    result.scores, result.pred_classes = outputs["scores"][:count], outputs["classes"][:count]
    if "masks" in outputs:
        masks = outputs["masks"][:count]
        result.pred_masks = masks if masks.dtype == torch.bool else masks[:, None]  # as Detectron2 shapes them
    return result


def postprocess(result: Instances, height: int, width: int) -> Instances:
    """Scale boxes to an image and paste masks into it, unless masks are pasted."""
    if result.has("pred_masks") and result.pred_masks.dtype == torch.bool:
        return result
    return detector_postprocess(result, height, width)
