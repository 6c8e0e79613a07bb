"""Convert a synthetic scene to COCO's panoptic and semantic ground truth.

Things are the objects and crowds, stuff is the background.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pycocotools.mask as mask_util

from .rendering import SceneObject
from .shapes import Array

SEMANTIC_CLASSES = ("things", "background")  # by their value in a semantic mask


class PanopticLabels(NamedTuple):
    """Panoptic and semantic ground truth of an image.

    Args:
        image: segment ids, (H, W, 3) uint8; the id of a pixel is R + 256 G + 256^2 B.
        semantic: index into `SEMANTIC_CLASSES`, (H, W) uint8.
        segments: COCO's `segments_info`.
    """

    image: Array
    semantic: Array
    segments: list[dict[str, Any]]


def to_panoptic(objects: Sequence[SceneObject], background_id: int) -> PanopticLabels:
    """Label every pixel of a complete `Scene` with one segment.

    Args:
        objects: of the scene; at least one. Their masks do not overlap.
        background_id: category of the background; objects have 1 ... background_id - 1.
    """
    masks = [obj.mask for obj in objects]
    background = ~np.any(masks, axis=0)
    segments = [_segment(i, obj.category + 1, obj.mask, obj.crowd) for i, obj in enumerate(objects, start=1)]
    if background.any():
        masks.append(background)
        segments.append(_segment(len(masks), background_id, background))
    ids = np.zeros(background.shape, dtype=int)
    for mask, segment in zip(masks, segments, strict=True):
        ids[mask] = segment["id"]
    image = np.stack([ids >> shift & 255 for shift in (0, 8, 16)], axis=-1)
    return PanopticLabels(image.astype(np.uint8), background.astype(np.uint8), segments)


def _segment(identifier: int, category: int, mask: Array, crowd: bool = False) -> dict[str, Any]:
    rle = mask_util.encode(np.asfortranarray(mask, dtype=np.uint8))
    return {
        "id": identifier,
        "category_id": category,
        "iscrowd": int(crowd),
        "area": int(mask.sum()),
        "bbox": mask_util.toBbox(rle).astype(int).tolist(),
    }
