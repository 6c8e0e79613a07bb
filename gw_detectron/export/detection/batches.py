"""Batches as exported detectors take them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def pad_batch(images: Sequence[Tensor], smallest_side: int = 1) -> tuple[Tensor, Tensor]:
    """Pad images to one tensor, at least as large as a file takes.

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
