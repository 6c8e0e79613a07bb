"""Mask images: one file for each object, or one image for each photo, and masks that are refused."""

import io

import numpy as np
import pytest
from PIL import Image, ImageDraw
from pycocotools import mask as coco_mask

from gw_detectron.errors import DataError
from gw_detectron.workbench.dataset.annotation_checks import DatasetNeeds
from gw_detectron.workbench.dataset.coco_content import complete_coco
from gw_detectron.workbench.dataset.layouts import read_labels

from ...sound_run import coco_faults


def write_image(path, pixels, mode=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(pixels))
    (image.convert(mode) if mode else image).save(path)


def photo(path, size=(30, 20)):
    write_image(path, np.zeros((size[1], size[0], 3), np.uint8))


def numbered(dtype=np.uint8, first=1, second=2):
    """Return a mask of two objects, the second one of two parts."""
    pixels = np.zeros((20, 30), dtype)
    pixels[4:10, 6:9] = first
    pixels[12:14, 1:5] = pixels[0, 29] = second
    return pixels


def read(folder, images=""):
    labels = read_labels(str(folder), str(images) if images else "")
    content, _ = complete_coco(labels.content)
    errors, _ = coco_faults(content, DatasetNeeds(True, masks=True))
    assert not errors
    return labels._replace(content=content)


@pytest.mark.parametrize("value", [255, 1])
@pytest.mark.parametrize(
    "name", ["{}/images/{}.png", "{}/images/photo.png", "{}/p.png"]
)
def test_a_folder_for_each_photo_with_a_file_for_each_object(tmp_path, value, name):
    for stem in ("n0", "n1"):
        photo(tmp_path / name.format(stem, stem))
        pixels = numbered(first=value, second=0)
        write_image(tmp_path / stem / "masks/x1.png", pixels)
        write_image(tmp_path / stem / "masks/x2.png", np.roll(pixels, 7, axis=1))

    content = read(tmp_path).content

    files = [image["file_name"] for image in content["images"]]
    assert files == [name.format(stem, stem) for stem in ("n0", "n1")]
    first, second, *others = content["annotations"]
    assert len(others) == 2
    assert (first["bbox"], second["bbox"]) == ([6, 4, 3, 6], [13, 4, 3, 6])
    assert first["area"] == 18
    mask = coco_mask.decode(first["segmentation"])
    assert mask.sum() == mask[4:10, 6:9].sum() == 18


def test_a_folder_of_masks_with_the_name_of_the_photo(tmp_path):
    for name in ("0", "1"):
        photo(tmp_path / "images" / f"{name}.png")
        for number in (0, 1, 2):
            path = tmp_path / "masks" / name / f"{number}.png"
            write_image(path, numbered(second=0))

    content = read(tmp_path).content

    assert [row["image_id"] for row in content["annotations"]] == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.float32])
@pytest.mark.parametrize(
    ("name", "images"),
    [
        ("masks/a.tif", ""),
        ("masks/a_mask.tif", ""),
        ("masks/a.jpg.tif", ""),
        ("photos/a_masks.tif", ""),
        ("photos/a_cp_masks.tif", ""),
        ("numbers/a.tif", "photos"),
    ],
)
def test_a_number_for_each_object(tmp_path, dtype, name, images):
    photo(tmp_path / "photos/a.jpg")
    second = 2 if dtype == np.uint8 else 255
    pixels = numbered(dtype, second=second)
    write_image(tmp_path / name, pixels)
    folder = (tmp_path / name).parent if images else tmp_path

    labels = read(folder, images and tmp_path / images)

    assert labels.images == str(tmp_path / images)
    rows = labels.content["annotations"]
    assert [row["area"] for row in rows] == [18, 9]
    for row, number in zip(rows, (1, second), strict=True):
        mask = coco_mask.decode(row["segmentation"])
        np.testing.assert_array_equal(mask, pixels == number)


def test_photos_named_img_beside_masks(tmp_path):
    for name in "ab":
        photo(tmp_path / f"{name}_img.png")
        write_image(tmp_path / f"{name}_masks.png", numbered())

    assert len(read(tmp_path).content["annotations"]) == 4


def test_outlines_in_images_with_a_palette_are_no_object(tmp_path):
    photo(tmp_path / "JPEGImages/a.jpg")
    image = Image.fromarray(numbered(second=255)).convert("P")
    image.putpalette(list(range(256)) * 3)
    (tmp_path / "SegmentationObject").mkdir()
    image.putdata(numbered(second=255).ravel().tolist())
    image.save(tmp_path / "SegmentationObject/a.png")

    labels = read(tmp_path)

    assert len(labels.content["annotations"]) == 1
    assert "Each mask image has one object" in labels.notes[0]


def test_masks_of_colors_that_are_gray_are_numbers(tmp_path):
    photo(tmp_path / "images/a.jpg")
    write_image(tmp_path / "masks/a.png", numbered(), "RGB")

    assert len(read(tmp_path).content["annotations"]) == 2


