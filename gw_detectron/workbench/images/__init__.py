"""Image files: find them, read their pixels, prepare them for a detector."""

from .headers import read_header
from .image_files import (
    BROWSER_SUFFIXES,
    ImageNamingMapper,
    TiffWindows,
    channels_first,
    content_key,
    evaluation_input,
    evaluation_sides,
    evenly_spread,
    find_images,
    is_deep,
    not_read,
    open_image,
    read_image,
)

__all__ = [
    "BROWSER_SUFFIXES",
    "ImageNamingMapper",
    "TiffWindows",
    "channels_first",
    "content_key",
    "evaluation_input",
    "evaluation_sides",
    "evenly_spread",
    "find_images",
    "is_deep",
    "not_read",
    "open_image",
    "read_header",
    "read_image",
]
