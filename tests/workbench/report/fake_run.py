"""A run folder without a training: photos, predictions made from the ground truth, metrics, weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image, ImageDraw

from gw_detectron.config import read_config

from ...tiny_run import CONFIG, OPTS

IMAGES, OBJECTS, SIDE = 6, 3, 96


def write_run(folder: Path, *, classes: int = 3, config: Path = CONFIG, **options: Any) -> Path:
    """Write a run of boxes on photos; options are config keys with ``__`` for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    content = _photos(folder / "photos", classes)
    (folder / "annotations.json").write_text(json.dumps(content))
    dataset = {"json": "annotations.json", "images": "photos"}
    (folder / "datasets.yaml").write_text(
        yaml.safe_dump({"train": {"fake_train": dataset}, "val": {"fake_val": dataset}})
    )
    opts = {
        **OPTS,
        "OUTPUT_DIR": folder,
        "DATASETS.TRAIN": "('fake_train',)",
        "DATASETS.TEST": "('fake_val',)",
        "MODEL.MASK_ON": False,
        "MODEL.ROI_HEADS.NUM_CLASSES": classes,
        "MODEL.RETINANET.NUM_CLASSES": classes,
        **{key.replace("__", "."): value for key, value in options.items()},
    }
    opts["SOLVER.MAX_ITER"] = 40
    cfg = read_config(str(config), [str(word) for pair in opts.items() for word in pair])
    (folder / "config.yaml").write_text(cfg.dump())
    records = [
        {"iteration": i, "total_loss": 9 / (i + 1), "loss_cls": 1.0, "lr": 0.1, "time": 0.5}
        for i in (0, 20, 39)
    ]
    records.append({"iteration": 40, "bbox/AP": 12.5, "bbox/APl": float("nan")})
    (folder / "metrics.json").write_text("\n".join(map(json.dumps, records)) + "\n")
    (folder / "inference").mkdir(exist_ok=True)
    (folder / "inference" / "coco_instances_results.json").write_text(
        json.dumps(_predictions(content))
    )
    return folder


def _photos(folder: Path, classes: int) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    # the first name has to be escaped, in the page and in figures
    names = [f"class {index}" if index else "<b>$x_$" for index in range(classes)]
    content: dict[str, Any] = {
        "images": [],
        "annotations": [],
        "categories": [{"id": 10 + index, "name": name} for index, name in enumerate(names)],
    }
    random = np.random.default_rng(0)
    for image_id in range(1, IMAGES + 1):
        image = Image.fromarray(random.integers(90, 160, (SIDE, SIDE, 3), dtype=np.uint8))
        for index in range(OBJECTS):
            side, number = 24, len(content["annotations"])
            box = [4 + 30 * index, int(random.integers(0, SIDE - side)), side, side]
            ImageDraw.Draw(image).rectangle(
                [*box[:2], box[0] + side, box[1] + side], fill=(number % 255, 80, 200)
            )
            (x, y), shape = box[:2], {"bbox": box, "area": side**2, "iscrowd": 0}
            shape["segmentation"] = [[x, y, x + side, y, x + side, y + side, x, y + side]]
            ids = {"id": number + 1, "image_id": image_id, "category_id": 10 + number % classes}
            content["annotations"].append({**ids, **shape})
        image.save(folder / f"{image_id}.jpg")
        content["images"].append(
            {"id": image_id, "file_name": f"{image_id}.jpg", "width": SIDE, "height": SIDE}
        )
    return content


def _predictions(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Find two of three objects, every fourth with the class of the next, moved by a few pixels."""
    ids = [category["id"] for category in content["categories"]]
    results = []
    for number, each in enumerate(content["annotations"]):
        if number % 3 == 2:
            continue
        category = each["category_id"]
        if number % 4 == 3:
            category = ids[(ids.index(category) + 1) % len(ids)]
        x, y, width, height = each["bbox"]
        box = [x + number % 5, y, width, height]
        results.append(
            {
                "image_id": each["image_id"],
                "category_id": category,
                "bbox": box,
                "score": 0.99 - 0.03 * number,
            }
        )
    return results
