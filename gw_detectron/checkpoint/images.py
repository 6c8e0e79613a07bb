"""The images that weights are verified on, and the two ways of giving them to a network."""

import os
from pathlib import Path

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data.detection_utils import convert_PIL_to_numpy
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as transforms

from ..data.synthetic import SyntheticConfig, draw_scene

SIDE = 224  # pixels, of the evaluation on ImageNet
_RESIZED = 256  # the shorter side, of which the centre is taken
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of RGB values in 0 to 1
_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


def classification_input(image: Image.Image) -> Tensor:
    """Prepares an image as ImageNet classifiers are trained: RGB, divided by 255, normalised. (3, H, W) float64."""
    return transforms.normalize(_channels_first(np.asarray(image.convert("RGB"))) / 255, _MEAN, _STD)


def detection_input(image: Image.Image, cfg: CfgNode) -> Tensor:
    """Prepares an image as detectors do, by INPUT.FORMAT, PIXEL_MEAN and PIXEL_STD. (3, H, W) float64."""
    mean, std = (
        torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)
        for values in (cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD)
    )
    return (_channels_first(convert_PIL_to_numpy(image, cfg.INPUT.FORMAT)) - mean) / std


def _channels_first(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(pixels.astype(np.float64).transpose(2, 0, 1))


def synthetic_images(count: int = 4) -> list[Image.Image]:
    """Draws images of coloured, textured shapes, the same ones every time."""
    config = SyntheticConfig(num_val=count, min_side=SIDE, max_side=SIDE, crowd_fraction=0.0)
    return [Image.fromarray(np.asarray(draw_scene(config, "val", index).image())) for index in range(count)]


def load_images(folder: str | os.PathLike[str], count: int = 8) -> list[Image.Image]:
    """Reads images from anywhere below a folder, spread over it evenly, as 224 x 224 centre crops.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: there are no images in it, or one cannot be read.
    """
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no folder {folder}")
    paths = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in _SUFFIXES)
    if not paths:
        raise ValueError(f"there are no images ({', '.join(_SUFFIXES)}) below {folder}")
    chosen = paths[:: max(1, len(paths) // count)][:count]
    return [centre_crop(_open(path)) for path in chosen]


def centre_crop(image: Image.Image) -> Image.Image:
    """Resizes the shorter side to 256 pixels and takes the centre, 224 x 224."""
    return transforms.center_crop(transforms.resize(image.convert("RGB"), _RESIZED), SIDE)


def _open(path: Path) -> Image.Image:
    try:
        return Image.open(path).convert("RGB")
    except OSError as error:
        raise ValueError(f"the image {path} cannot be read: {error}") from None
