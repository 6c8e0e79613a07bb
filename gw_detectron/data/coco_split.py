"""Split one COCO file into training and validation parts."""

import hashlib
from typing import Any, NamedTuple

from ..errors import DataError


class CocoParts(NamedTuple):
    """The contents of two COCO files without a common image."""

    train: Any
    val: Any


def split_coco(content: Any, val_fraction: float) -> CocoParts:
    """Split the images of a COCO file by their file names.

    An image belongs to the validation if the hash of its ``file_name``, as a number from 0 to 1, is below
    ``val_fraction``. So it stays on its side when other images are added. Both parts have at least one image.

    Args:
        content: of the COCO file. A malformed one is returned as both parts: the checks before a run name its fault.
        val_fraction: expected share of the images for validation.

    Raises:
        DataError: there are fewer than two images.
    """
    try:
        places = {image["id"]: _place(image["file_name"]) for image in content["images"]}
        ranked = sorted(set(places.values()))
        if len(ranked) < 2:
            raise DataError(
                f"{len(ranked)} images cannot be split. Fix: give more images, or a second file with --val-json."
            )
        border = min(max(val_fraction, ranked[1]), ranked[-1])
        in_val = {number: place < border for number, place in places.items()}
        return CocoParts(
            *(
                {
                    **content,
                    "images": [image for image in content["images"] if in_val[image["id"]] is side],
                    # an annotation of an unknown image stays in the training part, whose check names it
                    "annotations": [a for a in content["annotations"] if in_val.get(a["image_id"], False) is side],
                }
                for side in (False, True)
            )
        )
    except (AttributeError, LookupError, TypeError):
        return CocoParts(content, content)


def _place(file_name: str) -> float:
    return int.from_bytes(hashlib.sha256(file_name.encode(errors="surrogatepass")).digest()[:6]) / 2**48
