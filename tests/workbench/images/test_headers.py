"""Headers and ends of image files: what is not an image, is truncated, or is not read whole."""

import io
import os
import struct

import numpy as np
import pytest
from PIL import Image

from gw_detectron.errors import DataError
from gw_detectron.workbench.images import not_read, read_header, read_image

NOISE = np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)
STRANGE = {
    "an empty file": b"",
    "a Git LFS pointer. Fix: run git lfs pull": b"version https://git-lfs.github.com/spec/v1\n",
    "a web page": b"\xef\xbb\xbf\n<!-- saved -->\n<!DOCTYPE html><html>",
    "a web page. Fix": b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>',
    "a HEIC photo": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
    "a TIFF file that Pillow cannot open": b"II*\0\x08\0\0\0\0\0",
}


def assert_refused(path, words):
    """Refused in the same words before a training and in a prediction."""
    for read in (read_header, lambda path: read_image(path, "RGB")):
        with pytest.raises(DataError, match=words):
            read(path)


@pytest.mark.parametrize(("words", "content"), STRANGE.items())
def test_another_file_is_told_by_its_kind(tmp_path, words, content):
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)

    assert_refused(path, f"photo.jpg'.: cannot be read: not an image file: {words}")


def test_more_pixels_than_pillow_reads_need_tiles(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    Image.new("1", (2000, 2000)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10**6)

    assert_refused(path, "megapixels.*--tiles")


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "bmp", "gif", "webp"])
def test_the_end_of_a_file_is_missed_before_the_run(tmp_path, suffix):
    path = tmp_path / f"photo.{suffix}"
    Image.fromarray(NOISE).save(path)
    whole = path.read_bytes()
    assert read_header(path) == (80, 60, 1, "")

    for length in (len(whole) // 2, len(whole) - 1000):
        path.write_bytes(whole[:length])
        assert_refused(path, "cannot be read")

    # cameras and disks append bytes
    path.write_bytes(whole + bytes(9000))
    assert read_header(path) == (80, 60, 1, "")


def test_a_jpeg_is_missed_although_its_thumbnail_is_whole(tmp_path):
    thumbnail = io.BytesIO()
    Image.new("RGB", (8, 8)).save(thumbnail, "JPEG")
    # as a camera, in the EXIF entry
    exif = b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + thumbnail.getvalue()
    path = tmp_path / "photo.jpg"
    Image.fromarray(NOISE[:20, :20]).save(path, exif=exif)
    whole = path.read_bytes()
    assert len(whole) < 4096
    assert read_header(path) == (20, 20, 1, "")

    path.write_bytes(whole[:-200])

    assert_refused(path, "cannot be read")


def test_a_png_without_its_middle_is_missed(tmp_path):
    path = tmp_path / "photo.png"
    Image.fromarray(np.tile(NOISE, (4, 4, 1))).save(path)
    whole = path.read_bytes()

    path.write_bytes(whole[: len(whole) // 3] + whole[len(whole) // 2 :])

    assert_refused(path, "cannot be read")


@pytest.mark.parametrize("compression", ["jpeg", "tiff_lzw"])
@pytest.mark.parametrize("missing", [20, 100, 200])
def test_a_tiff_without_its_last_tags_is_missed(tmp_path, compression, missing):
    path = tmp_path / "photo.tif"
    Image.fromarray(NOISE).save(path, compression=compression)
    whole = path.read_bytes()
    assert read_header(path) == (80, 60, 1, "")

    path.write_bytes(whole[:-missing])

    assert_refused(path, "cannot be read|truncated")


def write_tiff_tag(path, tag, value):
    """Change a tag with one short."""
    content = path.read_bytes()
    begin = struct.pack("<HHI", tag, 3, 1)
    place = content.index(begin) + len(begin)
    path.write_bytes(content[:place] + struct.pack("<H", value) + content[place + 2 :])


def test_tiff_values_that_pillow_misreads_are_refused(tmp_path):
    cv2 = pytest.importorskip("cv2")
    signed, planes = tmp_path / "signed.tif", tmp_path / "planes.tif"
    Image.fromarray(NOISE[..., 0]).save(signed, tiffinfo={339: 2})
    cv2.imwrite(str(planes), NOISE.astype(np.uint16), [cv2.IMWRITE_TIFF_COMPRESSION, 1])
    write_tiff_tag(planes, 284, 2)

    assert_refused(signed, "misreads")
    assert_refused(planes, "misreads")


def test_large_unsigned_values_do_not_become_negative(tmp_path):
    path = tmp_path / "deep.tif"
    values = np.linspace(0, 2**32 - 1, 100 * 80).reshape(100, 80).astype(np.uint32)
    Image.fromarray(values.view(np.int32)).save(path)
    write_tiff_tag(path, 339, 1)

    pixels = read_image(path, "RGB", [0, 100])[..., 0]

    assert (pixels[0, 0], pixels[-1, -1]) == (0, 255)
    assert (np.diff(pixels.ravel().astype(int)) >= 0).all()


@pytest.mark.parametrize(
    ("suffix", "rest"),
    [
        ("tif", "pages 2 to 3"),
        ("gif", "pages 2 to 3"),
        ("png", "pages 2 to 3"),
        ("webp", "pages 2 to 3"),
        ("mpo", ""),  # with previews of a camera
    ],
)
def test_pages_that_no_reader_reads_are_named(tmp_path, suffix, rest):
    path = tmp_path / f"pages.{suffix}"
    pages = [Image.fromarray(np.roll(NOISE, shift, 0)) for shift in range(3)]
    pages[0].save(path, save_all=True, append_images=pages[1:])

    assert read_header(path).left_out == not_read(path) == rest


@pytest.mark.parametrize("suffix", ["png", "tif", "jp2"])
def test_colors_of_16_bits_are_named(tmp_path, suffix):
    cv2 = pytest.importorskip("cv2")
    path = tmp_path / f"deep.{suffix}"
    cv2.imwrite(str(path), NOISE.astype(np.uint16) << 4)

    assert "lower 8 of 16 bits" in read_header(path).left_out


@pytest.mark.parametrize("suffix", ["jp2", "j2k"])
@pytest.mark.parametrize("bands", [NOISE, NOISE[..., 0]])
def test_jpeg_2000_of_8_bits_is_read_whole(tmp_path, suffix, bands):
    path = tmp_path / f"photo.{suffix}"
    Image.fromarray(bands).save(path)

    assert read_header(path) == (80, 60, 1, "")


def test_a_pipe_is_not_opened(tmp_path):
    path = tmp_path / "photo.jpg"
    os.mkfifo(path)

    with pytest.raises(DataError, match="not a file"):
        read_header(path)
