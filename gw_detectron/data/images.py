"""Images from files, with errors that name the file."""

import os

import numpy as np
from detectron2.data import detection_utils


def read_image(path: str | os.PathLike[str], pixel_format: str) -> np.ndarray:
    """Reads an image as Detectron2 does.

    Args:
        path: of the image.
        pixel_format: ``RGB``, ``BGR`` or another value of ``INPUT.FORMAT``.

    Returns:
        Pixels of 0 to 255, (H, W, 3).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no image, or damaged.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no image {path} (looked from {os.getcwd()})")
    try:
        return detection_utils.read_image(os.fspath(path), format=pixel_format)
    except (OSError, SyntaxError, ValueError) as error:  # all of them are raised by Pillow for a damaged file
        raise ValueError(f"the image {path} cannot be read: {error}. Repair it, or give another one") from error
