"""Pascal VOC: an .xml file for each photo, with the corners of its boxes."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from ....errors import DataError, printable, summarize_names
from ...images.image_files import list_files
from .content import ContentBuilder, Layout, clipped_box, with_progress
from .data_yaml import find_names
from .files import label_of_each, photos_of, read_text

_SIDES = ("xmin", "ymin", "xmax", "ymax")
_DECLARATION = r"\s*<\?xml[^>]*\?>"
# EXIF orientations that exchange width and height: whether x and y of the upright photo count from the other end
_TURNS = {5: (False, False), 6: (True, False), 7: (True, True), 8: (False, True)}


def voc_layout(folder: Path, xmls: Sequence[Path], images: str) -> Layout:
    """Return the layout of a folder with .xml files."""
    root, photos = photos_of(folder, images)
    return _layout(folder, xmls, root, photos)


def voc_list(path: Path, images: str) -> Layout:
    """Return the layout of the photos in a list such as ImageSets/Main/train.txt."""
    folder = Path(*path.parts[: path.parts.index("ImageSets")])
    # a backup of Annotations may be beside it
    xmls = _xmls_by_stem(folder) | _xmls_by_stem(folder / "Annotations")
    stems = set()
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        stem = line.strip()
        if not stem:
            continue
        if stem not in xmls:  # lists of a class have 1, 0 or -1 after each name
            stem = re.sub(r"\s+-?[01]$", "", stem)
        if stem not in xmls:
            raise DataError(
                f"'{path}', line {number}: no file '{stem}.xml' below '{folder}'. Fix: correct the list."
            )
        stems.add(stem)

    root, photos = photos_of(folder, images)
    listed = [photo for photo in photos if photo.stem in stems]
    chosen = [xml for stem in sorted(stems) for xml in xmls[stem]]
    return _layout(folder, chosen, root, listed)


def _xmls_by_stem(folder: Path) -> dict[str, list[Path]]:
    by_stem: dict[str, list[Path]] = defaultdict(list)
    for file in list_files(folder):
        if file.suffix.lower() == ".xml":
            by_stem[file.stem].append(file)
    return by_stem


def _layout(
    folder: Path, xmls: Sequence[Path], root: str, photos: Sequence[Path]
) -> Layout:
    def read(builder: ContentBuilder) -> list[str]:
        labels = label_of_each(xmls, photos, builder.notes)
        listed, _ = find_names(folder)
        return _read_voc(labels, listed, builder)

    return Layout("Pascal VOC", xmls, root, read)


def _read_voc(
    labels: Mapping[Path, Path], listed: Sequence[str], builder: ContentBuilder
) -> list[str]:
    """Add photos with their .xml files; return the class names, those ``listed`` if they have all."""
    roots = {photo: _parse(xml) for photo, xml in labels.items()}
    found = set()
    for root in roots.values():
        found |= {_name(each) for each in root.iter("object")}
    names = list(listed) if found.issubset(listed) else sorted(found)

    wrong_sizes = []
    unclear = []
    for photo, root in with_progress(roots):
        xml = labels[photo]
        image = builder.add_photo(photo)
        size = (image["width"], image["height"])
        given = _size(root)
        exif = builder.turned.get(image["file_name"], 1)
        turn = _TURNS.get(exif) if given == size[::-1] != size else None
        # a half turn, a mirror or a square has no sign of it in the size
        is_clear = exif in _TURNS and given in (size, size[::-1]) and size[0] != size[1]
        if exif != 1 and not is_clear:
            unclear.append(photo.name)
        if given not in (None, size) and turn is None:
            wrong_sizes.append(f"'{xml}' has {given[0]} x {given[1]}, '{photo}' {size}")
        _add_objects(builder, image, xml, root, names, turn)

    _check_sizes(wrong_sizes, len(roots), builder.notes)
    if unclear:
        builder.notes.append(
            f"{len(unclear)} photos are turned by EXIF, and their .xml files do not tell whether it was applied before "
            f"the labeling: {summarize_names(unclear)}. Their boxes are taken as pixels of the upright photo."
        )
    return names


def _add_objects(
    builder: ContentBuilder,
    image: dict[str, Any],
    xml: Path,
    root: ElementTree.Element,
    names: Sequence[str],
    turn: tuple[bool, bool] | None,
) -> None:
    """Add the objects of an .xml file, whose boxes may be of the photo before a ``turn``."""
    size = (image["width"], image["height"])
    for number, each in enumerate(root.iter("object"), start=1):
        name = _name(each)
        where = f"'{xml}', object {number} ('{printable(name)}')"
        if not name:
            raise DataError(f"{where}: has no name. Fix: write its class.")

        edges = _edges(each, where)
        if turn is not None:
            edges = _turned(edges, size, turn)
        box = clipped_box(edges, image)
        # VOC neither trains on nor counts difficult objects, as COCO with crowds
        is_crowd = int(_is_difficult(each))
        builder.add_object(image, names.index(name), box, iscrowd=is_crowd)


def _parse(path: Path) -> ElementTree.Element:
    """Parse an .xml file of any encoding that it declares; else UTF-8, or UTF-16 by its mark."""
    content = path.read_bytes()
    declared = re.match(rb"\s*<\?xml[^>]*encoding=[\"']([\w-]+)", content)
    encoding = declared[1].decode() if declared else "utf-8-sig"
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    try:
        text = content.decode(encoding).lstrip("\ufeff")
        if "<!ENTITY" in text:
            raise ValueError("it defines entities")
        root = ElementTree.fromstring(re.sub(_DECLARATION, "", text, count=1))
    except (LookupError, ValueError, ElementTree.ParseError) as error:
        raise DataError(
            f"'{path}': cannot be read: {error}. Fix: export it again."
        ) from error

    if root.tag != "annotation":
        raise DataError(
            f"'{path}': its root is <{printable(root.tag)[:40]}>, in Pascal VOC it is <annotation>. Fix: export as "
            "Pascal VOC or COCO."
        )
    return root


def _name(each: ElementTree.Element) -> str:
    return each.findtext("name", "").strip()


def _is_difficult(each: ElementTree.Element) -> bool:
    return each.findtext("difficult", "").strip().lower() in ("1", "true", "yes")


def _size(root: ElementTree.Element) -> tuple[int, int] | None:
    """Return width and height in the file; None where tools write no numbers or zeros."""
    texts = [root.findtext(f"size/{side}", "") for side in ("width", "height")]
    try:
        width, height = (round(float(text)) for text in texts)
    except (ValueError, OverflowError):
        return None
    return (width, height) if width > 0 and height > 0 else None


def _edges(each: ElementTree.Element, where: str) -> np.ndarray:
    """Return left, top, right and bottom from 0; VOC counts from 1, and its last pixel belongs to the box."""
    texts = [each.findtext(f"bndbox/{side}", "") for side in _SIDES]
    try:
        edges = np.array([float(text) for text in texts])
        if not np.isfinite(edges).all():
            raise ValueError("not finite")
    except ValueError as error:
        problem = f"the corners {texts} are not numbers. Fix: correct them"
        if each.find("robndbox") is not None or each.find("bndbox/angle") is not None:
            problem = "rotated boxes are not detected. Fix: give upright boxes (bndbox)"
        raise DataError(f"{where}: {problem}.") from error
    return edges - [1, 1, 0, 0]


def _turned(
    edges: np.ndarray, size: tuple[int, int], turn: tuple[bool, bool]
) -> np.ndarray:
    """Return the edges in the upright photo of edges in the stored one."""
    edges = edges[[1, 0, 3, 2]]
    for axis, is_reversed in enumerate(turn):
        if is_reversed:
            edges[[axis, axis + 2]] = size[axis] - edges[[axis + 2, axis]]
    return edges


def _check_sizes(wrong: Sequence[Any], count: int, notes: list[str]) -> None:
    """Refuse boxes that were drawn on photos of other sizes; a few wrong sizes are a note."""
    if not wrong:
        return
    message = f"{len(wrong)} of {count} .xml files have another size than their photo: {summarize_names(wrong, 2)}"
    if 2 * len(wrong) > count:
        raise DataError(
            f"{message}. Fix: give the photos that were labeled, not resized ones."
        )
    notes.append(f"{message}. Their boxes are taken as pixels of the photo.")