def test_numbers_do_not_survive_jpeg_but_black_and_white_do(tmp_path):
    photo(tmp_path / "images/a.jpg")
    shape = np.zeros((20, 30), np.uint8)
    shape[4:14, 5:20] = 255
    write_image(tmp_path / "masks/a.jpg", shape)
    (found,) = read(tmp_path).content["annotations"]
    assert found["bbox"] == pytest.approx([5, 4, 15, 10], abs=1)

    write_image(tmp_path / "masks/a.jpg", shape // 100)
    with pytest.raises(DataError, match="masks/a.jpg': JPEG changes"):
        read_labels(str(tmp_path))


@pytest.mark.parametrize(
    ("pixels", "told"),
    [
        (np.eye(20, 30, dtype=np.float32) / 2, "has fractions"),
        (np.random.default_rng(0).integers(0, 9, (20, 30, 3), np.uint8), "has colors"),
        (np.ones((40, 30), np.uint8), "30 x 40 pixels, .* 30 x 20"),
    ],
)
def test_masks_that_are_refused(tmp_path, pixels, told):
    photo(tmp_path / "images/a.jpg")
    write_image(tmp_path / "masks/a.tif", pixels)

    with pytest.raises(DataError, match=f"masks/a.tif'.*{told}"):
        read_labels(str(tmp_path))


@pytest.mark.parametrize("name", ["a.png", "a/x1.png"])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize("shape", ["black", "white", "red"])
@pytest.mark.parametrize("ground", ["black", "white"])
def test_shapes_on_a_transparent_ground(tmp_path, name, mode, shape, ground):
    photo(tmp_path / "images/a.jpg")
    image = Image.new("RGB", (30, 20), ground)
    image.paste(shape, (5, 4, 20, 14))
    alpha = Image.new("L", image.size)
    alpha.paste(255, (5, 4, 20, 14))
    # a smooth edge
    alpha.paste(90, (4, 4, 5, 14))
    image.putalpha(alpha)
    write_image(tmp_path / "masks" / name, image, mode)

    (found,) = read(tmp_path).content["annotations"]

    assert found["bbox"] == [5, 4, 15, 10]


def test_numbers_on_a_transparent_ground(tmp_path):
    photo(tmp_path / "images/a.jpg")
    pixels = numbered(first=3, second=7)
    alpha = np.where(pixels > 0, 255, 0)
    ground = np.where(pixels > 0, pixels, 200)
    rows = np.stack([ground, alpha], axis=-1).astype(np.uint8)
    write_image(tmp_path / "masks/a.png", rows)
    of_ground = read(tmp_path).content["annotations"]
    rows[..., 1] = 255
    write_image(tmp_path / "masks/a.png", np.where(rows == 200, 0, rows))
    opaque = read(tmp_path).content["annotations"]

    assert [row["area"] for row in of_ground] == [18, 9]
    assert opaque == of_ground


def white_shapes(size):
    """Return an ellipse and a rectangle, drawn at twice the size and made smaller with smooth edges."""
    image = Image.new("L", (2 * size[0], 2 * size[1]))
    draw = ImageDraw.Draw(image)
    draw.ellipse((11, 13, 81, 61), fill=255)
    draw.rectangle((95, 21, 151, 90), fill=255)
    return image.resize(size, Image.Resampling.BILINEAR)


@pytest.mark.parametrize("change", ["resized", "compressed"])
def test_masks_with_smooth_edges_are_refused(tmp_path, change):
    size = (90, 60)
    photo(tmp_path / "images/a.jpg", size)
    image = white_shapes(size)
    if change == "compressed":
        buffer = io.BytesIO()
        image.point(lambda value: 255 * (value > 127)).save(buffer, "JPEG")
        image = Image.open(buffer)
    write_image(tmp_path / "masks/a.png", image)

    with pytest.raises(DataError, match="masks/a.png': has smooth edges.*Fix: save"):
        read_labels(str(tmp_path))


@pytest.mark.parametrize("kind", ["points", "lines", "cells"])
def test_many_small_objects_beside_a_large_one_are_no_smooth_edges(tmp_path, kind):
    photo(tmp_path / "images/a.jpg", (90, 60))
    pixels = np.zeros((60, 90), np.uint8)
    numbers = np.arange(1, 201, dtype=np.uint8).reshape(10, 20)
    if kind == "points":
        pixels[::6, :80:4] = numbers
    elif kind == "lines":
        pixels[::6, :80] = np.repeat(numbers, 4, axis=1)
        pixels[::6, 3:80:4] = 0
    else:  # without a gap
        pixels[:20, :80] = np.kron(numbers, np.ones((2, 4), np.uint8))
    pixels[:, 80:] = 255
    write_image(tmp_path / "masks/a.png", pixels)

    assert len(read_labels(str(tmp_path)).content["annotations"]) == 201


@pytest.mark.parametrize("name", ["a.tif", "a/x1.tif"])
def test_a_mask_with_a_page_for_each_object_is_refused(tmp_path, name):
    photo(tmp_path / "images/a.jpg")
    path = tmp_path / "masks" / name
    path.parent.mkdir(parents=True)
    pages = [Image.fromarray(np.roll(numbered(second=0), 7 * n, 1)) for n in range(3)]
    pages[0].save(path, save_all=True, append_images=pages[1:])

    with pytest.raises(DataError, match=f"masks/{name}': has 3 pages. Fix: save one"):
        read_labels(str(tmp_path))


def test_masks_of_other_photos_and_two_masks_of_one(tmp_path):
    photo(tmp_path / "images/a.jpg")
    photo(tmp_path / "images/b.jpg")
    write_image(tmp_path / "masks/c.png", numbered())

    with pytest.raises(DataError, match="none has the name of one of 2 photos"):
        read_labels(str(tmp_path))

    write_image(tmp_path / "masks/a.png", numbered())
    labels = read(tmp_path)
    assert labels.notes == [
        "1 masks without a photo are left out: c.png.",
        "1 photos without masks are left out: b.jpg.",
    ]

    write_image(tmp_path / "labels/a.png", numbered())
    with pytest.raises(DataError, match="both are masks of"):
        read_labels(str(tmp_path))
