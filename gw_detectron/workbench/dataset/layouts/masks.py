"""Mask images: one file for each object, or one image for each photo with a number for each object."""

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pycocotools.mask as mask_util
from PIL import Image

from ....errors import DataError
from ...images.headers import image_errors, open_header, page_count
from ...images.image_files import only_images
from .content import ContentBuilder, Layout, with_progress
from .files import (
    MASK_NAME,
    find_photos,
    no_photo,
    note_left_out,
    photos_of,
)

CLASS_NAME = "object"  # masks have no names


def masks_layout(folder: Path, files: Iterable[Path], images: str) -> Layout | None:
    """Return the layout of a folder with mask images among its ``files``; None without."""
    pictures = only_images(files)
    masks = [path for path in pictures if _is_mask(path, folder)]
    is_apart = images and not Path(images).is_relative_to(folder)
    if is_apart or (not masks and MASK_NAME.search(folder.name)):
        masks = pictures
    if not masks:
        return None
    root, photos = photos_of(folder, images, masks)
    photos = [photo for photo in photos if not _is_mask(photo, Path(root))]

    def read(builder: ContentBuilder) -> list[str]:
        return _read_masks(_masks_of_photos(masks, photos, builder.notes), builder)

    return Layout("masks", masks, root, read)


def _is_mask(path: Path, folder: Path) -> bool:
    """Return whether an image below a folder is a mask by its name, or by that of a folder between."""
    names = (*path.relative_to(folder).parent.parts, path.stem)
    return any(map(MASK_NAME.search, names))


def _masks_of_photos(
    masks: Sequence[Path], photos: Sequence[Path], notes: list[str]
) -> dict[Path, list[Path]]:
    """Return the masks of each photo.

    They have its name, are in a folder of its name, or in a folder beside its own, as in NAME/images/NAME.png and
    NAME/masks/*.png.
    """
    stems = {mask: _stem(mask) for mask in masks}
    found = find_photos(stems, photos)
    by_folder = find_photos({mask.parent: mask.parent.name for mask in masks}, photos)
    families: dict[Path, list[Path]] = defaultdict(list)
    for photo in photos:
        families[photo.parent].append(photo)
        families[photo.parent.parent].append(photo)

    owned: dict[Path, list[Path]] = defaultdict(list)
    without_photo: list[str] = []
    for mask in masks:
        family = families[mask.parent.parent]
        only = family[0] if len(family) == 1 else None
        owner = by_folder.get(mask.parent) or found.get(mask) or only
        if owner is None:
            without_photo.append(mask.name)
        else:
            owned[owner].append(mask)
    if not owned:
        raise no_photo(masks, photos)
    for photo, files in owned.items():
        first, last = files[0], files[-1]
        if first.parent != last.parent:
            raise DataError(
                f"'{first}' and '{last}': both are masks of '{photo}'. Fix: give the folder of one of them."
            )

    note_left_out(without_photo, "masks without a photo", notes)
    without_mask = [photo.name for photo in photos if photo not in owned]
    note_left_out(without_mask, "photos without masks", notes)
    return dict(sorted(owned.items()))


def _read_masks(
    owned: Mapping[Path, Sequence[Path]], builder: ContentBuilder
) -> list[str]:
    """Add photos with their masks; return the name of the only class."""
    counts = []
    for photo, masks in with_progress(owned):
        image = builder.add_photo(photo)
        size = (image["height"], image["width"])
        before = len(builder.annotations)
        is_numbered = len(masks) == 1 and photo.name.startswith(_stem(masks[0]))
        for mask in masks:
            pixels = _read_numbers(mask) if is_numbered else _read_object(mask)
            if pixels.shape != size:
                raise DataError(
                    f"'{mask}' has {_described(pixels.shape)} pixels, '{photo}' {_described(size)} (after EXIF "
                    "rotation). Fix: give masks of the size of the photo."
                )
            _add_objects(builder, image, pixels)
        if is_numbered:
            counts.append(len(builder.annotations) - before)

    builder.note_turned()
    if max(counts, default=0) == 1:
        builder.notes.append(
            "Each mask image has one object. If objects share a number, give each one a number of its own."
        )
    return [CLASS_NAME]


def _stem(mask: Path) -> str:
    """Return the name of a mask without what says that it is one, as in NAME_mask.png or NAME_mask_2.png."""
    return MASK_NAME.sub("", mask.stem)


def _described(size: tuple[int, ...]) -> str:
    return f"{size[1]} x {size[0]}"


@contextlib.contextmanager
def _open_mask(path: Path) -> Iterator[Image.Image]:
    """Open a mask; one of several pages is refused, because only the first page would be read."""
    with image_errors(path), open_header(path) as image:
        pages = page_count(image)
        if pages > 1:
            raise DataError(
                f"'{path}': has {pages} pages. Fix: save one file for each object, or one image with a number for "
                "each object."
            )
        yield _without_transparency(image)


