"""Convert Pascal VOC boxes to COCO: blood cells of https://github.com/Shenggan/BCCD_Dataset, or any folder like it.

    git clone https://github.com/Shenggan/BCCD_Dataset
    python examples/bccd_to_coco.py BCCD_Dataset/BCCD data/bccd [--max-side 320]

The folder has an .xml file for each photo, in any folders below it. Each list in ImageSets/Main becomes a file such as
data/bccd/train.json, without lists all photos annotations.json. The photos go to data/bccd/images.
"""

import argparse
import json
import re
import shutil
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

from PIL import ExifTags, Image, ImageOps

_SIDES = ("xmin", "ymin", "xmax", "ymax")
_XML = r"\s*<\?xml[^>]*\?>"  # the declaration


def convert(voc: Path, output: Path, max_side: int) -> None:
    records, photos = find_pairs(voc, output)
    names = sorted(
        {name_of(each) for root in records.values() for each in root.iter("object")}
    )
    (output / "images").mkdir(parents=True, exist_ok=True)
    categories = [
        {"id": number, "name": name} for number, name in enumerate(names, start=1)
    ]

    splits = read_lists(voc, set(photos)) or {"annotations": sorted(records)}
    for split, listed in splits.items():
        images, annotations = [], []
        for number, stem in enumerate(listed, start=1):
            if stem not in photos or stem not in records:
                raise SystemExit(
                    f"{split}: {stem} has no photo or no .xml file below {voc}"
                )
            root = records[stem]
            image, scale = copy_photo(photos[stem], output / "images", max_side, root)
            images.append({"id": number, **image})
            for each in root.iter("object"):
                box = coco_box(each, scale, image, stem)
                if box is None:
                    continue
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": number,
                        "category_id": 1 + names.index(name_of(each)),
                        "bbox": box,
                        "area": box[2] * box[3],
                        # VOC neither trains on nor counts difficult objects, as COCO with crowds
                        "iscrowd": int(is_difficult(each)),
                    }
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


def find_pairs(voc: Path, output: Path) -> tuple[dict, dict[str, Path]]:
    """Return the parsed .xml files and the photos below a folder, both by their name without suffix."""
    suffixes = set(Image.registered_extensions())
    files: dict[str, list[Path]] = defaultdict(list)
    xmls: dict[str, Path] = {}
    for path in sorted(voc.rglob("*")):
        if path.is_relative_to(output):
            continue
        if path.suffix.lower() == ".xml":
            if path.stem in xmls:
                raise SystemExit(
                    f"{path}: has the name of {xmls[path.stem]}. Fix: convert their folders one by one."
                )
            xmls[path.stem] = path
        elif path.suffix.lower() in suffixes:
            files[path.stem].append(path)
    if not xmls:
        raise SystemExit(
            f"{voc}: no .xml files. Fix: give the folder of Pascal VOC annotations and photos."
        )

    photos = {}
    for stem, paths in files.items():
        beside = [path for path in paths if path.with_suffix(".xml") in xmls.values()]
        photos[stem] = (beside or paths)[0]
    return {stem: parse(path) for stem, path in xmls.items()}, photos


def parse(path: Path) -> ElementTree.Element:
    """Parse an .xml file of any encoding that it declares; else UTF-8, or UTF-16 by its mark."""
    content = path.read_bytes()
    declared = re.match(rb"\s*<\?xml[^>]*encoding=[\"']([\w-]+)", content)
    encoding = declared[1].decode() if declared else "utf-8-sig"
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    try:
        text = content.decode(encoding).lstrip("\ufeff")
        return ElementTree.fromstring(re.sub(_XML, "", text, count=1))
    except (LookupError, ValueError, ElementTree.ParseError) as error:
        raise SystemExit(f"{path}: cannot be read: {error}") from error


def read_lists(voc: Path, stems: set[str]) -> dict[str, list[str]]:
    """Return the names of each list in ImageSets/Main."""
    lists = {}
    for path in sorted(voc.rglob("ImageSets/Main/*.txt")):
        words = path.read_text().split()
        # beside train.txt, Pascal VOC has lists of each class, such as cat_train.txt with 1 or -1 after each name
        if not {"1", "-1"} & {*words} - stems:
            lists[path.stem] = words
    return lists


def name_of(each: ElementTree.Element) -> str:
    return each.findtext("name", "").strip()


def is_difficult(each: ElementTree.Element) -> bool:
    return each.findtext("difficult", "").strip().lower() in ("1", "true", "yes")


def coco_box(
    each: ElementTree.Element, scale: float, image: dict, stem: str
) -> list[float] | None:
    """Return x, y, width and height; None, with a message, for a box that is rotated or has no area."""
    texts = [each.findtext(f"bndbox/{side}", "") for side in _SIDES]
    try:
        left, top, right, bottom = map(float, texts)
    except ValueError:
        kind = "rotated" if each.find("robndbox") is not None else f"no numbers {texts}"
        print(f"{stem}: left out the box of {name_of(each)}: {kind}")
        return None

    # VOC counts pixels from 1, and its last pixel belongs to the box
    x, y = scale * max(left - 1, 0), scale * max(top - 1, 0)
    width = min(scale * right, image["width"]) - x
    height = min(scale * bottom, image["height"]) - y
    if width <= 0 or height <= 0:
        print(f"{stem}: left out the box {texts} of {name_of(each)}, which has no area")
        return None
    return [x, y, width, height]


def copy_photo(
    source: Path, folder: Path, max_side: int, root: ElementTree.Element
) -> tuple[dict, float]:
    """Copy a photo, shrunk if a side is longer; return its record and scale.

    A photo that EXIF turns is saved as its boxes see it: upright, unless the .xml file has the size of the stored one.
    """
    target = folder / source.name
    with Image.open(source) as stored:
        is_turned = stored.getexif().get(ExifTags.Base.Orientation, 1) != 1
        upright = ImageOps.exif_transpose(stored)
        size = tuple(root.findtext(f"size/{side}", "") for side in ("width", "height"))
        is_stored = size == tuple(map(str, stored.size)) and stored.size != upright.size
        image = stored if is_stored else upright

        width = image.width
        is_large = bool(max_side) and max(image.size) > max_side
        if is_large:
            image.thumbnail((max_side, max_side))
        if is_large or is_turned:
            image.info.pop("exif", None)
            image.save(target, quality=95)
        else:
            shutil.copyfile(source, target)
        record = {
            "file_name": source.name,
            "width": image.width,
            "height": image.height,
        }
        return record, image.width / width


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("voc", type=Path, help="folder with .xml files and photos")
    parser.add_argument("output", type=Path, help="folder to create")
    parser.add_argument(
        "--max-side",
        type=int,
        default=0,
        help="shrink larger images to this longer side",
    )
    convert(**vars(parser.parse_args()))
