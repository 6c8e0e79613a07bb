"""Images: reading, sizes, folders, and errors that name the file."""

import numpy as np
import pytest
import torch
from detectron2.data import DatasetMapper
from detectron2.data.detection_utils import check_image_size
from PIL import ExifTags, Image

from gw_detectron.config import default_config
from gw_detectron.errors import DataError, MissingFileError, message_of
from gw_detectron.workbench.export import read_image_for
from gw_detectron.workbench.images import (
    ImageNamingMapper,
    channels_first,
    evenly_spread,
    find_images,
    read_header,
    read_image,
)
from gw_detectron.workbench.images.image_files import scale_to_8_bits
from gw_detectron.workbench.predict.sources import ImageSource

PERCENTILES = (0.5, 99.5)


@pytest.fixture
def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return exif


@pytest.fixture
def folder(tmp_path):
    """Images in a folder and below it, and files that are no images."""
    (tmp_path / "below").mkdir()
    for name in ("c.png", "b.TIF", "below/a.jpg"):
        Image.new("RGB", (300, 400)).save(tmp_path / name)
    (tmp_path / "d.heic").touch()
    (tmp_path / "._c.png").touch()  # of macOS, beside a copy of c.png
    return tmp_path


def test_images_of_a_folder(folder):
    expected = [folder / name for name in ("b.TIF", "below/a.jpg", "c.png")]
    assert find_images(folder) == expected

    (folder / "above").mkdir()
    links = {
        "above/down": "below",
        "below/up": "above",
        "below/self": "below",
        "a": "below",
    }
    for name, target in links.items():
        (folder / name).symlink_to(folder / target)

    assert find_images(folder) == expected
    assert find_images(folder / "above") == [folder / "above/down/a.jpg"]


def test_folders_without_images(tmp_path):
    (tmp_path / "empty").mkdir()

    with pytest.raises(MissingFileError, match="none"):
        find_images(tmp_path / "none")
    with pytest.raises(DataError, match="empty"):
        find_images(tmp_path / "empty")


def test_chosen_images_are_spread_over_all():
    assert evenly_spread(range(15), 8) == [0, 1, 3, 5, 7, 9, 11, 13]
    assert evenly_spread(range(3), 4) == [0, 1, 2]
    assert evenly_spread([], 4) == []


@pytest.mark.parametrize(
    "content", [b"no image", b"", None, np.uint16, np.int32, np.float32]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, monkeypatch):
    path = tmp_path / "a.tif"
    words = r"a\.tif"
    if content is None:
        Image.new("1", (2000, 2000)).save(path)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10**6)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:  # Pillow would make every value above 255 white
        Image.fromarray(np.full((8, 8), 700, content)).save(path)
        words += ".* 8 bits"

    with pytest.raises(DataError, match=words):
        read_header(path)
    with pytest.raises(DataError, match=words):
        read_image(path, "RGB")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(MissingFileError, match=r"b\.png"):
        read_image(tmp_path / "b.png", "RGB")


@pytest.mark.parametrize("place", ["first", "middle"])
def test_damaged_pixels_of_a_png_are_no_black_ones(tmp_path, place):
    path = tmp_path / "a.png"
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
    Image.fromarray(noise).save(path)
    content = bytearray(path.read_bytes())
    start = content.index(b"IDAT") + 4 if place == "first" else len(content) // 2
    content[start : start + 64] = bytes(64)
    path.write_bytes(content)

    with pytest.raises(DataError, match="truncated or damaged"):
        read_image(path, "RGB")


@pytest.mark.parametrize("suffix", ["png", "jpg"])
@pytest.mark.parametrize("exif", [b"", b"Exif\0\0II*\0", b"Exif\0\0x"])
def test_sizes_are_those_that_detectron2_reads(tmp_path, exif, suffix):
    path = tmp_path / f"photo.{suffix}"
    Image.new("RGB", (40, 30)).save(path, exif=exif)

    assert read_header(path)[:2] == (40, 30)
    assert read_image(path, "RGB").shape == (30, 40, 3)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_turned_photo_is_upright(tmp_path, turned, suffix):
    path = tmp_path / f"photo.{suffix}"
    Image.new("RGB", (40, 30)).save(path, exif=turned)

    assert read_header(path)[:2] == (30, 40)
    assert read_image(path, "RGB").shape == (40, 30, 3)


RECORD = {"file_name": "photos/a.jpg", "width": 300, "height": 200}


def read_with_wrong_size(records):
    mapper = ImageNamingMapper(
        lambda record: check_image_size(record, np.zeros((300, 200, 3), np.uint8))
    )
    return [mapper(record) for record in records]


def test_an_error_in_a_worker_process_has_the_message_alone():
    loader = torch.utils.data.DataLoader(
        [RECORD], num_workers=1, collate_fn=read_with_wrong_size
    )

    with pytest.raises(DataError) as caught:
        next(iter(loader))

    message = message_of(caught.value)
    assert message.startswith("image ('photos/a.jpg'): cannot be read")
    assert "image photos/a.jpg, got (200, 300), expect (300, 200)" in message


