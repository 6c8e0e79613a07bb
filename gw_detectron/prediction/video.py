"""Read and write videos with OpenCV."""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ..errors import DataError, FileAccessError
from ..installation import require_packages

SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")
_FRAMES_PER_SECOND = 25.0  # of a video that does not tell
_COMPLETE = 0.8  # share of the frames, whose number some formats only estimate


class VideoReader:
    """A video file.

    Args:
        path: of the file.

    Raises:
        MissingPackageError: OpenCV is not installed.
    """

    def __init__(self, path: Path) -> None:
        require_packages(f"video ('{path}')", "cv2")
        import cv2

        self.path = path
        self._capture = cv2.VideoCapture(str(path))
        self.frame_count = max(0, int(self._capture.get(cv2.CAP_PROP_FRAME_COUNT)))
        self.frames_per_second = self._capture.get(cv2.CAP_PROP_FPS) or _FRAMES_PER_SECOND

    def frames(self) -> Iterator[np.ndarray]:
        """Yield the frames, (H, W, 3) RGB uint8.

        Raises:
            DataError: there is no frame, or far fewer than the file announces.
        """
        found, frame = self._capture.read()
        if not found:
            raise DataError(f"video ('{self.path}'): no frame can be read. Fix: repair it or give another one.")
        count = 0
        while found:
            yield np.ascontiguousarray(frame[:, :, ::-1])
            count += 1
            found, frame = self._capture.read()
        if count < _COMPLETE * self.frame_count:
            raise DataError(
                f"video ('{self.path}'): ends after {count} of about {self.frame_count} frames. Fix: repair it or get "
                "it again; the frames before are complete."
            )


class VideoWriter:
    """Write an mp4 file; its size is that of the first frame.

    Args:
        path: of the file.
        frames_per_second: of the video.
    """

    def __init__(self, path: Path, frames_per_second: float) -> None:
        self.path = path
        self.frames_per_second = frames_per_second
        self._writer: Any = None

    def write(self, frame: np.ndarray) -> None:
        """Append a frame, (H, W, 3) RGB uint8.

        Raises:
            FileAccessError: OpenCV cannot write the file.
        """
        import cv2

        if self._writer is None:
            size = (frame.shape[1], frame.shape[0])
            self._writer = cv2.VideoWriter(
                str(self.path), cv2.VideoWriter.fourcc(*"mp4v"), self.frames_per_second, size
            )
            if not self._writer.isOpened():
                raise FileAccessError(
                    f"video ('{self.path.name}'): OpenCV cannot write mp4. Fix: use --no-pictures, or install "
                    "opencv-python-headless."
                )
        self._writer.write(np.ascontiguousarray(frame[:, :, ::-1]))

    def __enter__(self) -> "VideoWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is None:
            return
        import cv2

        self._writer.release()
        # OpenCV reports no failed write
        if kind is None and not cv2.VideoCapture(str(self.path)).read()[0]:
            raise FileAccessError(f"video ('{self.path.name}'): was not written completely. Fix: free disk space.")
