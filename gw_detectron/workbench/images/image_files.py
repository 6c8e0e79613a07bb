"""Image files as 8-bit pixels, read as Detectron2 does; errors name the file.

Everything reads images through the address of :func:`_address`: :func:`read_image` for prediction,
preview, export and report, and :class:`ImageNamingMapper` for training and evaluation. So all see
the same pixels, also of images with more than 8 bits.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import detection_utils
from detectron2.data.transforms import ResizeShortestEdge, ResizeTransform
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler
from PIL import Image, ImageOps, TiffImagePlugin
from torch import Tensor

from ...errors import ConfigError, DataError, MissingFileError
from . import headers
from .headers import (
    READ_ERRORS,
    check_bits,
    image_error,
    image_errors,
    image_problem,
    left_out,
    open_header,
)

BROWSER_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
IMAGE_SUFFIXES = (*BROWSER_SUFFIXES, ".tif", ".tiff", ".gif")
_SCHEME = "eight-bits://"
_RECORD_FIX = "repair the image or its record (width and height are after EXIF rotation), or remove both"
_Item = TypeVar("_Item")


def read_image(
    path: str | os.PathLike[str], pixel_format: str, percentiles: Sequence[float] = ()
) -> np.ndarray:
    """Read an image as Detectron2 does: (H, W, 3) pixels of 0 to 255.

    Args:
        path: the file.
        pixel_format: order of the channels, as in ``INPUT.FORMAT``.
        percentiles: ``INPUT.PERCENTILES``, for images of more than 8 bits; see
            :func:`scale_to_8_bits`.

    Raises:
        MissingFileError: the file does not exist.
        DataError: the file is not an image, damaged, or has more than 8 bits per channel and there
            are no percentiles.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise MissingFileError(
            f"image ({path!r}): file not found (cwd: {os.getcwd()!r}). Fix: give an existing path."
        )

    with image_errors(path):
        return detection_utils.read_image(
            _address(path, percentiles), format=pixel_format
        )


def not_read(path: str | os.PathLike[str]) -> str:
    """Name what is not read of an image file of any size, or ""."""
    with _any_size(), image_errors(path), open_header(path) as image:
        return left_out(image)


@contextlib.contextmanager
def _any_size() -> Iterator[None]:
    """Suspend Pillow's limit on pixels."""
    limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit


class ImageNamingMapper:
    """Dataset mapper that reads 8-bit pixels, and whose errors name the file.

    An image or record that cannot be used is a DataError; other errors get the file name as a note.

    Args:
        mapper: Detectron2's ``DatasetMapper``, or one that reads ``file_name`` as it does.
        percentiles: ``INPUT.PERCENTILES``.
    """

    def __init__(
        self, mapper: Callable[[dict], Any], percentiles: Sequence[float] = ()
    ) -> None:
        self.mapper = mapper
        self.percentiles = percentiles

    def __call__(self, record: dict) -> Any:
        name = record["file_name"]
        address = _address(name, self.percentiles)
        try:
            example = self.mapper(record | {"file_name": address})
        except ConfigError as error:  # of an augmentation
            error.add_note(f"while reading {name}")
            raise
        except READ_ERRORS as error:  # also Detectron2's SizeMismatchError
            problem = image_problem(name, error).replace(address, name)
            raise image_error(name, problem, _RECORD_FIX) from error
        except Exception as error:
            error.add_note(f"while reading {name}")
            raise
        return example | {"file_name": name}


def _address(path: str, percentiles: Sequence[float]) -> str:
    return f"{_SCHEME}{json.dumps([*percentiles])}/{path}"


