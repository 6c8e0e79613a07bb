"""Recognize how labels are laid out, and read them as the content of a COCO file."""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ....errors import ConfigError, DataError, summarize_names
from ....weights.reading import sha256_of
from ...images.image_files import list_files
from ..coco_content import category_names, read_json
from .content import ContentBuilder, Layout
from .data_yaml import YAML, read_data_yaml, yaml_of_folder
from .files import read_text
from .masks import masks_layout
from .voc import voc_layout, voc_list
from .yolo import yaml_layout, yolo_files, yolo_layout, yolo_list


class LabelSet(NamedTuple):
    """Labels as the content of a COCO file."""

    content: Any
    path: str  # of the labels; of the json if a folder has nothing else
    images: str  # the folder to which file_name is relative
    layout: str = ""  # "" for a COCO json
    notes: Sequence[str] = ()

    def summary(self) -> str:
        """Say what was read, and from which folder the photos are; "" for a COCO json."""
        if not self.layout:
            return ""
        images = self.content["images"]
        root = os.path.abspath(self.images)
        folders = {
            os.path.dirname(os.path.join(root, image["file_name"])) for image in images
        }
        where = f" in '{os.path.commonpath(folders)}'" if folders else ""
        names = category_names(self.content).values()
        return (
            f"{self.layout}, {len(images):,} photos{where}, {len(self.content['annotations']):,} objects, "
            f"classes: {summarize_names(map(str, names))}"
        )


def is_layout(path: str) -> bool:
    """Return whether a path is a folder or file of labels, not a COCO json."""
    return os.path.isdir(path) or path.lower().endswith((*YAML, ".txt", ".xml"))


def names_validation(path: str) -> bool:
    """Return whether a path is YOLO's data.yaml, or its folder, with photos for validation."""
    file = Path(os.path.expanduser(path))
    if file.is_dir():
        file = yaml_of_folder(file) or file
    is_yaml = file.is_file() and file.suffix.lower() in YAML
    return is_yaml and bool(read_data_yaml(file).get("val"))


def read_labels(path: str, images: str = "", part: str = "train") -> LabelSet:
    """Read a COCO json, or labels of Pascal VOC, YOLO or masks.

    Args:
        path: the json; a folder of labels; YOLO's data.yaml; or a list of photos, such as Pascal VOC's
            ImageSets/Main/train.txt.
        images: the folder of the photos; "" for that of the labels, or one beside it.
        part: ``train`` or ``val`` of a data.yaml.

    Raises:
        DataError, ConfigError: the labels cannot be used; the message names the file and line.
    """
    if not is_layout(path):
        return LabelSet(read_json(path), path, images)
    layout = _recognize(Path(path), images, part)
    if layout.read is None:
        json = str(layout.files[0])
        return LabelSet(read_json(json), json, layout.root)
    builder = ContentBuilder(layout.root)
    names = layout.read(builder)
    content = builder.content(names)
    return LabelSet(content, path, layout.root, layout.name, builder.notes)


def labels_digest(path: str, images: str) -> str:
    """Return the digest of all label files of a path; "" if they cannot be used any more."""
    if not is_layout(path):
        return sha256_of(path)
    try:
        files = _recognize(Path(path), images, "train").files
    except (OSError, ConfigError, DataError):
        return ""
    digest = hashlib.sha256()
    for file in files:
        name = os.path.relpath(file, path)
        digest.update(f"{name!a} {sha256_of(str(file))}".encode())
    return digest.hexdigest()


def _recognize(path: Path, images: str, part: str) -> Layout:
    suffix = path.suffix.lower()
    if path.is_dir():
        yaml = yaml_of_folder(path)
        return yaml_layout(yaml, images, part) if yaml else _of_folder(path, images)

    if suffix in YAML:
        return yaml_layout(path, images, part)
    if suffix == ".xml":
        raise DataError(
            f"'{path}': the labels of one photo. Fix: give the folder of the .xml files."
        )

    if not read_text(path).strip():
        raise DataError(
            f"'{path}': names no photo. Fix: write the name of a photo in each line, or give the folder of the labels."
        )
    is_voc = "ImageSets" in path.parts
    return voc_list(path, images) if is_voc else yolo_list(path, images)


def _is_labelme(path: Path) -> bool:
    with path.open("rb") as file:
        beginning = file.read(1_000_000)
    return b'"shapes"' in beginning and b'"imagePath"' in beginning


def _of_folder(folder: Path, images: str) -> Layout:
    files = list_files(folder)
    xmls = [path for path in files if path.suffix.lower() == ".xml"]
    # GDAL's, beside a TIFF
    xmls = [path for path in xmls if not path.name.endswith(".aux.xml")]
    texts = yolo_files(files)
    if xmls and texts:
        raise DataError(
            f"'{folder}': holds labels of Pascal VOC ({len(xmls)}, e.g. '{xmls[0]}') and of YOLO ({len(texts)}, e.g. "
            f"'{texts[0]}'). Fix: give the folder of one of them."
        )
    if xmls:
        return voc_layout(folder, xmls, images)
    if texts:
        return yolo_layout(folder, texts, images)

    jsons = [path for path in files if path.suffix.lower() == ".json"]
    if len(jsons) == 1:
        return Layout("COCO", jsons, images or str(jsons[0].parent))
    if jsons and _is_labelme(jsons[0]):
        raise DataError(
            f"'{folder}': {len(jsons)} files of LabelMe, which are not read. Fix: convert them to COCO, e.g. by the "
            "package labelme2coco."
        )
    masks = masks_layout(folder, files, images)
    if masks is None:
        kinds = Counter(path.suffix.lower() or "without suffix" for path in files)
        counts = [f"{count} {kind}" for kind, count in kinds.most_common()]
        found = summarize_names(counts) or "no file"
        raise DataError(
            f"'{folder}': holds no COCO json, VOC xml, YOLO txt or masks (found: {found}). "
            "Fix: give the folder of the labels, or one json in COCO format; export others as COCO, VOC or YOLO."
        )
    return masks
