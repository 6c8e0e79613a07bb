"""What the header and the end of an image file tell: size, what readers leave out, and why it cannot be read."""

import contextlib
import os
import re
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

from detectron2.utils.file_io import PathManager
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError

from ...errors import DataError, first_line, kind_of_file

# Pillow's, of damaged and of huge files
READ_ERRORS = (
    EOFError,
    OSError,
    SyntaxError,
    ValueError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
# the beginning of a file that Pillow cannot open -> what it is, and the fix
_NOT_IMAGES = {
    rb"(?s)....ftyp(hei|hev|mif|msf)": "a HEIC photo. Fix: save it as jpg",
    rb"II[*+]\0|MM\0[*+]": (
        "a TIFF file that Pillow cannot open, e.g. truncated, of more than four channels, or of floats other than gray "
        "values of 32 bits. Fix: save it as RGB or gray, or write a mapper (docs/your_data.md)"
    ),
}
_GDAL_NODATA = 42113  # a TIFF tag
_BEGIN = 2**20  # bytes in which the pixels of a JPEG 2000 file begin
_END = 4096  # bytes in which the mark of the end is


class ImageError(DataError):
    """An image cannot be read.

    The reason and the fix are also told apart, for messages about several images.
    """

    def __init__(self, message: str, reason: str = "", fix: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.fix = fix


class ImageHeader(NamedTuple):
    """Width and height, turned upright by the EXIF entry, and what readers of the file leave out."""

    width: int
    height: int
    orientation: int  # of the EXIF entry, 1 without
    left_out: str


def read_header(
    path: str | os.PathLike[str], percentiles: Sequence[float] = ()
) -> ImageHeader:
    """Read the header of an image, and compare the end of the file with it.

    Only a file whose end looks wrong is decoded.

    Raises:
        DataError: the file is not an image, is truncated, or has more than 8 bits per channel and there are no
            ``percentiles``.
    """
    with image_errors(path), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        with open_header(path) as image:
            check_bits(image, percentiles)
            # Pillow warns of tags beyond the end
            if caught or not _looks_whole(image, path):
                decode(image)
            width, height = _upright_size(image)
            return ImageHeader(width, height, orientation(image), left_out(image))


@contextlib.contextmanager
def image_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of reading an image into an ImageError that names it."""
    try:
        yield
    except DataError:
        raise
    except (*READ_ERRORS, LookupError, TypeError) as error:  # the last: broken TIFF
        raise image_error(path, image_problem(path, error)) from error


def image_error(
    path: str | os.PathLike[str],
    problem: str,
    fix: str = "repair it or give another one",
) -> ImageError:
    """Return the error of an image with a problem, which may have a fix of its own."""
    reason, _, own_fix = problem.partition(". Fix: ")
    fix = own_fix or fix
    message = f"image ({os.fspath(path)!r}): cannot be read: {reason}. Fix: {fix}."
    return ImageError(message, reason, fix)


def image_problem(path: str | os.PathLike[str], error: BaseException) -> str:
    """Say why an image cannot be read, and the fix if it is known."""
    if isinstance(error, Image.DecompressionBombError):
        return (
            "more than 179 megapixels, Pillow's limit. Fix: predict with --tiles; to train, cut it into smaller images "
            "with their annotations"
        )
    if not isinstance(error, UnidentifiedImageError):
        return first_line(error)

    with PathManager.open(os.fspath(path), "rb") as file:
        begin = file.read(1000)
    kind = kind_of_file(begin, _NOT_IMAGES)
    if kind:
        return f"not an image file: {kind}"
    return "not an image file that Pillow reads. Fix: save it as jpg or png"


def open_header(path: str | os.PathLike[str]) -> Image.Image:
    """Open an image without decoding it; a pipe or a folder is an OSError."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError("not a file")
    return Image.open(path)


def decode(image: Image.Image) -> None:
    """Decode an image; a damaged one is an OSError."""
    try:
        image.load()
    except READ_ERRORS as error:
        raise OSError("truncated or damaged") from error


def is_deep(image: Image.Image) -> bool:
    """Return whether an image has gray values of more than 8 bits."""
    return image.mode[0] in "IF"


def check_bits(image: Image.Image, percentiles: Sequence[float]) -> None:
    """Refuse values that Pillow misreads: of more than 8 bits without percentiles, it would cut them off at 255."""
    if is_misread(image):
        raise ValueError(
            "a TIFF file of signed 8-bit values, or of 16-bit colors in planes, which Pillow misreads. Fix: save it as "
            "RGB of 8 bits"
        )
    if is_deep(image) and not percentiles:
        raise ValueError(
            "more than 8 bits per channel. Fix: set INPUT.PERCENTILES 0.5,99.5 (to predict, add the last words --opts "
            "INPUT.PERCENTILES 0.5,99.5), or save it with 8 bits"
        )


def is_misread(image: Image.Image) -> bool:
    """Return whether Pillow takes signed values of 8 bits for unsigned ones, or the bytes of 16 bits for pixels."""
    if is_deep(image) or not isinstance(image, TiffImagePlugin.TiffImageFile):
        return False
    tags = image.tag_v2
    is_signed = 2 in tags.get(TiffImagePlugin.SAMPLEFORMAT, ())
    in_planes = tags.get(TiffImagePlugin.PLANAR_CONFIGURATION) == 2
    has_16_bits = max(tags.get(TiffImagePlugin.BITSPERSAMPLE, (1,))) > 8
    # libtiff reads compressed ones well
    is_raw = "raw" in {tile[0] for tile in image.tile}
    return is_signed or (in_planes and has_16_bits and is_raw)


def is_unsigned(image: Image.Image) -> bool:
    """Return whether values of 32 bits, which Pillow reads as signed, have no sign."""
    return 1 in getattr(image, "tag_v2", {}).get(TiffImagePlugin.SAMPLEFORMAT, (1,))


def nodata(image: Image.Image) -> float | None:
    """Return the value of missing pixels by GDAL's tag in a TIFF file; None without."""
    # missing or damaged: all pixels are data
    with contextlib.suppress(LookupError, ValueError):
        return float(str(getattr(image, "tag_v2", {})[_GDAL_NODATA]))
    return None


def _looks_whole(image: Any, path: str | os.PathLike[str]) -> bool:
    """Return whether a file has the end that its format marks; False, too, where no mark is known."""
    size = os.path.getsize(path)
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return _end_of_strips(image) <= size

    with open(path, "rb", buffering=0) as file:
        if image.format == "PNG":
            return has_all_chunks(file)

        # a thumbnail in the header has the mark, too
        file.seek(max(image.fp.tell(), size - _END))
        end = file.read()
    return image.format in ("JPEG", "MPO") and b"\xff\xd9" in end


def has_all_chunks(file: IO[bytes], *, checksums: bool = False) -> bool:
    """Return whether the chunks of a PNG follow each other to the last one, and have the right ``checksums``."""
    place = len(b"\x89PNG\r\n\x1a\n")
    kind = b""
    while kind != b"IEND":
        file.seek(place)
        length, kind = file.read(4), file.read(4)
        size = int.from_bytes(length)
        if not kind.isalpha():
            return False
        if checksums:
            checksum = zlib.crc32(kind + file.read(size))
            if file.read(4) != checksum.to_bytes(4):
                return False
        # and the checksum
        place += 8 + size + 4
    return True


def _end_of_strips(image: TiffImagePlugin.TiffImageFile) -> int:
    tags = image.tag_v2
    if TiffImagePlugin.TILEOFFSETS in tags:
        offsets = tags[TiffImagePlugin.TILEOFFSETS]
        counts = tags[TiffImagePlugin.TILEBYTECOUNTS]
    else:
        offsets = tags[TiffImagePlugin.STRIPOFFSETS]
        counts = tags[TiffImagePlugin.STRIPBYTECOUNTS]
    return max(map(sum, zip(offsets, counts, strict=True)))


def _upright_size(image: Image.Image) -> tuple[int, int]:
    width, height = image.size
    return (height, width) if orientation(image) in (5, 6, 7, 8) else (width, height)


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an image, 1 without."""
    # of a PNG without an entry, Pillow would decode all to look for one behind the pixels
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    # damaged: Detectron2 leaves the image as it is
    with contextlib.suppress(Exception):
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    return 1


def page_count(image: Image.Image) -> int:
    """Return the number of pages or frames of an image file."""
    # cameras write previews into MPO files
    return 1 if image.format == "MPO" else getattr(image, "n_frames", 1)


def left_out(image: Image.Image) -> str:
    """Name what every reader leaves out of an image file, or "".

    A record has one image for its boxes, so only the first page of a file is read, in training and in prediction.
    """
    parts = []
    pages = page_count(image)
    if pages > 1:
        parts.append("page 2" if pages == 2 else f"pages 2 to {pages}")
    bits = _color_bits(image)
    if bits > 8:
        parts.append(f"the lower {bits - 8} of {bits} bits of colors")
    return " and ".join(parts)


def _color_bits(image: Any) -> int:
    """Return the bits per channel of which Pillow reads the upper 8; 8 if it reads all."""
    if is_deep(image):
        return 8
    if image.format == "JPEG2000":
        with open(image.filename, "rb") as file:
            begin = file.read(_BEGIN)
        # in the marker SIZ, bits of the first channel less 1; the upper bit is the sign
        depth = re.search(rb"(?s)\xff\x4f\xff\x51.{38}(.)", begin)
        return max(8, 1 + (depth[1][0] & 0x7F)) if depth else 8
    tiles = getattr(image, "tile", ())  # how the pixels are stored
    return 16 if ";16" in str(tiles[:1]) else 8
