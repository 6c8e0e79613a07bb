"""Image files and their preprocessing for classifiers and detectors."""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import detection_utils
from detectron2.data import transforms as transforms_d2
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms import functional as transforms

from ..errors import ConfigError, DataError, FileAccessError, MissingFileError, summarize_names
from .synthetic import SyntheticConfig, draw_scene

SIDE = 224  # pixels, of the evaluation on ImageNet
_RESIZED = 256  # the shorter side before the center crop
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of RGB values in 0 to 1
_WITH_FRAMES = ("GIF", "PNG", "TIFF", "WEBP")
#: Pillow's, of damaged and of huge files
READ_ERRORS = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
BROWSER_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
IMAGE_SUFFIXES = (*BROWSER_SUFFIXES, ".tif", ".tiff", ".gif")
_PNG_EXIF = {"exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp"}  # entries that can hold an orientation
_Item = TypeVar("_Item")


def read_image(path: str | os.PathLike[str], pixel_format: str) -> np.ndarray:
    """Read an image as Detectron2 does.

    Args:
        path: of the image.
        pixel_format: ``RGB``, ``BGR`` or another value of ``INPUT.FORMAT``.

    Returns:
        Pixels of 0 to 255, (H, W, 3). Of several frames or pages it is the first, with a warning.

    Raises:
        MissingFileError: the file does not exist.
        DataError: the file is not an image, damaged, has more than 8 bits per channel, or is a TIFF with an EXIF
            orientation.
    """
    if not os.path.isfile(path):
        raise MissingFileError(
            f"image ({os.fspath(path)!r}): file not found (cwd: {os.getcwd()!r}). Fix: give an existing path."
        )
    with _errors_of(path):
        with Image.open(path) as image:
            _check_supported(image)
            frames = getattr(image, "n_frames", 1) if image.format in _WITH_FRAMES else 1
        if frames > 1:
            logging.getLogger(__name__).warning("'%s': only the first of its %d frames or pages is read", path, frames)
        return detection_utils.read_image(os.fspath(path), format=pixel_format)


def upright_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Read width and height of an image, turned upright by its EXIF entry, from its header.

    Raises:
        DataError: the file has no header of an image, or :func:`read_image` refuses it.
    """
    with _errors_of(path), Image.open(path) as image:
        _check_supported(image)
        # where a PNG has no such entry, Pillow would decode all of it to look for one behind the pixels
        has_entry = image.format != "PNG" or not _PNG_EXIF.isdisjoint(image.info)
        turned = has_entry and _orientation(image) in (5, 6, 7, 8)
        return (image.height, image.width) if turned else image.size


@contextlib.contextmanager
def _errors_of(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except Image.DecompressionBombError as error:
        raise DataError(
            f"image ({os.fspath(path)!r}): more than {2 * (Image.MAX_IMAGE_PIXELS or 0) // 10**6} million pixels. Fix: "
            "shrink it, or cut it into tiles."
        ) from error
    except READ_ERRORS as error:
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(
            f"image ({os.fspath(path)!r}): cannot be read: {reason}. Fix: repair it or give another one."
        ) from error


def _check_supported(image: Image.Image) -> None:
    """Raise ValueError for an image that Detectron2 would read wrongly."""
    if image.mode[0] in "IF":  # Pillow would cut its values off at 255
        raise ValueError(f"has more than 8 bits per channel (mode {image.mode}): save it with 8")
    if image.format == "TIFF" and _orientation(image) != 1:
        raise ValueError(
            "a TIFF with an EXIF orientation, which Pillow and Detectron2 would both apply: save it upright"
        )


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged: Detectron2 leaves the image as it is
        return 1


def image_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the image files below a folder and the folders that it links to, sorted by path.

    A warning names files with other suffixes.

    Raises:
        MissingFileError: the folder does not exist.
        FileAccessError: a folder may not be listed.
        DataError: there are no images in it.
    """
    if not os.path.isdir(folder):
        raise MissingFileError(f"images ({os.fspath(folder)!r}): folder not found. Fix: give an existing folder.")
    seen: set[str] = set()
    paths: list[Path] = []
    others: list[str] = []
    for top, below, files in os.walk(folder, onerror=_raise_access_error, followlinks=True):
        if os.path.realpath(top) in seen:  # a link to a folder above
            below.clear()
            continue
        seen.add(os.path.realpath(top))
        for file in files:
            if Path(file).suffix.lower() in IMAGE_SUFFIXES:
                paths.append(Path(top, file))
            else:
                others.append(os.path.join(top, file))
    paths.sort()
    suffixes = ", ".join(IMAGE_SUFFIXES)
    if not paths:
        raise DataError(f"images ({os.fspath(folder)!r}): none found. Fix: put {suffixes} files there.")
    if others:
        logging.getLogger(__name__).warning(
            "images (%r): %d files are left out (%s), as they do not end in %s.",
            os.fspath(folder),
            len(others),
            summarize_names(sorted(others)),
            suffixes,
        )
    return paths


