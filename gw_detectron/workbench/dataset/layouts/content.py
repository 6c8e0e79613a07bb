"""The content of a COCO file in the making, and what is known of labels before they are read."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import summarize_names
from ...console import progress_bar
from ...images import read_header

_ANY_BITS = (0.0, 100.0)  # only the size is read


def with_progress(photos: Mapping[Path, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield photos with their labels, with a progress bar on a terminal: masks take minutes."""
    yield from progress_bar(photos.items(), desc="reading labels", unit="photo")


class ContentBuilder:
    """Content of a COCO file in the making; ``file_name`` is relative to ``root``."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.images: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self.notes: list[str] = []
        #: EXIF orientations of photos that have one, by file name
        self.turned: dict[str, int] = {}

    def add_photo(self, path: Path) -> dict[str, Any]:
        """Add a photo by the size in its header; return its record."""
        header = read_header(path, _ANY_BITS)
        name = os.path.relpath(path, self.root)
        image = {
            "id": len(self.images) + 1,
            "file_name": name,
            "width": header.width,
            "height": header.height,
        }
        self.images.append(image)
        if header.orientation in range(2, 9):
            self.turned[name] = header.orientation
        return image

    def note_turned(self) -> None:
        """Say which photos are turned by EXIF, where labels do not tell of which photo they are."""
        if self.turned:
            self.notes.append(
                f"{len(self.turned)} photos are turned by EXIF ({summarize_names(self.turned)}). Their labels are "
                "taken as those of the upright photo."
            )

    def add_object(
        self, image: dict[str, Any], category: int, box: list[float], **fields: Any
    ) -> None:
        """Add an object of a photo; its class is an index."""
        self.annotations.append(
            {
                "id": len(self.annotations) + 1,
                "image_id": image["id"],
                "category_id": category + 1,
                "bbox": box,
                "iscrowd": 0,
                **fields,
            }
        )

    def content(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the content, with the names of the classes."""
        categories = [
            {"id": number, "name": name} for number, name in enumerate(names, start=1)
        ]
        return {
            "images": self.images,
            "annotations": self.annotations,
            "categories": categories,
        }


def clipped_box(edges: np.ndarray, image: Mapping[str, Any]) -> list[float]:
    """Return x, y, width and height of what a photo shows of a box left, top, right, bottom.

    A box without an area is left to the checks.
    """
    size = (image["width"], image["height"])
    low = edges[:2].clip(0, size)
    high = edges[2:].clip(low, size)
    return [*low.tolist(), *(high - low).tolist()]


@dataclass(frozen=True)
class Layout:
    """Labels that are recognized, but not read."""

    name: str
    files: Sequence[Path]  # of the labels
    root: str  # the folder to which file_name is relative
    # adds photos and objects, and returns the names of the classes; None for a COCO json
    read: Callable[[ContentBuilder], list[str]] | None = None
