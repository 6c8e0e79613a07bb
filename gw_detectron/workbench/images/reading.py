"""Read image files as Detectron2 does, with errors that name the file, and prepare them for a detector."""

import contextlib
import hashlib
import importlib.util
import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import detection_utils
from detectron2.data import transforms as transforms_d2
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor

from ...errors import DataError, MissingFileError

# Pillow's, of damaged and of huge files
_READ_ERRORS = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
BROWSER_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
IMAGE_SUFFIXES = (*BROWSER_SUFFIXES, ".tif", ".tiff", ".gif")
_DEEP = "percentiles://"
_Item = TypeVar("_Item")


def read_image(
    path: str | os.PathLike[str], pixel_format: str, percentiles: Sequence[float] = ()
) -> np.ndarray:
    """Read an image as Detectron2 does: (H, W, 3) pixels of 0 to 255, in the order of ``INPUT.FORMAT``.

    ``percentiles`` is ``INPUT.PERCENTILES``, for images of more than 8 bits; see :func:`scale_to_8_bits`.

    Raises:
        MissingFileError: the file does not exist.
        DataError: the file is not an image, damaged, or has more than 8 bits per channel and there are no percentiles.
    """
    if not os.path.isfile(path):
        raise MissingFileError(
            f"image ({os.fspath(path)!r}): file not found (cwd: {os.getcwd()!r}). Fix: give an existing path."
        )
    with _errors_of(path):
        with Image.open(path) as image:
            _check_bits(image, percentiles)
        return detection_utils.read_image(
            _address(os.fspath(path), percentiles), format=pixel_format
        )


def open_image(path: str | os.PathLike[str], percentiles: Sequence[float] = ()) -> Any:
    """Open an image of any size for windows: ``image[rows, columns]`` is (h, w, 3) RGB, ``image.shape`` is (H, W, 3).

    8-bit TIFF files are read window by window if rasterio is installed; others are read whole, into an array. Arguments
    and errors are those of :func:`read_image`; a damaged window is a DataError.
    """
    limit, Image.MAX_IMAGE_PIXELS = (
        Image.MAX_IMAGE_PIXELS,
        None,
    )  # the user knows that images are large
    try:
        if os.path.isfile(path) and importlib.util.find_spec("rasterio"):
            with _errors_of(path), Image.open(path) as image:
                upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
                if (
                    isinstance(image, TiffImageFile)
                    and image.mode in ("L", "LA", "RGB", "RGBA")
                    and upright
                ):
                    bits, photometric, extra = (
                        image.tag_v2.get(tag) for tag in (258, 262, 338)
                    )
                    if (
                        {*(bits or (1,))} == {8}
                        and photometric in (1, 2, 6)
                        and 1 not in (extra or ())
                    ):
                        return TiffWindows(
                            path
                        )  # others are inverted, deeper or multiplied by their transparency
        return read_image(path, "RGB", percentiles)
    finally:
        Image.MAX_IMAGE_PIXELS = limit


class TiffWindows:
    """An 8-bit TIFF file of which windows are read, by rasterio."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import rasterio

        self.path, self._rasterio = path, rasterio
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", rasterio.errors.NotGeoreferencedWarning
            )  # no need to be a map
            self._file = rasterio.open(path)
        self.shape = (self._file.height, self._file.width, 3)

    def __getitem__(self, window: tuple[slice, slice]) -> np.ndarray:
        """Read rows and columns; with steps, every n-th of them."""
        bands = [1, 2, 3] if self._file.count >= 3 else [1, 1, 1]
        ranges = [range(size)[part] for size, part in zip(self.shape, window, strict=False)]
        bounds = [(part.start, part.stop) for part in ranges]
        shape = (3, *map(len, ranges))
        with (
            _errors_of(self.path),
            self._rasterio.Env(GDAL_CACHEMAX=256),
        ):  # MB; the default is 5 % of the memory
            pixels = self._file.read(
                bands,
                window=self._rasterio.windows.Window.from_slices(*bounds),
                out_shape=shape,
            )
        return np.ascontiguousarray(pixels.transpose(1, 2, 0))


def upright_size(
    path: str | os.PathLike[str], percentiles: Sequence[float] = ()
) -> tuple[int, int, bool]:
    """Read width and height of an image, turned upright by its EXIF entry, and whether turning it leaves both as is."""
    with _errors_of(path), Image.open(path) as image:
        _check_bits(image, percentiles)
        try:
            # where a PNG has no such entry, Pillow would decode all of it to look for one behind the pixels
            exif = image.getexif() if image.format != "PNG" or "exif" in image.info else {}
        except Exception:  # damaged: Detectron2 leaves the image as it is
            exif = {}
        orientation = exif.get(ExifTags.Base.Orientation)
        width, height = image.size[::-1] if orientation in (5, 6, 7, 8) else image.size
        return width, height, orientation in range(2, 9) and (width, height) == image.size


def content_key(path: str | os.PathLike[str]) -> str:
    """Return a hash that equal files share, and others hardly ever, of their size and 12 KiB of their content."""
    with open(path, "rb") as file:
        size = os.path.getsize(path)
        digest = hashlib.sha256(str(size).encode())
        for place in (0, size // 2, max(0, size - 4096)):
            file.seek(place)
            digest.update(file.read(4096))
        return digest.hexdigest()


def scale_to_8_bits(values: np.ndarray, percentiles: Sequence[float]) -> np.ndarray:
    """Scale gray values so that their lower percentile becomes 0 and the upper one 255, as uint8; NaN becomes 0."""
    finite = values[np.isfinite(values)]
    low, high = np.percentile(finite, percentiles) if finite.size else (0.0, 0.0)
    scaled = 255 * (np.clip(values, low, high) - low) / (high - low if high > low else 1.0)
    return np.nan_to_num(scaled).round().astype(np.uint8)


def is_deep(path: str | os.PathLike[str]) -> bool:
    """Return whether an image has more than 8 bits per channel; not if it cannot be read."""
    with contextlib.suppress(*_READ_ERRORS), Image.open(path) as image:
        return _is_deep(image)
    return False


class _DeepImageHandler(PathHandler):
    """Open ``percentiles://LOW,HIGH/PATH``, for Detectron2's mapper: an image, scaled to 8 bits if it has more."""

    def _get_supported_prefixes(self) -> list[str]:
        return [_DEEP]

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> IO[Any]:
        percentiles, _, name = path.removeprefix(_DEEP).partition("/")
        file = PathManager.open(name, "rb")
        image = Image.open(file)
        if not _is_deep(image):
            file.seek(0)
            return file
        values = np.asarray(ImageOps.exif_transpose(image), dtype=np.float64)
        content = io.BytesIO()
        Image.fromarray(
            scale_to_8_bits(values, [float(each) for each in percentiles.split(",")])
        ).save(content, "PPM")
        file.close()
        content.seek(0)
        return content


