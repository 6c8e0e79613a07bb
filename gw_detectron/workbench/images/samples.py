"""Images to compare two networks on where the user gives none."""

import numpy as np
from PIL import Image, ImageDraw

_OBJECTS = 12  # of an image


def sample_images(count: int = 4, side: int = 224) -> list[Image.Image]:
    """Draw square images of colored disks on noise, the same ones every time."""
    random = np.random.default_rng(0)
    return [_draw(random, side) for _ in range(count)]


def _draw(random: np.random.Generator, side: int) -> Image.Image:
    noise = random.integers(90, 160, (side, side, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    pen = ImageDraw.Draw(image)
    for _ in range(_OBJECTS):
        size = int(side * random.uniform(0.1, 0.5))
        left, top = random.integers(0, side - size, 2).tolist()
        color = tuple(random.integers(0, 256, 3).tolist())
        pen.ellipse((left, top, left + size, top + size), fill=color)
    return image
