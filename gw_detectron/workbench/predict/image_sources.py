"""Find and read the images and videos that a user names."""

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError, MissingFileError
from ...installation import require_packages
from ..images.reading import image_files, open_image, read_image

_VIDEOS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")


@dataclass(frozen=True)
class ImageSource:
    """An image or video file."""

    path: Path  # absolute
    name: str  # unique: the path relative to the folder that all sources share

    @property
    def is_video(self) -> bool:
        return self.path.suffix.lower() in _VIDEOS

    def video(self) -> Any:
        require_packages(f"video ('{self.path}')", "cv2")
        import cv2

        return cv2.VideoCapture(str(self.path))

    def images(
        self, percentiles: Sequence[float] = (), *, windows: bool = False
    ) -> Iterator[Any]:
        """Yield the image, or a video's frames, (H, W, 3) RGB uint8; ``percentiles`` are ``INPUT.PERCENTILES``.

        An image is turned upright by its EXIF entry; gray values become RGB, transparency is dropped. With ``windows``
        it is opened by :func:`~gw_detectron.workbench.images.reading.open_image`.
        """
        if not self.is_video:
            yield (
                open_image(self.path, percentiles)
                if windows
                else read_image(self.path, "RGB", percentiles)
            )
            return
        capture, number = self.video(), 0
        import cv2

        while (found := capture.read())[0]:
            number += 1
            yield np.ascontiguousarray(found[1][:, :, ::-1])
        expected = capture.get(cv2.CAP_PROP_FRAME_COUNT)  # an estimate
        if number < max(1, 0.9 * expected):
            raise DataError(
                f"video ('{self.path}'): {number} of about {expected:.0f} frames can be read. Fix: repair it or give "
                "another one."
            )


def find_sources(inputs: Iterable[str | os.PathLike[str]]) -> list[ImageSource]:
    """Find the images and videos that files, folders and patterns such as ``photos/**/*.jpg`` name.

    A folder means the images below it; a file that is named twice is taken once. Those of a folder or pattern are
    sorted by path.
    """
    folders: list[str] = []
    paths: dict[str, None] = {}
    for given in (os.fspath(each) for each in inputs):
        is_folder = os.path.isdir(given)
        found = [
            os.path.abspath(path)
            for path in (image_files(given) if is_folder else _files(given))
        ]
        folders += [os.path.abspath(given)] if is_folder else map(os.path.dirname, found)
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
