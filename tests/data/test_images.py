"""Images: reading, folders, errors."""

import os

import numpy as np
import pytest
from PIL import ExifTags, Image, PngImagePlugin

from gw_detectron.data.images import (
    evenly_spread,
    image_files,
    load_images,
    read_image,
    resize_shortest_edge,
    upright_size,
)
from gw_detectron.errors import DataError, FileAccessError


def test_load_images(tmp_path):
    for index in range(5):
        Image.new("RGB", (300 + index, 400)).save(tmp_path / f"{index}.jpg")
    images = load_images(tmp_path, 3)
    assert [image.size for image in images] == [(224, 224)] * 3
    (tmp_path / "0.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"0\.jpg.*cannot be read"):
        load_images(tmp_path, 3)
    with pytest.raises(FileNotFoundError, match="folder not found"):
        load_images(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="none found"):
        load_images(tmp_path / "empty")


def test_chosen_images_are_spread_over_all():
    assert evenly_spread(range(15), 8) == [0, 1, 3, 5, 7, 9, 11, 13]
    assert evenly_spread(range(3), 4) == [0, 1, 2] and evenly_spread([], 4) == []


def test_a_folder_that_may_not_be_listed_is_named(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    Image.new("RGB", (30, 40)).save(tmp_path / "0.jpg")
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(FileAccessError, match=r"images \('.*closed'\): cannot be listed: Permission denied. Fix: get"):
        image_files(tmp_path)


def test_files_that_are_left_out_are_named(tmp_path, caplog):
    for name in ("a.png", "b.TIF"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    assert len(image_files(tmp_path)) == 2 and not caplog.text
    (tmp_path / "c.heic").touch()
    assert len(image_files(tmp_path)) == 2
    assert "1 files are left out" in caplog.text and "c.heic" in caplog.text


def test_a_huge_image_is_named(tmp_path, monkeypatch):
    Image.new("1", (2000, 2000)).save(tmp_path / "huge.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10**6)
    with pytest.raises(DataError, match=r"huge.png'\): more than 2 million pixels. Fix: shrink it, or cut"):
        read_image(tmp_path / "huge.png", "RGB")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_more_than_8_bits_are_refused(tmp_path, dtype):
    """Pillow would make every value above 255 white."""
    Image.fromarray(np.full((8, 8), 700, dtype)).save(tmp_path / "deep.tif")
    for read in (upright_size, lambda path: read_image(path, "RGB")):
        with pytest.raises(DataError, match=r"deep.tif'\): cannot be read: has more than 8 bits per channel .*: save"):
            read(tmp_path / "deep.tif")


def test_a_turned_tiff_is_refused(tmp_path):
    """Pillow turns it when it loads the pixels, and Detectron2 once more."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (8, 6)).save(tmp_path / "turned.tif", exif=exif)
    Image.new("RGB", (8, 6)).save(tmp_path / "upright.tif")
    assert upright_size(tmp_path / "upright.tif") == (8, 6)
    for read in (upright_size, lambda path: read_image(path, "RGB")):
        with pytest.raises(DataError, match=r"turned.tif'\): cannot be read: a TIFF with an EXIF .*: save it upright"):
            read(tmp_path / "turned.tif")


def test_the_first_frame_with_a_warning(tmp_path, caplog):
    frames = [Image.new("RGB", (4, 3), color) for color in ("white", "black", "red")]
    frames[0].save(tmp_path / "pages.tif", save_all=True, append_images=frames[1:])
    assert (read_image(tmp_path / "pages.tif", "RGB") == 255).all()
    assert "pages.tif': only the first of its 3 frames or pages is read" in caplog.text


@pytest.mark.parametrize("where", ["Raw profile type exif", "XML:com.adobe.xmp"])
def test_the_older_orientations_of_a_png(tmp_path, where):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    profile = f"\nexif\n{len(exif.tobytes()):8}\n{exif.tobytes().hex()}\n"
    text = PngImagePlugin.PngInfo()
    text.add_text(where, profile if where.startswith("Raw") else '<x tiff:Orientation="6"/>')
    Image.new("RGB", (40, 30)).save(tmp_path / "turned.png", pnginfo=text)
    assert upright_size(tmp_path / "turned.png") == (30, 40)
    assert read_image(tmp_path / "turned.png", "RGB").shape == (40, 30, 3)


@pytest.mark.parametrize("entry", [b"Exif\0\0II*\0", b"Exif\0\0damaged"])
def test_a_damaged_exif_entry_turns_nothing(tmp_path, entry):
    """Detectron2 reads such images, too."""
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png", exif=entry)
    assert upright_size(tmp_path / "a.png") == (40, 30)
    assert read_image(tmp_path / "a.png", "RGB").shape == (30, 40, 3)


def test_a_png_is_not_decoded_for_its_size(tmp_path, monkeypatch):
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (40, 30)).save(tmp_path / "turned.png", exif=exif)
    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", lambda _: pytest.fail("decoded"))
    assert upright_size(tmp_path / "a.png") == (40, 30)
    assert upright_size(tmp_path / "turned.png") == (30, 40)


def test_links_to_folders_are_followed_once(tmp_path):
    for folder in ("photos", "elsewhere"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / folder / "a.png")
    (tmp_path / "photos" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "photos" / "again").symlink_to(tmp_path / "photos")
    assert image_files(tmp_path / "photos") == [tmp_path / "photos" / "a.png", tmp_path / "photos" / "link" / "a.png"]


@pytest.mark.parametrize(("height", "width"), [(1, 3000), (3000, 1)])
def test_a_very_long_image_keeps_a_pixel(height, width):
    assert sorted(resize_shortest_edge(np.zeros((height, width, 3), np.uint8), 800, 1333).shape) == [1, 3, 1333]