@pytest.fixture(
    params=[
        ("tif", np.uint16),
        ("tif", np.int32),
        ("tif", np.float32),
        ("png", np.uint16),
    ]
)
def deep(request, tmp_path):
    """An image of more than 8 bits with a dead and a hot pixel: path and values."""
    suffix, dtype = request.param
    values = np.linspace(300, 4000, 30 * 40).reshape(30, 40).astype(dtype)
    values[0, :2] = 0, 65000
    path = tmp_path / f"deep.{suffix}"
    Image.fromarray(values).save(path)
    return path, values.astype(float)


def test_deep_images_are_scaled_by_their_percentiles(deep):
    path, values = deep
    low, high = np.percentile(values, PERCENTILES)
    expected = 255 * np.clip((values - low) / (high - low), 0, 1)

    image = read_image(path, "RGB", PERCENTILES)

    assert image.dtype == np.uint8
    assert np.abs(image - expected[:, :, None]).max() <= 0.5
    assert read_header(path, PERCENTILES)[:2] == (40, 30)


def test_training_prediction_and_export_see_the_same_pixels(deep):
    path, _ = deep
    record = {"file_name": str(path), "width": 40, "height": 30, "image_id": 7}
    cfg = default_config()
    cfg.INPUT.MIN_SIZE_TEST = 30
    cfg.INPUT.PERCENTILES = PERCENTILES
    expected = channels_first(read_image(path, "BGR", PERCENTILES))

    example = ImageNamingMapper(DatasetMapper(cfg, False), PERCENTILES)(record)
    (predicted,) = ImageSource(path, "deep").images(PERCENTILES)

    assert example["file_name"] == str(path)
    assert torch.equal(example["image"].float(), expected)
    assert torch.equal(read_image_for(cfg, path), expected)
    assert torch.equal(channels_first(predicted), expected.flip(0))


def test_training_refuses_deep_images_without_percentiles(deep):
    path, _ = deep
    mapper = ImageNamingMapper(DatasetMapper(default_config(), False))

    with pytest.raises(DataError, match="INPUT.PERCENTILES"):
        mapper({"file_name": str(path)})


@pytest.mark.parametrize(
    ("dtype", "value", "tag"),
    [
        (np.float32, -9999, "-9999"),
        (np.float32, -3.4e38, "-3.4e+38"),
        (np.float32, np.finfo(np.float32).min, "-3.40282346638529e+38"),
        (np.float32, np.nan, "nan"),
        (np.uint16, 65535, "65535 "),
        (np.int32, -9999, "-9999"),
    ],
)
def test_pixels_without_data_are_black_and_change_no_others(
    tmp_path, dtype, value, tag
):
    values = np.linspace(300, 4000, 30 * 40).reshape(30, 40).astype(dtype)
    data, whole = tmp_path / "data.tif", tmp_path / "whole.tif"
    Image.fromarray(values[10:]).save(data)
    values[:10] = value
    Image.fromarray(values).save(whole, tiffinfo={42113: tag})

    image = read_image(whole, "RGB", PERCENTILES)

    assert not image[:10].any()
    np.testing.assert_array_equal(image[10:], read_image(data, "RGB", PERCENTILES))


@pytest.mark.parametrize("tag", ["", "none", "-9999"])
def test_a_tag_of_a_value_that_no_pixel_has_changes_nothing(tmp_path, tag):
    plain, tagged = tmp_path / "plain.tif", tmp_path / "tagged.tif"
    values = np.linspace(300, 4000, 1200).reshape(30, 40).astype(np.uint16)
    Image.fromarray(values).save(plain)
    Image.fromarray(values).save(tagged, tiffinfo={42113: tag})

    image = read_image(tagged, "RGB", PERCENTILES)

    np.testing.assert_array_equal(image, read_image(plain, "RGB", PERCENTILES))


def test_percentiles_leave_other_images_alone(tmp_path, turned):
    path = tmp_path / "a.png"
    pixels = np.arange(3600, dtype=np.uint8).reshape(30, 40, 3)
    Image.fromarray(pixels).save(path, exif=turned)

    image = read_image(path, "RGB", PERCENTILES)

    np.testing.assert_array_equal(image, read_image(path, "RGB"))


@pytest.mark.parametrize(
    ("values", "largest"),
    [
        (np.full((4, 4), 700.0), 0),
        (np.full((4, 4), np.nan), 0),
        (np.array([[np.inf, 1.0, 2.0]]), 255),
        # few small objects on an even background
        (np.pad(np.full((2, 2), 4000.0), 40, constant_values=300), 255),
    ],
)
def test_values_without_a_range_are_scaled_to_finite_ones(values, largest):
    scaled = scale_to_8_bits(values, PERCENTILES)

    assert scaled.dtype == np.uint8
    assert scaled.max() == largest
