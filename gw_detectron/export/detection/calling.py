"""Call an exported detector: padded batches in, Detectron2's Instances out."""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from detectron2.modeling.postprocessing import detector_postprocess
from detectron2.structures import Boxes, Instances
from torch import Tensor

from ..exported_file import ExportedFile


def detect(file: ExportedFile, images: Sequence[Tensor]) -> list[Instances]:
    """Detect in images, (3, H, W): in one padded batch, or one by one, as the file takes them."""
    expected = file.description["input"]
    rows: Iterable[Sequence[Tensor]]
    with torch.no_grad():
        if expected["name"] == "images":
            rows = zip(*file.run(*pad_batch(images, expected["smallest_side"])), strict=True)
        else:
            rows = [file.run(image) for image in images]
    named = [dict(zip(file.description["outputs"], row, strict=True)) for row in rows]
    return [to_instances(image.shape[1:], outputs) for image, outputs in zip(images, named, strict=True)]


def pad_batch(images: Sequence[Tensor], smallest_side: int) -> tuple[Tensor, Tensor]:
    """Pad images to one tensor, at least as large as the file takes.

    Args:
        images: (3, H, W) each.
        smallest_side: of the file.

    Returns:
        (N, 3, H', W') and the sizes of the images, (N, 2).
    """
    sizes = torch.tensor([image.shape[1:] for image in images])
    height, width = sizes.amax(0).clamp(min=smallest_side).tolist()
    # white padding: the file has to replace it
    pads = [(0, width - image.shape[2], 0, height - image.shape[1]) for image in images]
    return torch.stack([F.pad(image, pad, value=255.0) for image, pad in zip(images, pads, strict=True)]), sizes


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