def _raise_access_error(error: OSError) -> None:
    raise FileAccessError(
        f"images ({error.filename!r}): cannot be listed: {error.strerror}. Fix: get read permission."
    ) from error


def evenly_spread(items: Sequence[_Item], count: int) -> list[_Item]:
    """Choose at most ``count`` items, evenly spread, the first one among them."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def evaluation_input(pixels: np.ndarray, cfg: CfgNode) -> Tensor:
    """Resize pixels by INPUT.MIN_SIZE_TEST and MAX_SIZE_TEST.

    Args:
        pixels: (H, W, 3).
        cfg: the config.

    Returns:
        (3, H', W') float32.

    Raises:
        ConfigError: a size is negative, or MAX_SIZE_TEST is 0.
    """
    for key, least in (("MIN_SIZE_TEST", 0), ("MAX_SIZE_TEST", 1)):
        if cfg.INPUT[key] < least:
            raise ConfigError(f"INPUT.{key} ({cfg.INPUT[key]}): expected at least {least}. Fix: give pixels, e.g. 800.")
    return resize_shortest_edge(pixels, cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST)


def resize_shortest_edge(pixels: np.ndarray, shorter: int, longest: int) -> Tensor:
    """Resize pixels, (H, W, 3), to a shorter side and at most a longest one.

    Returns:
        (3, H', W') float32.

    Source: the rule of Detectron2's ``DefaultPredictor``.
    """
    resize = transforms_d2.ResizeShortestEdge([shorter, shorter], longest).get_transform(pixels)
    for side in ("new_h", "new_w"):  # of a very long image, one rounds to 0
        if getattr(resize, side, 1) < 1:
            setattr(resize, side, 1)
    return channels_first(resize.apply_image(pixels))


def channels_first(pixels: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return pixels, (H, W, 3), as (3, H, W)."""
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))).to(dtype)


def load_images(folder: str | os.PathLike[str], count: int = 8) -> list[Image.Image]:
    """Read images below a folder as 224 x 224 center crops.

    Args:
        folder: its files are sorted by path.
        count: images to take, evenly spread over the files.

    Raises:
        MissingFileError: the folder does not exist.
        DataError: there are no images in it, or one cannot be read.
    """
    chosen = evenly_spread(image_files(folder), count)
    return [center_crop(Image.fromarray(read_image(path, "RGB"))) for path in chosen]


def synthetic_images(count: int = 4) -> list[Image.Image]:
    """Draw the same images of colored, textured shapes every time."""
    return list(draw_images(SyntheticConfig(num_val=count, min_side=SIDE, max_side=SIDE, crowd_fraction=0.0)))


def draw_images(config: SyntheticConfig) -> Iterator[Image.Image]:
    """Draw the validation images of a synthetic dataset."""
    for index in range(config.num_val):
        yield Image.fromarray(np.asarray(draw_scene(config, "val", index).image()))


def center_crop(image: Image.Image) -> Image.Image:
    """Resize the shorter side to 256 pixels and crop the center.

    The crop has 224 x 224 pixels.
    """
    return transforms.center_crop(transforms.resize(image.convert("RGB"), _RESIZED), SIDE)


def classification_input(image: Image.Image) -> Tensor:
    """Preprocess an image for an ImageNet classifier.

    Returns:
        Normalized RGB, (3, H, W) float64.
    """
    return transforms.normalize(channels_first(np.asarray(image.convert("RGB")), torch.float64) / 255, _MEAN, _STD)


def detection_input(image: Image.Image, cfg: CfgNode) -> Tensor:
    """Preprocess an image by INPUT.FORMAT, PIXEL_MEAN and PIXEL_STD, (3, H, W) float64."""
    mean, std = (
        torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)
        for values in (cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD)
    )
    pixels = detection_utils.convert_PIL_to_numpy(image, cfg.INPUT.FORMAT)
    return (channels_first(pixels, torch.float64) - mean) / std
