"""Keypoints and panoptic ground truth of the small dataset, for the architectures that need them.

The keypoints of an object are the top, left, bottom and right point of its polygons. Things are the objects and crowds,
stuff is the background.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_panoptic_separated
from PIL import Image

from gw_detectron.workbench.dataset import SyntheticConfig
from gw_detectron.workbench.dataset.synthetic import draw_scene

KEYPOINTS = {
    "keypoint_names": ["top", "left", "bottom", "right"],
    "keypoint_flip_map": [("left", "right")],
}
BACKGROUND = len(SyntheticConfig.class_names) + 1  # its category


def add_other_tasks(root: Path, config: SyntheticConfig) -> None:
    """Add ground truth to a generated and registered dataset, and register gw_synthetic_*_panoptic_separated."""
    remove_other_tasks(config)
    folder = root / config.folder
    for split in config.splits:
        instances, panoptic = (
            folder / "annotations" / f"{kind}_{split}.json"
            for kind in ("instances", "panoptic")
        )
        segments, semantic = (
            folder / f"{kind}_{split}" for kind in ("panoptic", "panoptic_stuff")
        )
        content = json.loads(instances.read_text())
        for each in content["annotations"]:
            each |= _keypoints(each)
        instances.write_text(json.dumps(content))
        labels = []
        for index, image in enumerate(content["images"]):
            ids, found = _segments(
                [obj.mask for obj in draw_scene(config, split, index).objects]
            )
            objects = [
                each for each in content["annotations"] if each["image_id"] == image["id"]
            ]
            for segment, each in zip(found, objects, strict=False):
                segment |= {key: each[key] for key in ("category_id", "iscrowd")}
            name = image["file_name"].replace("jpg", "png")
            red_green_blue = np.stack([ids, 0 * ids, 0 * ids], axis=-1)
            for target, pixels in ((segments, red_green_blue), (semantic, ids == len(found))):
                target.mkdir(exist_ok=True)
                Image.fromarray(pixels.astype(np.uint8)).save(target / name)
            labels.append({"image_id": image["id"], "file_name": name, "segments_info": found})
        things = [{**each, "isthing": 1} for each in content["categories"]]
        categories = [*things, {"id": BACKGROUND, "name": "background", "isthing": 0}]
        panoptic.write_text(
            json.dumps({**content, "annotations": labels, "categories": categories})
        )

        name = f"{config.folder}_{split}"
        metadata = MetadataCatalog.get(name).set(**KEYPOINTS)
        both = {
            "thing_classes": metadata.thing_classes,
            "thing_dataset_id_to_contiguous_id": metadata.thing_dataset_id_to_contiguous_id,
            "stuff_classes": ["things", "background"],
            "stuff_dataset_id_to_contiguous_id": {0: 0, BACKGROUND: 1},
        }
        images, *others = map(str, (folder / split, segments, panoptic, semantic, instances))
        register_coco_panoptic_separated(f"{name}_panoptic", both, images, *others)


def remove_other_tasks(config: SyntheticConfig) -> None:
    """Remove what :func:`add_other_tasks` has registered."""
    for split in config.splits:
        for kind in ("separated", "stuffonly"):
            for catalog in (DatasetCatalog, MetadataCatalog):
                catalog.pop(f"{config.folder}_{split}_panoptic_{kind}", None)


def _keypoints(annotation: dict[str, Any]) -> dict[str, Any]:
    if annotation["iscrowd"]:  # has none, as in COCO
        return {"keypoints": [0] * 12, "num_keypoints": 0}
    x, y = np.reshape(np.concatenate(annotation["segmentation"]), (-1, 2)).T
    places = (y.argmin(), x.argmin(), y.argmax(), x.argmax())
    # the center of COCO's first pixel is 0 for keypoints, and 0.5 for polygons
    return {
        "keypoints": [v for i in places for v in (x[i] - 0.5, y[i] - 0.5, 2)],
        "num_keypoints": 4,
    }


def _segments(masks: list[np.ndarray]) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Number the masks from 1, and last the background; return the ids, (H, W), and COCO's segments_info."""
    masks = [*masks, ~np.any(masks, axis=0)]
    ids = sum(number * mask for number, mask in enumerate(masks, start=1))
    segments = []
    for number, mask in enumerate(masks, start=1):
        rows, columns = np.nonzero(mask)
        x, y = int(columns.min()), int(rows.min())
        box = [x, y, int(columns.max()) + 1 - x, int(rows.max()) + 1 - y]
        segments.append(
            {
                "id": number,
                "category_id": BACKGROUND,
                "iscrowd": 0,
                "area": int(mask.sum()),
                "bbox": box,
            }
        )
    return ids, segments