class _EightBitHandler(PathHandler):
    """Open ``eight-bits://PERCENTILES/PATH``: an image, scaled to 8 bits if it has more.

    Detectron2's mapper reads images by their address alone, so the percentiles are part of it.
    """

    def _get_supported_prefixes(self) -> list[str]:
        return [_SCHEME]

    def _open(
        self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any
    ) -> IO[Any]:
        percentiles, _, name = path.removeprefix(_SCHEME).partition("/")
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(PathManager.open(name, "rb"))
            image = Image.open(file)
            values = json.loads(percentiles)
            check_bits(image, values)
            if headers.is_deep(image):
                return _scaled_file(image, values)

            # looking for an EXIF entry behind the pixels, Detectron2 would pass over an error, and take black pixels
            if image.format == "PNG" and not headers.has_all_chunks(
                file, checksums=True
            ):
                headers.decode(image)
            stack.pop_all()  # the reader closes it
            file.seek(0)
            return file


PathManager.register_handler(_EightBitHandler(), allow_override=True)


def _scaled_file(image: Image.Image, percentiles: Sequence[float]) -> IO[bytes]:
    """Scale an image of more than 8 bits; return it as a file in memory."""
    values = np.array(ImageOps.exif_transpose(image), dtype=np.float64)
    if image.mode == "I" and headers.is_unsigned(image):
        values[values < 0] += 2**32
    nodata = headers.nodata(image)
    if nodata is not None:
        # the tag may be a float32 in decimals
        values[np.isclose(values, nodata, rtol=1e-7, atol=0)] = np.nan

    content = io.BytesIO()
    Image.fromarray(scale_to_8_bits(values, percentiles)).save(content, "PPM")
    content.seek(0)
    return content


def scale_to_8_bits(values: np.ndarray, percentiles: Sequence[float]) -> np.ndarray:
    """Scale gray values: lower percentile to 0, upper one to 255, as uint8; NaN becomes 0.

    Where the two are equal, the lowest value becomes 0 and the highest 255.
    """
    finite = values[np.isfinite(values)]
    if not finite.size:
        return np.zeros(values.shape, np.uint8)

    low, high = np.percentile(finite, percentiles)
    if low == high:  # an even background, and few other pixels
        low, high = finite.min(), finite.max()
    width = high - low if high > low else 1.0
    scaled = 255 * (np.clip(values, low, high) - low) / width
    return np.nan_to_num(scaled).round().astype(np.uint8)


def is_deep(path: str | os.PathLike[str]) -> bool:
    """Return whether an image has more than 8 bits per channel; not if it cannot be read."""
    with contextlib.suppress(*READ_ERRORS), open_header(path) as image:
        return headers.is_deep(image)
    return False


def open_image(path: str | os.PathLike[str], percentiles: Sequence[float] = ()) -> Any:
    """Open an image of any size, for windows.

    ``image[rows, columns]`` is (h, w, 3) RGB, ``image.shape`` is (H, W, 3). 8-bit TIFF files are
    read window by window if rasterio is installed; others are read whole, into an array. Arguments
    and errors are those of :func:`read_image`; a damaged window is a DataError.
    """
    with _any_size():  # the user knows that images are large
        if (
            importlib.util.find_spec("rasterio")
            and os.path.isfile(path)
            and _is_plain_tiff(path)
        ):
            return TiffWindows(path)
        return read_image(path, "RGB", percentiles)


def _is_plain_tiff(path: str | os.PathLike[str]) -> bool:
    """Whether the values in a TIFF file are the pixels of 8 bits that Detectron2 reads."""
    with image_errors(path), Image.open(path) as image:
        if not isinstance(image, TiffImagePlugin.TiffImageFile):
            return False

        tags = image.tag_v2
        is_upright = headers.orientation(image) == 1
        has_colors = image.mode in ("L", "LA", "RGB", "RGBA")
        has_8_bits = set(tags.get(TiffImagePlugin.BITSPERSAMPLE, (1,))) == {8}
        # black is 0, or RGB, or YCbCr: others are inverted or palettes
        is_positive = tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) in (1, 2, 6)
        # by its transparency
        is_multiplied = 1 in tags.get(TiffImagePlugin.EXTRASAMPLES, ())
        return (
            is_upright
            and has_colors
            and has_8_bits
            and is_positive
            and not is_multiplied
            and not headers.is_misread(image)
        )


