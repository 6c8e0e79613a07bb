"""Label files and photos: list them, read them, and find the photo of each label file."""

import codecs
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ....errors import DataError, summarize_names
from ...images.image_files import list_files, only_images

#: names of folders, and ends of file names, of masks
MASK_NAME = re.compile(
    r"(?i)(^|[_-])((cp_)?masks?|labels?|instances?|seg|Segmentation(Class|Object))([_-]?\d+)?$"
)


def read_text(path: Path) -> str:
    """Read a label file in UTF-8, or in UTF-16 with its mark, as PowerShell writes it."""
    try:
        return path.read_text(encoding_of(path))
    except UnicodeError as error:
        raise DataError(
            f"'{path}': not a text in UTF-8. Fix: save it as UTF-8."
        ) from error


def encoding_of(path: Path) -> str:
    """Return UTF-16 if a text file begins with its mark, else UTF-8, with or without one."""
    with path.open("rb") as file:
        is_utf16 = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return "utf-16" if is_utf16 else "utf-8-sig"


def find_photos(
    stems: Mapping[Path, str], photos: Sequence[Path], beside: Iterable[Path] = ()
) -> dict[Path, Path]:
    """Find the photo of label files by the name of the photo, with or without its suffix, or without _img.

    Labels a belong to a_img only without a photo a in its folder; it may be one of those ``beside``. Of several photos
    of a name, it is the one with the most folder names in common with the label file.
    """
    taken = {(photo.parent, plain_name(photo.stem)) for photo in (*photos, *beside)}
    by_name = defaultdict(list)
    for photo in photos:
        own = {plain_name(photo.name), plain_name(photo.stem)}
        for name in label_names(photo):
            if name in own or (photo.parent, name) not in taken:
                by_name[name].append(photo)
    found = {}
    for label, stem in stems.items():
        same_name = by_name[plain_name(stem)]
        same_part = [photo for photo in same_name if not _are_apart(label, photo)]
        if same_part:
            found[label] = _nearest(label, same_part)
    return found


def label_names(photo: Path) -> set[str]:
    """Return the names, without suffix, that a label file of a photo may have."""
    stem = re.sub(r"[_-](img|image)$", "", photo.stem)
    return {plain_name(name) for name in (photo.name, photo.stem, stem)}


def plain_name(name: str) -> str:
    """Return a name with accents and spaces in one form: macOS writes other ones than most tools."""
    return unicodedata.normalize("NFKC", name)


def _are_apart(label: Path, photo: Path) -> bool:
    """Return whether folders say that one is of the training and the other of the validation."""
    common = os.path.commonpath([label, photo])
    parts = []
    for path in (label, photo):
        folders = str(path.parent.relative_to(common)).lower()
        parts.append(set(re.findall(r"(?<![a-z])(?:train|val|test)", folders)))
    return all(parts) and not set.intersection(*parts)


def _nearest(label: Path, photos: Sequence[Path]) -> Path:
    folders = set(label.parent.parts)

    def rank(photo: Path) -> tuple[int, bool]:
        is_photo = not MASK_NAME.search(photo.parent.name)
        return len(folders.intersection(photo.parent.parts)), is_photo

    best = max(map(rank, photos))
    nearest = [photo for photo in photos if rank(photo) == best]
    if len(nearest) > 1:
        names = summarize_names(map(repr, map(str, nearest)))
        raise DataError(
            f"'{label}': several photos have its name ({names}). Fix: give the folder of one part of the data, or "
            "rename the others."
        )
    return nearest[0]


def label_of_each(
    labels: Iterable[Path], photos: Sequence[Path], notes: list[str]
) -> dict[Path, Path]:
    """Return the label file of each photo that has one; add a note for what is left over."""
    stems = {label: label.stem for label in labels}
    found = find_photos(stems, photos)
    if not found:
        raise no_photo(list(stems), photos)
    owners = label_by_photo(found)

    without_photo = [label.name for label in stems if label not in found]
    note_left_out(without_photo, "label files without a photo", notes)
    without_label = [photo for photo in photos if photo not in owners]
    # masks beside the photos, as in Pascal VOC
    names = [p.name for p in without_label if not MASK_NAME.search(p.parent.name)]
    note_left_out(names, "photos without labels", notes)
    return owners


def label_by_photo(found: Mapping[Path, Path]) -> dict[Path, Path]:
    """Return the label file of each photo from the photo of each label file; several of one photo are a DataError."""
    labels: dict[Path, Path] = {}
    for label, photo in found.items():
        other = labels.setdefault(photo, label)
        if other != label:
            raise DataError(
                f"'{label}' and '{other}': both are labels of '{photo}'. Fix: remove one, or give the folder of one."
            )
    return labels


def no_photo(labels: Sequence[Path], photos: Sequence[Path]) -> DataError:
    """Return the error of labels that belong to other photos."""
    return DataError(
        f"'{labels[0]}' and {len(labels) - 1} other label files: none has the name of one of {len(photos)} photos, "
        f"e.g. '{photos[0]}'. Fix: give the labels of these photos, or the folder of the photos (--train-images)."
    )


def note_left_out(names: Sequence[str], kind: str, notes: list[str]) -> None:
    """Add a note about files that are left out, if there are any."""
    if names:
        notes.append(f"{len(names)} {kind} are left out: {summarize_names(names)}.")


def photos_of(
    folder: Path, images: str, left_out: Iterable[Path] = ()
) -> tuple[str, list[Path]]:
    """Return the folder of the photos, and the photos below it.

    Without ``images``, it is ``images`` beside a folder ``labels``, the folder of the labels, or the one above it.
    """
    places = [Path(images)]
    if not images:
        places = [folder, folder.parent]
        if folder.name == "labels":
            places.insert(0, folder.with_name("images"))
        if folder.parent.name == "labels":
            places.insert(0, folder.parent.with_name("images") / folder.name)

    others = set(left_out)
    for place in places:
        photos = [path for path in only_images(list_files(place)) if path not in others]
        if photos:
            return str(place), photos
    raise DataError(
        f"'{places[0]}': no photos for the labels in '{folder}'. Fix: give the folder of the photos (--train-images)."
    )
