"""Read image files as Detectron2 does, with errors that name the file, and prepare them for a detector."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import detection_utils
from detectron2.data import transforms as transforms_d2
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from ..errors import DataError, MissingFileError

# Pillow's, of damaged and of huge files
_READ_ERRORS = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
BROWSER_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
IMAGE_SUFFIXES = (*BROWSER_SUFFIXES, ".tif", ".tiff", ".gif")
_Item = TypeVar("_Item")


def read_image(path: str | os.PathLike[str], pixel_format: str) -> np.ndarray:
    """Read an image as Detectron2 does: (H, W, 3) pixels of 0 to 255, in the order of ``INPUT.FORMAT``.

    Raises:
        MissingFileError: the file does not exist.
        DataError: the file is not an image, damaged, or has more than 8 bits per channel.
    """
    if not os.path.isfile(path):
        raise MissingFileError(
            f"image ({os.fspath(path)!r}): file not found (cwd: {os.getcwd()!r}). Fix: give an existing path."
        )
    with _errors_of(path):
        with Image.open(path) as image:
            _check_bits(image)
        return detection_utils.read_image(os.fspath(path), format=pixel_format)


def upright_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Read width and height of an image, turned upright by its EXIF entry, from its header."""
    with _errors_of(path), Image.open(path) as image:
        _check_bits(image)
        try:
            # where a PNG has no such entry, Pillow would decode all of it to look for one behind the pixels
            exif = image.getexif() if image.format != "PNG" or "exif" in image.info else {}
        except Exception:  # damaged: Detectron2 leaves the image as it is
            exif = {}
        turned = exif.get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
        return (image.height, image.width) if turned else image.size


@contextlib.contextmanager
def _errors_of(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except _READ_ERRORS as error:
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(
            f"image ({os.fspath(path)!r}): cannot be read: {reason}. Fix: repair it or give another one."
        ) from error


def _check_bits(image: Image.Image) -> None:
    if image.mode[0] in "IF":  # Pillow would cut its values off at 255
        raise ValueError(f"has more than 8 bits per channel (mode {image.mode}): save it with 8")


class ImageNamingMapper:
    """Dataset mapper that adds the image's file name to errors.

    Args:
        mapper: Detectron2's ``DatasetMapper`` or another callable from record to training example.

    Raises:
        DataError: the image or its record cannot be used; other errors get the file name as a note.
    """

    def __init__(self, mapper: Callable[[dict], Any]) -> None:
        self.mapper = mapper

    def __call__(self, record: dict) -> Any:
        name = record.get("file_name", "a record without file_name")
        try:
            return self.mapper(record)
        except _READ_ERRORS as error:  # also Detectron2's SizeMismatchError
            raise DataError(
                f"'{name}': cannot be used: {error}. Fix: repair the image or its record (width and height are those "
                "of the upright photo), or remove both."
            ) from error
        except Exception as error:
            error.add_note(f"while reading {name}")
            raise


def image_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the image files below a folder, sorted by path; there is at least one."""
    if not os.path.isdir(folder):
        raise MissingFileError(f"images ({os.fspath(folder)!r}): folder not found. Fix: give an existing folder.")
    paths = sorted(path for path in Path(folder).rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    if not paths:
        raise DataError(
            f"images ({os.fspath(folder)!r}): none found. Fix: put {', '.join(IMAGE_SUFFIXES)} files there."
        )
    return paths


def evenly_spread(items: Sequence[_Item], count: int) -> list[_Item]:
    """Choose at most ``count`` items, evenly spread, the first one among them."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def evaluation_input(pixels: np.ndarray, cfg: CfgNode) -> Tensor:
    """Resize pixels, (H, W, 3), as Detectron2's ``DefaultPredictor`` does; return (3, H', W') float32."""
    shorter, longest = cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST
    resize = transforms_d2.ResizeShortestEdge([shorter, shorter], longest).get_transform(pixels)
    return channels_first(resize.apply_image(pixels))


def channels_first(pixels: np.ndarray) -> Tensor:
    """Return pixels, (H, W, 3), as (3, H, W) float32."""
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))).float()
