"""Keypoints and panoptic ground truth of a dataset of shapes, for the architectures that need them.

The keypoints of an object are the top, left, bottom and right point of its polygons. Things are the
objects and crowds, stuff is the background.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.data.datasets import register_coco_panoptic_separated
from PIL import Image

from examples.shapes import ShapesConfig, draw_scene

KEYPOINTS = {
    "keypoint_names": ["top", "left", "bottom", "right"],
    "keypoint_flip_map": [("left", "right")],
}
BACKGROUND = len(ShapesConfig.class_names) + 1  # its category


def write_other_tasks(folder: Path, config: ShapesConfig) -> None:
    """Add keypoints to the instances of a folder, and write the panoptic files."""
    for split in config.splits:
        instances = folder / "annotations" / f"instances_{split}.json"
        content = json.loads(instances.read_text())
        for annotation in content["annotations"]:
            annotation |= _keypoints(annotation)
        instances.write_text(json.dumps(content))

        content = _write_panoptic(folder, config, split, content)
        panoptic = folder / "annotations" / f"panoptic_{split}.json"
        panoptic.write_text(json.dumps(content))


def register_panoptic(
    name: str, things: dict[str, Any], folder: Path, split: str
) -> None:
    """Register NAME_separated and NAME_stuffonly."""
    metadata = {
        **things,
        "stuff_classes": ["things", "background"],
        "stuff_dataset_id_to_contiguous_id": {0: 0, BACKGROUND: 1},
    }
    register_coco_panoptic_separated(
        name,
        metadata,
        image_root=str(folder / split),
        panoptic_root=str(folder / f"panoptic_{split}"),
        panoptic_json=str(folder / "annotations" / f"panoptic_{split}.json"),
        sem_seg_root=str(folder / f"panoptic_stuff_{split}"),
        instances_json=str(folder / "annotations" / f"instances_{split}.json"),
    )


def _write_panoptic(
    folder: Path, config: ShapesConfig, split: str, instances: Any
) -> Any:
    """Write the pictures of segments and of stuff; return the content of the panoptic json."""
    segments_folder = folder / f"panoptic_{split}"
    stuff_folder = folder / f"panoptic_stuff_{split}"
    segments_folder.mkdir()
    stuff_folder.mkdir()

    labels = []
    for index, image in enumerate(instances["images"]):
        objects = [a for a in instances["annotations"] if a["image_id"] == image["id"]]
        masks = [shown.mask for shown in draw_scene(config, split, index).objects]
        ids, segments = _segments(masks, objects)

        name = image["file_name"].replace("jpg", "png")
        red_green_blue = np.stack([ids, 0 * ids, 0 * ids], axis=-1)
        _save(red_green_blue, segments_folder / name)
        _save(ids == len(segments), stuff_folder / name)
        labels.append(
            {"image_id": image["id"], "file_name": name, "segments_info": segments}
        )

    categories = [{**category, "isthing": 1} for category in instances["categories"]]
    categories.append({"id": BACKGROUND, "name": "background", "isthing": 0})
    return {**instances, "annotations": labels, "categories": categories}


def _save(pixels: np.ndarray, file: Path) -> None:
    Image.fromarray(pixels.astype(np.uint8)).save(file)


def _keypoints(annotation: dict[str, Any]) -> dict[str, Any]:
    if annotation["iscrowd"]:  # has none, as in COCO
        return {"keypoints": [0] * 12, "num_keypoints": 0}

    x, y = np.reshape(np.concatenate(annotation["segmentation"]), (-1, 2)).T
    keypoints = []
    for index in (y.argmin(), x.argmin(), y.argmax(), x.argmax()):
        # the center of COCO's first pixel is 0 for keypoints, and 0.5 for polygons
        keypoints += [x[index] - 0.5, y[index] - 0.5, 2]
    return {"keypoints": keypoints, "num_keypoints": 4}


def _segments(
    masks: list[np.ndarray], objects: list[dict[str, Any]]
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Number the objects from 1, and last the background.

    Return the ids, (H, W), and COCO's segments_info.
    """
    background = {"category_id": BACKGROUND, "iscrowd": 0}
    masks = [*masks, ~np.any(masks, axis=0)]

    ids = np.zeros(masks[0].shape, int)
    segments = []
    for number, (mask, shown) in enumerate(
        zip(masks, [*objects, background], strict=True), start=1
    ):
        ids[mask] = number
        rows, columns = np.nonzero(mask)
        corner = [int(columns.min()), int(rows.min())]
        size = [int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1]
        segments.append(
            {
                "id": number,
                "category_id": shown["category_id"],
                "iscrowd": shown["iscrowd"],
                "area": int(mask.sum()),
                "bbox": corner + size,
            }
        )
    return ids, segments
