"""Images and videos to predict on: find the files, read their pixels."""

import glob
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError, MissingFileError
from ...installation import require_packages
from ..images import find_images, open_image, read_image

log = logging.getLogger(__name__)

# cannot be read, and are named for it
_PHONES = (".heic", ".heif")
_VIDEOS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")


@dataclass(frozen=True)
class ImageSource:
    """An image or video file."""

    path: Path  # absolute
    name: str  # unique: the path relative to the folder that all sources share

    @property
    def is_video(self) -> bool:
        return self.path.suffix.lower() in _VIDEOS

    def images(
        self, percentiles: Sequence[float] = (), *, windows: bool = False
    ) -> Iterator[Any]:
        """Yield the image, or a video's frames, (H, W, 3) RGB uint8.

        An image is turned upright by its EXIF entry; gray values become RGB, transparency is
        dropped.

        Args:
            percentiles: ``INPUT.PERCENTILES``.
            windows: open an image by :func:`~gw_detectron.workbench.images.open_image`.
        """
        if self.is_video:
            yield from self._frames()
        elif windows:
            yield open_image(self.path, percentiles)
        else:
            yield read_image(self.path, "RGB", percentiles)

    def video(self) -> Any:
        require_packages(f"video ('{self.path}')", "cv2")
        import cv2

        return cv2.VideoCapture(str(self.path))

    def _frames(self) -> Iterator[np.ndarray]:
        capture = self.video()
        import cv2

        count = 0
        is_read, frame = capture.read()
        while is_read:
            count += 1
            yield np.ascontiguousarray(frame[:, :, ::-1])
            is_read, frame = capture.read()

        expected = max(1, capture.get(cv2.CAP_PROP_FRAME_COUNT))  # an estimate
        if count < 0.9 * expected:
            problem = f"{count} of about {expected:.0f} frames can be read"
            if not capture.isOpened():
                problem = "OpenCV cannot open it"
            raise DataError(
                f"video ('{self.path}'): {problem}. Fix: repair it or give another one."
            )
        if count < 0.99 * expected:
            log.warning(
                "video ('%s'): %d of about %.0f frames can be read; after a gap, frames have lower numbers. "
                "Fix: repair it.",
                self.path,
                count,
                expected,
            )


def find_sources(inputs: Iterable[str | os.PathLike[str]]) -> list[ImageSource]:
    """Find the images and videos that files, folders and patterns such as ``photos/**/*.jpg`` name.

    A folder means the images below it; a file that is named twice, or found through linked folders,
    is taken once. Those of a folder or pattern are sorted by path.
    """
    folders: list[str] = []
    paths: list[str] = []
    for given in inputs:
        if os.path.isdir(given):
            folders.append(os.path.abspath(given))
            paths += map(os.path.abspath, find_images(given, _PHONES))
        else:
            files = [os.path.abspath(path) for path in _find_files(os.fspath(given))]
            folders += map(os.path.dirname, files)
            paths += files

    if not folders:
        raise DataError(
            "inputs: none. Fix: give images, a folder, a pattern or a video."
        )
    shared = os.path.commonpath(folders)
    unique: dict[str, str] = {}
    for path in paths:
        folder, name = os.path.split(path)
        file = os.path.join(os.path.realpath(folder), name)
        # a pattern follows a link to a folder above it many times
        unique[file] = min(unique.get(file, path), path, key=len)
    return [
        ImageSource(Path(path), os.path.relpath(path, shared))
        for path in unique.values()
    ]


def _find_files(given: str) -> list[str]:
    if os.path.isfile(given):  # its name may look like a pattern
        return [given]

    found = glob.glob(given, recursive=True)
    if not found:  # brackets may be of a name
        found = glob.glob(given.replace("[", "[[]"), recursive=True)
    # a broken link is an error of its prediction
    files = sorted(path for path in found if not os.path.isdir(path))
    if not files:
        raise MissingFileError(
            f"input ('{given}'): not found (cwd: {os.getcwd()}). Fix: give images, a folder, a "
            "pattern, in which [[] means [, or a video."
        )
    return files
