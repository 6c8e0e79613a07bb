"""Find the images and videos that a user names."""

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..data.images import image_files, read_image
from ..errors import DataError, MissingFileError
from .video import SUFFIXES, VideoReader


@dataclass(frozen=True)
class ImageSource:
    """An image or video file.

    Args:
        path: of the file, absolute.
        name: the path relative to the folder that all sources share, so that two sources differ in it.
    """

    path: Path
    name: str

    @property
    def is_video(self) -> bool:
        return self.path.suffix.lower() in SUFFIXES

    def count(self) -> int:
        """Return the number of images; that of a video's frames is estimated by its length."""
        return VideoReader(self.path).frame_count if self.is_video else 1

    def images(self) -> Iterator[np.ndarray]:
        """Yield the image, or a video's frames, (H, W, 3) RGB uint8.

        An image is turned upright by its EXIF entry; gray values become RGB, transparency is dropped.

        Raises:
            DataError: the file is damaged, or neither image nor video.
            MissingFileError: the file does not exist any more.
        """
        if self.is_video:
            yield from VideoReader(self.path).frames()
        else:
            yield read_image(self.path, "RGB")


def find_sources(inputs: Iterable[str | os.PathLike[str]]) -> list[ImageSource]:
    """Find the images and videos that files, folders and patterns name.

    A folder means the images below it. A pattern such as ``photos/**/*.jpg`` means the files that match it. A file that
    is named twice is taken once.

    Args:
        inputs: paths and patterns.

    Returns:
        The sources in the order of the inputs; those of a folder or pattern by path.

    Raises:
        MissingFileError: a file or folder does not exist, or no file matches a pattern.
        DataError: a folder has no images, or there are no inputs.
    """
    folders: list[str] = []
    paths: dict[str, None] = {}
    for each in inputs:
        given = os.fspath(each)
        if os.path.isdir(given):
            folders.append(os.path.abspath(given))
            found = [os.path.abspath(path) for path in image_files(given)]
        else:
            found = [os.path.abspath(path) for path in _files(given)]
            folders += map(os.path.dirname, found)
        paths |= dict.fromkeys(found)
    if not folders:
        raise DataError("inputs: none. Fix: give images, a folder, a pattern or a video.")
    shared = os.path.commonpath(folders)
    return [ImageSource(Path(path), os.path.relpath(path, shared)) for path in paths]


def _files(given: str) -> list[str]:
    if os.path.isfile(given):
        return [given]
    found = sorted(path for path in glob.glob(given, recursive=True) if os.path.isfile(path))
    if not found:
        raise MissingFileError(
            f"input ('{given}'): not found (cwd: {os.getcwd()}). Fix: give images, a folder, a pattern or a video."
        )
    return found