def _without_transparency(image: Image.Image) -> Image.Image:
    """Return an image that is black where it is transparent, and white elsewhere if that has one color."""
    if "A" not in image.getbands():
        return image
    alpha = np.asarray(image.getchannel("A"))
    if alpha.min() == alpha.max():
        return image
    visible = _threshold(alpha)
    pixels = np.array(image.convert("RGB"))
    pixels[~visible] = 0
    colors = pixels[visible]
    if (colors == colors[0]).all():
        pixels[visible] = 255
    return Image.fromarray(pixels)


def _read_numbers(path: Path) -> np.ndarray:
    """Read a mask with a whole number for each object, 0 elsewhere."""
    with _open_mask(path) as image:
        mode = image.mode
        is_lossy = image.format == "JPEG"
        has_channels = len(image.getbands()) > 1
        pixels = np.asarray(image.convert("RGB") if has_channels else image)

    if has_channels:
        if (pixels != pixels[..., :1]).any():
            raise DataError(
                f"'{path}': has colors (mode {mode}), not numbers of objects. Fix: save one channel with a number "
                "for each object."
            )
        pixels = pixels[..., 0]

    if is_lossy:
        return _binary(pixels, path)
    if mode == "P":
        # outlines in Pascal VOC
        pixels = np.where(pixels == 255, 0, pixels)

    if pixels.dtype.kind == "f" and not (pixels == np.floor(pixels)).all():
        raise DataError(
            f"'{path}': has fractions, not numbers of objects. Fix: save whole numbers."
        )
    if pixels.dtype == np.uint8 and _has_smooth_edges(pixels):
        raise DataError(
            f"'{path}': has smooth edges, whose gray levels are not numbers of objects. Fix: save the mask in black "
            "and white as PNG, resized without interpolation."
        )
    return pixels


def _has_smooth_edges(pixels: np.ndarray) -> bool:
    """Return whether most numbers of a mask are gray levels at the edges of white shapes.

    The number of an object has a block of 2 x 2 pixels, or a pixel that touches no other object.
    """
    counts = np.bincount(pixels.ravel(), minlength=256)
    if counts[1:].argmax() != 254:  # most pixels of shapes are white
        return False
    is_gray = (pixels > 0) & (pixels < 255)
    grays = pixels[is_gray]
    around = np.lib.stride_tricks.sliding_window_view(np.pad(pixels, 1), (3, 3))
    around = around[is_gray]

    is_same = around == grays[:, None, None]
    is_block = is_same[:, 1:, 1:].all(axis=(1, 2))
    is_apart = (is_same | (around == 0)).all(axis=(1, 2))
    count = len(np.unique(grays))
    objects = np.unique(grays[is_block | is_apart])
    return count > 1 and 2 * len(objects) < count


def _binary(pixels: np.ndarray, path: Path) -> np.ndarray:
    """Return the one object of a mask that was stored with loss, which changes all numbers but black and white."""
    if ((pixels > 63) & (pixels < 192)).mean() > 0.01 or pixels.max() < 192:
        raise DataError(
            f"'{path}': JPEG changes the numbers of objects. Fix: save the masks as PNG."
        )
    return (pixels > 127).astype(np.uint8)


def _read_object(path: Path) -> np.ndarray:
    """Read the mask of one object."""
    with _open_mask(path) as image:
        is_deep = image.mode[0] in "IF"
        pixels = np.asarray(image if is_deep else image.convert("L"))
    return (pixels > 0 if is_deep else _threshold(pixels)).astype(np.uint8)


def _threshold(pixels: np.ndarray) -> np.ndarray:
    """Return where 8-bit pixels are set: some tools write 0 and 1, others smooth edges up to 255."""
    return pixels > (127 if pixels.max() > 127 else 0)


def _add_objects(
    builder: ContentBuilder, image: dict[str, Any], pixels: np.ndarray
) -> None:
    for run_length in _run_lengths(pixels):
        box = mask_util.toBbox(run_length).tolist()
        mask = {**run_length, "counts": run_length["counts"].decode()}
        builder.add_object(image, 0, box, segmentation=mask)


def _run_lengths(pixels: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield the run-length encoding of each number above 0, (H, W), in one pass over the pixels."""
    height, width = pixels.shape
    # COCO's order
    flat = pixels.ravel(order="F")
    borders = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    starts = np.concatenate([[0], borders])
    ends = np.concatenate([borders, [flat.size]])
    values = flat[starts]

    order = np.argsort(values, kind="stable")
    numbers, first = np.unique(values[order], return_index=True)
    for number, runs in zip(numbers, np.split(order, first[1:]), strict=True):
        if number <= 0:
            continue
        edges = np.stack([starts[runs], ends[runs]], axis=1).ravel()
        counts = np.diff(np.concatenate([[0], edges, [flat.size]]))
        coded = {"size": [height, width], "counts": counts.tolist()}
        yield mask_util.frPyObjects(coded, height, width)
