"""YOLO's data.yaml, lists of photos, and files of class names."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....config import parse_config
from ....errors import ConfigError, DataError, summarize_names
from ...images.image_files import list_files, only_images
from .files import read_text

YAML = (".yaml", ".yml")
NAME_FILES = ("classes.txt", "obj.names", "*.names", "_darknet.labels")


def photos_of_part(path: Path, tree: Mapping[str, Any], part: str) -> list[Path]:
    """List the photos of ``train`` or ``val`` of a data.yaml: of folders, or of files that list photos."""
    given = tree.get(part)
    entries: list[Any] = given if isinstance(given, list) else [given]
    if not entries or not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(
            f"'{path}', {part} ({given!r}): not a folder or list of folders. Fix: correct it; for a share of the "
            "training images, give --val-fraction."
        )
    base = path.parent / os.path.expanduser(str(tree.get("path") or ""))

    photos: list[Path] = []
    for entry in entries:
        found = next(filter(Path.exists, _places_of(entry, base, path.parent)), None)
        if found is None:
            raise DataError(
                f"'{path}', {part} ('{entry}'): no folder '{base / entry}'. Fix: correct path and {part} in the yaml, "
                f"or give the folder of the photos (--{part}-images)."
            )
        if found.is_file():
            photos += listed_photos(found)
        else:
            photos += only_images(list_files(found))

    if not photos:
        raise DataError(
            f"'{path}', {part} ('{given}'): holds no photos. Fix: correct it."
        )
    return photos


def _places_of(entry: str, base: Path, folder: Path) -> Iterator[Path]:
    """Yield where the photos of an entry may be.

    Exports have ../train for the folder train beside the yaml, or a path of another machine.
    """
    yield base / entry
    names = [name for name in Path(entry).parts if name != ".."]
    for start in range(max(1, len(names) - 1)):
        yield folder.joinpath(*names[start:])


def listed_photos(path: Path) -> list[Path]:
    """Return the photos that a text file lists, relative to its folder or the one above."""
    photos = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        name = line.strip().replace("\\", "/")
        if not name:
            continue

        # Darknet's lists begin with a folder above, as data/obj_train_data/a.jpg
        below = Path(*Path(name).parts[1:])
        places = [path.parent / name, path.parent.parent / name, path.parent / below]
        photo = next((place for place in places if place.is_file()), None)
        if photo is None:
            raise DataError(
                f"'{path}', line {number}: no photo '{places[0]}'. Fix: correct the line."
            )
        photos.append(photo)
    return photos


def read_data_yaml(path: Path) -> dict[str, Any]:
    """Read YOLO's data.yaml; another yaml is a ConfigError. Its ``download`` is not run."""
    tree = parse_config(read_text(path), str(path))
    if "names" not in tree:
        raise ConfigError(
            f"'{path}': no names of classes, so it is not a data.yaml of YOLO. Fix: give one; a yaml with json and "
            "images belongs to --datasets."
        )
    if "kpt_shape" in tree:
        raise ConfigError(
            f"'{path}', kpt_shape: keypoints of YOLO are not read. Fix: export them as a COCO json."
        )
    return tree


def names_in(tree: Mapping[str, Any], path: Path) -> list[str]:
    """Return the class names of a data.yaml in the order of their numbers."""
    names = tree["names"]
    if isinstance(names, dict):
        by_number = {str(number): name for number, name in names.items()}
        names = [by_number.get(str(number)) for number in range(len(names))]
    given = names if isinstance(names, list) else []
    # a bool, such as yes and no in yaml, is an int, too
    names = [str(name) if type(name) in (int, float) else name for name in given]
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"'{path}', names: not a list of texts, or numbers from 0 without a gap. Fix: write names: [cat, dog], "
            "and yes, no, on and off in quotes."
        )
    return names


def find_names(folder: Path) -> tuple[list[str], Path | None]:
    """Find the class names and their file in a folder, or up to two folders above it; [] without."""
    places = (folder, *folder.parents[:2])
    # all at once: rows with keypoints look like polygons, so a yaml that tells of them counts above classes.txt, too
    trees = [_yamls_of_yolo(place) for place in places]
    for place, yamls in zip(places, trees, strict=True):
        by_names = {tuple(names_in(tree, path)): path for path, tree in yamls.items()}
        if by_names:
            path = _only_one(list(by_names.values()))
            return names_in(yamls[path], path), path
        for pattern in NAME_FILES:
            files = sorted(place.glob(pattern))
            if files:
                path = _only_one(files)
                return _listed_names(path), path
    return [], None


def _listed_names(path: Path) -> list[str]:
    """Read a class name from each line; blank lines may only follow the last one."""
    names = [line.strip() for line in read_text(path).rstrip().splitlines()]
    if "" in names:
        raise DataError(
            f"'{path}', line {names.index('') + 1}: blank, so the number of the next class is not clear. Fix: remove "
            "the line, or write a name."
        )
    return names


def yaml_of_folder(folder: Path) -> Path | None:
    """Return the data.yaml in a folder that names the photos of its parts, or None."""
    yamls = _yamls_of_yolo(folder)
    with_photos = [path for path in yamls if {"train", "val"} & yamls[path].keys()]
    return _only_one(with_photos) if with_photos else None


def _yamls_of_yolo(folder: Path) -> dict[Path, dict[str, Any]]:
    """Read the data.yaml in a folder; without one, the yamls of other names that are of YOLO."""
    paths = sorted(path for path in folder.glob("*.y*ml") if path.suffix in YAML)
    paths = list(filter(_is_of_yolo, paths))
    named = [path for path in paths if path.stem == "data"]
    return {path: read_data_yaml(path) for path in named or paths}


def _is_of_yolo(path: Path) -> bool:
    """Return whether a yaml names classes; data.yaml may lack them, and has to be readable."""
    is_data = path.stem == "data"
    try:
        tree = parse_config(read_text(path), str(path))
    except (ConfigError, DataError):
        if is_data:
            raise
        return False
    # nc without names is a network of YOLO, too
    return "names" in tree or (is_data and "nc" in tree)


def _only_one(paths: Sequence[Path]) -> Path:
    if len(paths) > 1:
        names = summarize_names(path.name for path in paths)
        raise DataError(
            f"'{paths[0].parent}': several files name the classes ({names}). Fix: give the data.yaml to use, or keep "
            "one of them there."
        )
    return paths[0]
