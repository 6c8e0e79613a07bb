"""Photos of colored boxes as jpg files, with annotations in COCO format."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

#: ids with gaps, not in the order of the file
CATEGORIES = [
    {"id": 7, "name": "cup"},
    {"id": 2, "name": "fork"},
    {"id": 40, "name": "plate"},
]
CLASSES = ["fork", "cup", "plate"]  # by id
_COLORS = ("red", "green", "blue")


def photo_names(count: int, first: int = 0) -> list[str]:
    return [f"IMG_{number:04}.jpg" for number in range(first, first + count)]


def write_photos(
    folder: Path, names: Iterable[str], file: str = "annotations.json"
) -> dict[str, Any]:
    """Write ``folder/photos`` and ``folder/FILE``; return the content of the file."""
    photos = folder / "photos"
    photos.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "images": [],
        "annotations": [],
        "categories": CATEGORIES,
    }
    for number, name in enumerate(names, start=1):
        random = np.random.default_rng(int(name[4:8]))
        width, height = random.integers(64, 97, 2).tolist()
        image = Image.fromarray(
            random.integers(90, 160, (height, width, 3), dtype=np.uint8)
        )
        content["images"].append(
            {"id": number, "file_name": name, "width": width, "height": height}
        )

        for _ in range(2):
            side = int(random.integers(20, 40))
            x = int(random.integers(0, width - side))
            y = int(random.integers(0, height - side))
            kind = random.integers(3)
            ImageDraw.Draw(image).rectangle(
                (x, y, x + side, y + side), fill=_COLORS[kind]
            )
            content["annotations"].append(
                {
                    "id": len(content["annotations"]) + 1,
                    "image_id": number,
                    "category_id": CATEGORIES[kind]["id"],
                    "bbox": [x, y, side, side],
                    "area": side * side,
                    "iscrowd": 0,
                    "segmentation": [
                        [x, y, x + side, y, x + side, y + side, x, y + side]
                    ],
                }
            )
        image.save(photos / name)

    (folder / file).write_text(json.dumps(content))
    return content
