"""Convert Pascal VOC boxes to COCO: blood cells of https://github.com/Shenggan/BCCD_Dataset, or any folder like it.

    git clone https://github.com/Shenggan/BCCD_Dataset
    python examples/bccd_to_coco.py BCCD_Dataset/BCCD data/bccd [--max-side 320]

Each list in ImageSets/Main becomes a file such as data/bccd/train.json, without lists all photos annotations.json. The
photos go to data/bccd/images.
"""

import argparse
import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

from PIL import Image


def convert(voc: Path, output: Path, max_side: int) -> None:
    (output / "images").mkdir(parents=True, exist_ok=True)
    records = {
        path.stem: ElementTree.parse(path).getroot()
        for path in voc.glob("Annotations/*.xml")
    }
    names = sorted(
        {
            each.findtext("name", "")
            for root in records.values()
            for each in root.iter("object")
        }
    )
    categories = [
        {"id": number, "name": name} for number, name in enumerate(names, start=1)
    ]
    if not records:
        raise SystemExit(f"{voc / 'Annotations'}: no .xml files")
    photos = {path.stem: path for path in sorted(voc.glob("JPEGImages/*"))}
    lists = {
        path.stem: path.read_text().split()
        for path in sorted(voc.glob("ImageSets/Main/*.txt"))
    }
    # beside train.txt, Pascal VOC has lists of each class, such as cat_train.txt with 1 or -1 after each name
    lists = {
        split: listed
        for split, listed in lists.items()
        if not {"1", "-1"} & {*listed} - {*photos}
    }
    for split, listed in (lists or {"annotations": sorted(records)}).items():
        images, annotations = [], []
        for number, name in enumerate(listed, start=1):
            if name not in photos or name not in records:
                raise SystemExit(
                    f"{split}: {name} has no photo in JPEGImages, or no .xml in Annotations"
                )
            image, scale = _copy(photos[name], output / "images", max_side)
            images.append({"id": number, **image})
            for each in records[name].iter("object"):
                box = [
                    float(each.findtext(f"bndbox/{side}", ""))
                    for side in ("xmin", "ymin", "xmax", "ymax")
                ]
                # VOC counts pixels from 1, and its last pixel belongs to the box
                x, y, right, bottom = (
                    value * scale
                    for value in (max(box[0] - 1, 0), max(box[1] - 1, 0), *box[2:])
                )
                width, height = (
                    min(right, image["width"]) - x,
                    min(bottom, image["height"]) - y,
                )
                if width <= 0 or height <= 0:
                    print(
                        f"{name}: left out the box {box} of {each.findtext('name')}, which has no area"
                    )
                    continue
                found = {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "bbox": [x, y, width, height],
                }
                found |= {
                    "category_id": 1 + names.index(each.findtext("name", "")),
                    "area": width * height,
                }
                # VOC neither trains on nor counts difficult objects, as COCO with crowds
                annotations.append(
                    found | {"iscrowd": int(each.findtext("difficult", "0"))}
                )
        content = {
            "images": images,
            "annotations": annotations,
            "categories": categories,
        }
        (output / f"{split}.json").write_text(json.dumps(content))
        print(
            f"{output / split}.json: {len(images)} images, {len(annotations)} boxes of {', '.join(names)}"
        )


def _copy(source: Path, folder: Path, max_side: int) -> tuple[dict, float]:
    """Copy an image, shrunk if a side is longer; the size in the xml is not trusted."""
    with Image.open(source) as image:
        width = image.width
        if max_side and max(image.size) > max_side:
            image.thumbnail((max_side, max_side))
            image.save(folder / source.name, quality=95)
        else:
            shutil.copyfile(source, folder / source.name)
        return {
            "file_name": source.name,
            "width": image.width,
            "height": image.height,
        }, image.width / width


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "voc", type=Path, help="folder with Annotations, ImageSets and JPEGImages"
    )
    parser.add_argument("output", type=Path, help="folder to create")
    parser.add_argument(
        "--max-side",
        type=int,
        default=0,
        help="shrink larger images to this longer side",
    )
    convert(**vars(parser.parse_args()))