PathManager.register_handler(_DeepImageHandler(), allow_override=True)


def _address(path: str, percentiles: Sequence[float]) -> str:
    return f"{_DEEP}{percentiles[0]:g},{percentiles[1]:g}/{path}" if percentiles else path


def _is_deep(image: Image.Image) -> bool:
    return image.mode[0] in "IF"  # gray; of deep colors, Pillow keeps the upper 8 bits


@contextlib.contextmanager
def _errors_of(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except _READ_ERRORS as error:
        many = "not an image of up to four channels; more need a mapper of your own (docs/your_data.md)"
        reason = many if isinstance(error, UnidentifiedImageError) else error
        raise DataError(
            f"image ({os.fspath(path)!r}): cannot be read: {reason}. Fix: repair it or give another one."
        ) from error


def _check_bits(image: Image.Image, percentiles: Sequence[float]) -> None:
    if _is_deep(image) and not percentiles:  # Pillow would cut its values off at 255
        raise ValueError(
            f"has more than 8 bits per channel (mode {image.mode}): set INPUT.PERCENTILES 0.5,99.5, or save it with 8"
        )


class ImageNamingMapper:
    """Dataset mapper that scales images of more than 8 bits, calls ``mapper`` and adds the file name to errors.

    An image or record that cannot be used is a DataError; other errors get the file name as a note.
    """

    def __init__(
        self, mapper: Callable[[dict], Any], percentiles: Sequence[float] = ()
    ) -> None:
        self.mapper, self.percentiles = mapper, percentiles

    def __call__(self, record: dict) -> Any:
        name = record.get("file_name", "a record without file_name")
        try:
            if not self.percentiles or "file_name" not in record:
                return self.mapper(record)
            example = self.mapper(record | {"file_name": _address(name, self.percentiles)})
            return example and example | {"file_name": name}
        except _READ_ERRORS as error:  # also Detectron2's SizeMismatchError
            raise DataError(
                f"'{name}': cannot be used: {error}. Fix: repair the image or its record (width and height are after "
                "EXIF rotation), or remove both."
            ) from error
        except Exception as error:
            error.add_note(f"while reading {name}")
            raise


def image_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the image files below a folder and in linked folders, sorted by path; there is at least one."""
    if not os.path.isdir(folder):
        raise MissingFileError(
            f"images ({os.fspath(folder)!r}): folder not found. Fix: give an existing folder."
        )
    roots, seen, paths = [os.fspath(folder)], set(), []
    for root in roots:  # links are appended: a folder that is also linked keeps its own name
        for place, below, names in os.walk(root):
            if os.path.realpath(place) in seen:  # a link to a folder above it
                below.clear()
                continue
            seen.add(os.path.realpath(place))
            roots += filter(os.path.islink, (os.path.join(place, each) for each in below))
            paths += [
                path
                for path in (Path(place, name) for name in names)
                if path.suffix.lower() in IMAGE_SUFFIXES
            ]
    if not paths:
        raise DataError(
            f"images ({os.fspath(folder)!r}): none found. Fix: put {', '.join(IMAGE_SUFFIXES)} files there."
        )
    return sorted(paths)


def evenly_spread(items: Sequence[_Item], count: int) -> list[_Item]:
    """Choose at most ``count`` items, evenly spread, the first one among them."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def evaluation_input(pixels: np.ndarray, cfg: CfgNode, scale: float | None = None) -> Tensor:
    """Resize pixels, (H, W, 3), as ``DefaultPredictor`` does, or by a factor; return (3, H', W') float32."""
    sides, shorter = pixels.shape[:2], cfg.INPUT.MIN_SIZE_TEST
    resized: Sequence[int] = [round(scale * side) for side in sides] if scale else sides
    if scale is None and shorter:
        resized = transforms_d2.ResizeShortestEdge.get_output_shape(
            *sides, shorter, cfg.INPUT.MAX_SIZE_TEST
        )
    resize = transforms_d2.ResizeTransform(
        *sides, *(max(1, side) for side in resized)
    )  # 1 x 5000: rounded to 0
    return channels_first(resize.apply_image(pixels))


def channels_first(pixels: np.ndarray) -> Tensor:
    """Return pixels, (H, W, 3), as (3, H, W) float32."""
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))).float()
