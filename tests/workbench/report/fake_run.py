"""A run folder without a training: photos, predictions from the ground truth, metrics."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image, ImageDraw

from gw_detectron.config import read_config

from ...tiny_run import CONFIG, OPTS

IMAGES, OBJECTS, SIDE = 6, 3, 96


def write_run(
    folder: Path, *, classes: int = 3, config: Path = CONFIG, **options: Any
) -> Path:
    """Write a run of boxes on photos; options are config keys with ``__`` for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    content = _photos(folder / "photos", classes)
    (folder / "annotations.json").write_text(json.dumps(content))
    dataset = {"json": "annotations.json", "images": "photos"}
    datasets = {"train": {"fake_train": dataset}, "val": {"fake_val": dataset}}
    (folder / "datasets.yaml").write_text(yaml.safe_dump(datasets))

    opts = {
        **OPTS,
        "OUTPUT_DIR": folder,
        "DATASETS.TRAIN": "('fake_train',)",
        "DATASETS.TEST": "('fake_val',)",
        "MODEL.MASK_ON": False,
        "MODEL.ROI_HEADS.NUM_CLASSES": classes,
        "MODEL.RETINANET.NUM_CLASSES": classes,
        "SOLVER.MAX_ITER": 40,
        **{key.replace("__", "."): value for key, value in options.items()},
    }
    cfg = read_config(
        str(config), [str(word) for pair in opts.items() for word in pair]
    )
    (folder / "config.yaml").write_text(cfg.dump())

    losses = {"loss_cls": 1.0, "lr": 0.1, "time": 0.5}
    write_metrics(
        folder,
        *({"iteration": i, "total_loss": 9 / (i + 1), **losses} for i in (0, 20, 39)),
        {"iteration": 40, "bbox/AP": 12.5, "bbox/APl": float("nan")},
    )
    (folder / "inference").mkdir(exist_ok=True)
    results_file(folder).write_text(json.dumps(_predictions(content)))
    return folder


def results_file(folder: Path) -> Path:
    return folder / "inference" / "coco_instances_results.json"


def write_metrics(folder: Path, *records: dict[str, Any]) -> None:
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "metrics.json").write_text("".join(lines))


def change_json(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def _photos(folder: Path, classes: int) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    # the first name has to be escaped, in the page and in figures
    names = ["<b>$x_$", *(f"class {index}" for index in range(1, classes))]
    images = []
    annotations: list[dict[str, Any]] = []
    random = np.random.default_rng(0)
    for image_id in range(1, IMAGES + 1):
        image = Image.fromarray(
            random.integers(90, 160, (SIDE, SIDE, 3), dtype=np.uint8)
        )
        for index in range(OBJECTS):
            number = len(annotations)
            x = 4 + 30 * index
            y = int(random.integers(0, SIDE - 24))
            corners = [x, y, x + 24, y + 24]
            ImageDraw.Draw(image).rectangle(corners, fill=(number % 255, 80, 200))
            annotations.append(
                {
                    "id": number + 1,
                    "image_id": image_id,
                    "category_id": 10 + number % classes,
                    "bbox": [x, y, 24, 24],
                    "area": 24**2,
                    "iscrowd": 0,
                    "segmentation": [[x, y, x + 24, y, x + 24, y + 24, x, y + 24]],
                }
            )
        file = f"{image_id}.jpg"
        image.save(folder / file)
        images.append(
            {"id": image_id, "file_name": file, "width": SIDE, "height": SIDE}
        )

    categories = [{"id": 10 + index, "name": name} for index, name in enumerate(names)]
    return {"images": images, "annotations": annotations, "categories": categories}


def _predictions(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Find two of three objects, every fourth with the class of the next, moved by a few pixels."""
    ids = [category["id"] for category in content["categories"]]
    results = []
    for number, annotation in enumerate(content["annotations"]):
        if number % 3 == 2:
            continue
        place = ids.index(annotation["category_id"])
        if number % 4 == 3:
            place = (place + 1) % len(ids)
        x, *rest = annotation["bbox"]
        results.append(
            {
                "image_id": annotation["image_id"],
                "category_id": ids[place],
                "bbox": [x + number % 5, *rest],
                "score": 0.99 - 0.03 * number,
            }
        )
    return results
