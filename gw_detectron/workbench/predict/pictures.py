"""Pictures and videos with the objects drawn."""

import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.data import Metadata
from detectron2.structures import Boxes, Instances
from PIL import Image

from ...errors import FileAccessError
from ..images import BROWSER_SUFFIXES
from ..images.drawing import draw_predictions
from .sources import ImageSource

_LONGEST_SIDE = 4096  # of a picture, in pixels
_LONGEST_NAME = 255  # of a file, in bytes
_FRAMES_PER_SECOND = 25.0  # of a video that does not tell


def picture_name(source: ImageSource, names: Collection[str], number: int) -> str:
    """Return the name of a drawn picture or video, which a browser shows.

    It is that of the source, with another ending where needed; or its number where the name is
    too long or among ``names``, those of all sources. No source has the same name.
    """
    end = ".mp4" if source.is_video else ".png"
    kept = (end,) if source.is_video else BROWSER_SUFFIXES
    if source.name.lower().endswith(kept):
        return source.name

    name = source.name + end
    folder, base = os.path.split(name)
    if name in names or len(os.fsencode(base)) > _LONGEST_NAME:
        base = f"image_{number}{end}"
    while os.path.join(folder, base) in names:
        base = f"_{base}"
    return os.path.join(folder, base)


@dataclass
class Drawer:
    """Draw the objects of a source, and write the picture or an mp4 file.

    A video has the size of its first frame. Without a path, nothing is drawn.
    """

    source: ImageSource
    path: Path | None
    metadata: Metadata
    video: Any = None  # once it is open

    def draw(self, image: Any, instances: Instances) -> None:
        if self.path is None:
            return

        self.path.parent.mkdir(parents=True, exist_ok=True)
        small, shown = shrunk(image, instances)
        drawn = draw_predictions(small, self.metadata, shown)
        if not self.source.is_video:
            Image.fromarray(drawn).save(self.path, quality=95)
            return

        if self.video is None:
            self.video = self._open_video(self.path, drawn)
        bgr = drawn[:, :, ::-1]
        self.video.write(np.ascontiguousarray(bgr))

    def _open_video(self, path: Path, frame: np.ndarray) -> Any:
        import cv2

        height, width, _ = frame.shape
        rate = self.source.video().get(cv2.CAP_PROP_FPS) or _FRAMES_PER_SECOND
        codec = cv2.VideoWriter.fourcc(*"mp4v")
        video = cv2.VideoWriter(str(path), codec, rate, (width, height))
        if not video.isOpened():
            raise FileAccessError(
                f"video ('{path.name}'): OpenCV cannot write mp4. Fix: use --no-pictures."
            )
        return video

    def close(self) -> None:
        if self.video is not None:
            self.video.release()


def shrunk(
    image: Any, instances: Instances, longest: int = _LONGEST_SIDE
) -> tuple[np.ndarray, Instances]:
    """Shrink an image and its detections to ``longest`` pixels; RLE of larger ones is left out."""
    step = math.ceil(max(instances.image_size) / longest)
    small = image[::step, ::step]
    result = Instances(
        small.shape[:2], scores=instances.scores, pred_classes=instances.pred_classes
    )
    result.pred_boxes = Boxes(instances.pred_boxes.tensor / step)
    if instances.has("pred_keypoints"):
        result.pred_keypoints = instances.pred_keypoints / torch.tensor([step, step, 1])
    if instances.has("pred_masks"):
        result.pred_masks = instances.pred_masks[:, ::step, ::step]
    if instances.has("pred_masks_rle") and step == 1:
        result.pred_masks = instances.pred_masks_rle
    return small, result
