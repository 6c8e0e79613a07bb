"""YOLO: a .txt file for each photo, with a row for each object: class, then a box or a polygon from 0 to 1."""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import DataError, summarize_names
from ...images.image_files import only_images
from .content import ContentBuilder, Layout, clipped_box, with_progress
from .data_yaml import (
    NAME_FILES,
    find_names,
    listed_photos,
    names_in,
    photos_of_part,
    read_data_yaml,
)
from .files import (
    encoding_of,
    find_photos,
    label_by_photo,
    label_names,
    label_of_each,
    note_left_out,
    photos_of,
    plain_name,
    read_text,
)

_TOLERANCE = 0.01  # beyond 0 and 1, as tools round
#: text files beside labels, by name without suffix
_OTHER_TEXTS = {"classes", "predefined_classes", "train", "val", "valid", "test"}
_OTHER_TEXTS |= {"trainval", "requirements", "license", "readme"}


def yolo_files(files: Sequence[Path]) -> list[Path]:
    """Return the .txt files among others if one of the first that are not empty has a row of YOLO."""
    texts = _label_files(files)
    beginnings = filter(None, map(_first_words, texts))
    return texts if any(map(_is_row, islice(beginnings, 20))) else []


def _label_files(files: Iterable[Path]) -> list[Path]:
    texts = [path for path in files if path.suffix.lower() == ".txt"]
    return [path for path in texts if path.stem.lower() not in _OTHER_TEXTS]


def _first_words(path: Path) -> list[str]:
    with path.open(encoding=encoding_of(path), errors="replace") as file:
        return file.readline(1000).split()


def _is_row(words: Sequence[str]) -> bool:
    try:
        return len([float(word) for word in words]) > 4
    except ValueError:
        return False


def yolo_layout(folder: Path, texts: Sequence[Path], images: str) -> Layout:
    """Return the layout of a folder with .txt files."""
    root, photos = photos_of(folder, images)
    names, file = _names_near(folder)

    def read(builder: ContentBuilder) -> list[str]:
        labels = label_of_each(texts, photos, builder.notes)
        return _read_yolo(labels, names, builder)

    return Layout("YOLO", [*texts, file], root, read)


def yolo_list(path: Path, images: str) -> Layout:
    """Return the layout of a text file that lists photos."""
    if _is_row(_first_words(path)):
        raise DataError(
            f"'{path}': the labels of one photo. Fix: give the folder of the .txt files."
        )
    photos = listed_photos(path)
    names, file = _names_near(path.parent)
    return _layout_of(photos, names, images, [path, file])


def yaml_layout(path: Path, images: str, part: str) -> Layout:
    """Return the layout of a data.yaml; ``images`` stand for those of its ``part``."""
    tree = read_data_yaml(path)
    names = names_in(tree, path)
    if images:
        _, photos = photos_of(path.parent, images)
    else:
        photos = photos_of_part(path, tree, part)
    return _layout_of(photos, names, images, [path])


def _layout_of(
    photos: Sequence[Path], names: Sequence[str], images: str, files: Sequence[Path]
) -> Layout:
    """Return the layout of photos whose labels are beside them, or in the folder labels; without, no object."""
    labels, left_over = _labels_of(photos)
    given = [label for label in labels.values() if label is not None]
    if not given:
        raise DataError(
            f"'{files[0]}': {len(photos)} photos have no labels, e.g. '{photos[0]}'. Fix: put a .txt file of the same "
            "name beside each photo, or into a folder labels beside the folder images; or give the folder of the .txt "
            "files as the labels."
        )
    folders = {str(path.parent) for path in (files[0], *photos)}
    root = images or os.path.commonpath(folders)

    def read(builder: ContentBuilder) -> list[str]:
        note_left_out(left_over, "label files without a photo", builder.notes)
        return _read_yolo(labels, names, builder)

    return Layout("YOLO", [*files, *given], root, read)


def _labels_of(
    photos: Sequence[Path],
) -> tuple[dict[Path, Path | None], list[str]]:
    """Find the label file of each photo, in the folder labels in place of images, or beside it; None without.

    Return also the names of label files that belong to no photo, in the list or out of it.
    """
    labels: dict[Path, Path | None] = dict.fromkeys(photos)
    left_over: list[str] = []
    groups = defaultdict(list)
    for photo in photos:
        groups[photo.parent].append(photo)

    for folder, group in groups.items():
        beside = only_images(folder.iterdir())
        names = set().union(*map(label_names, beside))
        # where both have one, that in the folder labels is used
        for place in dict.fromkeys((folder, _labels_folder(folder))):
            if not place.is_dir():
                continue
            stems = {text: text.stem for text in _label_files(sorted(place.iterdir()))}
            labels |= label_by_photo(find_photos(stems, group, beside))
            left_over += [
                text.name for text in stems if plain_name(text.stem) not in names
            ]
    return labels, left_over


