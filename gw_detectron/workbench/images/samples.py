"""An image to compare two networks on where the user gives none."""

import numpy as np
from PIL import Image, ImageDraw

_SIDE = 224  # in pixels
_OBJECTS = 12


def sample_image() -> Image.Image:
    """Draw a square image of colored disks on noise, the same one every time."""
    random = np.random.default_rng(0)
    noise = random.integers(90, 160, (_SIDE, _SIDE, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    pen = ImageDraw.Draw(image)
    for _ in range(_OBJECTS):
        size = int(_SIDE * random.uniform(0.1, 0.5))
        left, top = random.integers(0, _SIDE - size, 2).tolist()
        color = tuple(random.integers(0, 256, 3).tolist())
        pen.ellipse((left, top, left + size, top + size), fill=color)
    return image