class TiffWindows:
    """An 8-bit TIFF file of which windows are read, by rasterio."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        import rasterio

        self.path = path
        self._rasterio = rasterio
        with warnings.catch_warnings():  # no need to be a map
            warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
            self._file = rasterio.open(path)
        self.shape = (self._file.height, self._file.width, 3)

    def __getitem__(self, window: tuple[slice, slice]) -> np.ndarray:
        """Read rows and columns; with steps, every n-th of them."""
        bands = [1, 2, 3] if self._file.count >= 3 else [1, 1, 1]
        rows, columns = (
            range(size)[part] for size, part in zip(self.shape, window, strict=False)
        )
        place = self._rasterio.windows.Window.from_slices(
            (rows.start, rows.stop), (columns.start, columns.stop)
        )

        # the cache in MB; the default is 5 % of the memory
        with image_errors(self.path), self._rasterio.Env(GDAL_CACHEMAX=256):
            pixels = self._file.read(
                bands, window=place, out_shape=(3, len(rows), len(columns))
            )
        return np.ascontiguousarray(pixels.transpose(1, 2, 0))


def content_key(path: str | os.PathLike[str]) -> str:
    """Hash the size and 12 KiB of a file: equal files share it, and others hardly ever."""
    with open(path, "rb") as file:
        size = os.path.getsize(path)
        digest = hashlib.sha256(str(size).encode())
        for place in (0, size // 2, max(0, size - 4096)):
            file.seek(place)
            digest.update(file.read(4096))
        return digest.hexdigest()


def find_images(
    folder: str | os.PathLike[str], other_suffixes: Sequence[str] = ()
) -> list[Path]:
    """Find the image files below a folder and in linked folders, sorted by path; at least one.

    Files with ``other_suffixes`` are found, too.
    """
    if not os.path.isdir(folder):
        raise MissingFileError(
            f"images ({os.fspath(folder)!r}): folder not found. Fix: give an existing folder."
        )

    suffixes = (*IMAGE_SUFFIXES, *other_suffixes)
    images = [path for path in list_files(folder) if path.suffix.lower() in suffixes]
    if not images:
        raise DataError(
            f"images ({os.fspath(folder)!r}): none found. Fix: put {', '.join(IMAGE_SUFFIXES)} "
            "files there."
        )
    return images


def list_files(folder: str | os.PathLike[str]) -> list[Path]:
    """List the files below a folder and in linked folders, sorted; hidden ones are left out."""
    return sorted(walk_files(folder))


def walk_files(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the files of :func:`list_files` as they are found."""
    seen = set()
    for place, below, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link to a folder above it, or linked twice
            below.clear()
            continue
        seen.add(real)
        below[:] = [name for name in below if not name.startswith((".", "__MACOSX"))]
        yield from (Path(place, name) for name in names if not name.startswith("."))


def only_images(files: Iterable[Path]) -> list[Path]:
    """Return the image files among others."""
    return [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES]


def evenly_spread(items: Sequence[_Item], count: int) -> list[_Item]:
    """Choose at most ``count`` items, evenly spread, the first one among them."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def evaluation_sides(height: int, width: int, cfg: CfgNode) -> tuple[int, int]:
    """Return height and width to which evaluation resizes an image."""
    if not cfg.INPUT.MIN_SIZE_TEST:
        return height, width
    sides = ResizeShortestEdge.get_output_shape(
        height, width, cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST
    )
    return max(1, sides[0]), max(1, sides[1])  # 1 x 5000 is rounded to 0


def evaluation_input(
    pixels: np.ndarray, cfg: CfgNode, scale: float | None = None
) -> Tensor:
    """Resize pixels, (H, W, 3), as evaluation does, or by a factor; return (3, H', W') float32."""
    height, width = pixels.shape[:2]
    if scale is None:
        sides = evaluation_sides(height, width, cfg)
    else:
        sides = (max(1, round(scale * height)), max(1, round(scale * width)))

    resize = ResizeTransform(height, width, *sides)
    return channels_first(resize.apply_image(pixels))


def channels_first(pixels: np.ndarray) -> Tensor:
    """Return pixels, (H, W, 3), as (3, H, W) float32."""
    # Pillow's gray pixels are read-only
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy()).float()
