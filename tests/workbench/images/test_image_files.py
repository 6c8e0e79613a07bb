"""Images: reading, sizes, folders, and errors that name the file."""

import re

import numpy as np
import pytest
import torch
from detectron2.data import DatasetMapper
from detectron2.data.detection_utils import check_image_size
from PIL import ExifTags, Image

from gw_detectron.config import default_config
from gw_detectron.errors import DataError, MissingFileError, message_of
from gw_detectron.workbench.export import read_image_for
from gw_detectron.workbench.images.image_files import (
    ImageNamingMapper,
    evenly_spread,
    find_images,
    read_image,
    scale_to_8_bits,
    upright_size,
)
from gw_detectron.workbench.predict.results_folder import ImageSource


@pytest.fixture
def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return exif


def test_images_of_a_folder(tmp_path):
    (tmp_path / "below").mkdir()
    for name in ("c.png", "b.TIF", "below/a.jpg"):
        Image.new("RGB", (300, 400)).save(tmp_path / name)
    (tmp_path / "d.heic").touch()
    assert find_images(tmp_path) == [
        tmp_path / name for name in ("b.TIF", "below/a.jpg", "c.png")
    ]
    for name, target in (
        ("above/down", "below"),
        ("below/up", "above"),
        ("below/self", "below"),
        ("a", "below"),
    ):
        (tmp_path / "above").mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(tmp_path / target)
    assert find_images(tmp_path / "above") == [tmp_path / "above" / "down" / "a.jpg"]
    assert find_images(tmp_path) == [
        tmp_path / name for name in ("b.TIF", "below/a.jpg", "c.png")
    ]
    with pytest.raises(MissingFileError, match="none"):
        find_images(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty"):
        find_images(tmp_path / "empty")


def test_chosen_images_are_spread_over_all():
    assert evenly_spread(range(15), 8) == [0, 1, 3, 5, 7, 9, 11, 13]
    assert evenly_spread(range(3), 4) == [0, 1, 2] and evenly_spread([], 4) == []


@pytest.mark.parametrize(
    "content", [b"no image", b"", None, np.uint16, np.int32, np.float32]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, monkeypatch):
    path, words = tmp_path / "a.tif", r"a\.tif"
    if content is None:
        Image.new("1", (2000, 2000)).save(path)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10**6)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:  # Pillow would make every value above 255 white
        Image.fromarray(np.full((8, 8), 700, content)).save(path)
        words += ".* 8 bits"
    for read in (upright_size, lambda path: read_image(path, "RGB")):
        with pytest.raises(DataError, match=words):
            read(path)
    with pytest.raises(MissingFileError, match=r"b\.png"):
        read_image(tmp_path / "b.png", "RGB")


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_sizes_are_those_that_detectron2_reads(tmp_path, turned, suffix):
    entries = {"plain": {}, "turned": {"exif": turned}}
    entries |= {
        f"damaged_{number}": {"exif": entry}
        for number, entry in enumerate((b"Exif\0\0II*\0", b"Exif\0\0x"))
    }
    for name, entry in entries.items():
        path = tmp_path / f"{name}.{suffix}"
        Image.new("RGB", (40, 30)).save(path, **entry)
        height, width = read_image(path, "RGB").shape[:2]
        assert (
            upright_size(path)
            == (width, height)
            == ((30, 40) if name == "turned" else (40, 30))
        )


def wrong_size(record):
    check_image_size(record, np.zeros((300, 200, 3), np.uint8))


RECORD = {"file_name": "photos/a.jpg", "width": 300, "height": 200}


def test_an_error_in_a_worker_process_has_the_message_alone():
    def read(records):
        return [ImageNamingMapper(wrong_size)(record) for record in records]

    loader = torch.utils.data.DataLoader([RECORD], num_workers=1, collate_fn=read)
    with pytest.raises(DataError) as caught:
        next(iter(loader))
    assert re.match(
        r"'photos/a.jpg'.*got \(200, 300\), expect \(300, 200\)",
        message_of(caught.value),
    )


@pytest.mark.parametrize("suffix", ["tif", "png"])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_deep_images_are_scaled_by_their_percentiles(tmp_path, dtype, suffix):
    if suffix == "png" and dtype != np.uint16:
        pytest.skip("PNG has no such images")
    values = np.linspace(300, 4000, 30 * 40).reshape(30, 40).astype(dtype)
    values[0, 0], values[0, 1] = 0, 65000  # a dead and a hot pixel
    path = tmp_path / f"deep.{suffix}"
    Image.fromarray(values).save(path)
    image = read_image(path, "BGR", (0.5, 99.5))
    low, high = np.percentile(values.astype(float), (0.5, 99.5))
    expected = np.clip((values.astype(float) - low) * 255 / (high - low), 0, 255)
    assert image.dtype == np.uint8 and np.abs(image - expected[:, :, None]).max() <= 0.5
    assert upright_size(path, (0.5, 99.5)) == (40, 30)
    record = {"file_name": str(path), "width": 40, "height": 30, "image_id": 7}
    cfg = default_config()
    cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.PERCENTILES = 30, (0.5, 99.5)
    example = ImageNamingMapper(DatasetMapper(cfg, False), cfg.INPUT.PERCENTILES)(
        record
    )
    assert example["file_name"] == str(path)
    (predicted,) = ImageSource(path, "deep").images(cfg.INPUT.PERCENTILES)
    for pixels in (
        example["image"],
        read_image_for(cfg, path),
        torch.from_numpy(predicted[:, :, ::-1].copy()),
    ):
        assert (
            pixels.numpy().reshape(-1)
            == (image if pixels.shape[-1] == 3 else image.transpose(2, 0, 1)).ravel()
        ).all()


def test_percentiles_leave_other_images_alone(tmp_path, turned):
    Image.fromarray(np.arange(3600, dtype=np.uint8).reshape(30, 40, 3)).save(
        tmp_path / "a.png", exif=turned
    )
    assert (
        read_image(tmp_path / "a.png", "RGB", (0.5, 99.5))
        == read_image(tmp_path / "a.png", "RGB")
    ).all()


@pytest.mark.parametrize(
    "values",
    [np.full((4, 4), 700.0), np.full((4, 4), np.nan), np.array([[np.inf, 1.0, 2.0]])],
)
def test_values_without_a_range_are_scaled_to_finite_ones(values):
    scaled = scale_to_8_bits(values, (0.5, 99.5))
    assert scaled.dtype == np.uint8 and scaled.max() == (
        255 if np.isfinite(values).any() and values.min() < 2 else 0
    )