def _labels_folder(images: Path) -> Path:
    """Return the folder labels in place of the last folder images of a path."""
    folders = list(images.parts)
    if "images" in folders:
        last = len(folders) - 1 - folders[::-1].index("images")
        folders[last] = "labels"
    return Path(*folders)


def _names_near(folder: Path) -> tuple[list[str], Path]:
    names, file = find_names(folder)
    if not names or file is None:
        raise DataError(
            f"'{folder}': no names of the classes: no data.yaml, {', '.join(NAME_FILES)}. Fix: put classes.txt there, "
            "with a name in each line."
        )
    return names, file


def _read_yolo(
    labels: Mapping[Path, Path | None], names: Sequence[str], builder: ContentBuilder
) -> list[str]:
    """Add photos with their rows; a photo without a file has no object. Return the class names."""
    quadrangles = []
    rows = corners = 0
    for photo, label in with_progress(labels):
        image = builder.add_photo(photo)
        size = np.array([image["width"], image["height"]])
        lines = read_text(label).splitlines() if label else []
        for number, line in enumerate(lines, start=1):
            words = line.split()
            if not words:
                continue

            where = f"'{label}', line {number}"
            category, points = _parse_row(words, names, where)
            points = points.reshape(-1, 2) * size
            rows += 1
            if len(points) == 4:
                corners += 1
                if _is_tilted(points):
                    quadrangles.append(where)
            _add_row(builder, image, category, points)

    builder.note_turned()
    if 2 * len(quadrangles) > rows:
        raise DataError(
            f"{quadrangles[0]}: four corners of a rotated box, as in {len(quadrangles)} of {rows} rows. Rotated boxes "
            "are not detected. Fix: give upright boxes, or polygons of the objects."
        )
    if rows and rows == corners:
        builder.notes.append(
            "Each object has four corners, taken as its outline. Rotated boxes are learned as upright ones."
        )
    return list(names)


def _parse_row(
    words: Sequence[str], names: Sequence[str], where: str
) -> tuple[int, np.ndarray]:
    """Return the class and the numbers of a row."""
    try:
        category, *values = (float(word) for word in words)
    except ValueError as error:
        text = " ".join(words)
        raise DataError(
            f"{where}: not a row of numbers ('{text[:60]}'). Fix: write CLASS X Y WIDTH HEIGHT."
        ) from error

    if len(values) != 4 and (len(values) < 6 or len(values) % 2):
        fix = "leave out the confidence" if len(values) == 5 else "correct the row"
        raise DataError(
            f"{where}: {len(words)} numbers; a row has a class and 4 numbers of a box, or a class and x, y of 3 or "
            f"more points. Fix: {fix}."
        )
    if category not in range(len(names)):
        listed = summarize_names(names)
        raise DataError(
            f"{where}: class {words[0]}, but the {len(names)} names ({listed}) have the numbers 0 to {len(names) - 1}. "
            "Fix: add its name, or correct the row."
        )
    points = np.array(values)
    # NaN is not inside either
    inside = (points >= -_TOLERANCE) & (points <= 1 + _TOLERANCE)
    if not inside.all():
        wrong = words[1 + int(np.argmin(inside))]
        raise DataError(
            f"{where}: {wrong} is not between 0 and 1. Fix: divide pixels by the width and height of the photo."
        )
    return int(category), points


def _add_row(
    builder: ContentBuilder, image: dict[str, Any], category: int, points: np.ndarray
) -> None:
    """Add a box, center and sides, (2, 2), or a polygon, (P, 2), in pixels."""
    fields = {}
    if len(points) == 2:
        center, sides = points
        points = np.stack([center - sides / 2, center + sides / 2])
    else:
        fields["segmentation"] = [points.ravel().tolist()]

    edges = np.concatenate([points.min(axis=0), points.max(axis=0)])
    builder.add_object(image, category, clipped_box(edges, image), **fields)


def _is_tilted(corners: np.ndarray) -> bool:
    """Return whether four corners, in pixels, are a rectangle that is not upright."""
    first, second = corners[1] - corners[0], corners[2] - corners[1]
    opposite = corners[0] - corners[1] + corners[2] - corners[3]
    lengths = np.linalg.norm([first, second], axis=1)
    is_rectangle = np.linalg.norm(opposite) < 1 + 0.02 * lengths.sum()
    is_rectangle &= abs(first @ second) < 0.05 * lengths.prod()
    return is_rectangle and np.abs(first).min() > 0.05 * lengths[0]
