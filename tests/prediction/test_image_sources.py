"""Which files are found, and how their pixels are read."""

import shutil

import numpy as np
import pytest
from PIL import Image

from gw_detectron.errors import DataError, MissingFileError
from gw_detectron.prediction import find_sources


def names(*inputs):
    return [source.name for source in find_sources(map(str, inputs))]


def pixels(path):
    (source,) = find_sources([str(path)])
    (image,) = source.images()
    return image


def test_a_folder_a_pattern_and_files(photos, monkeypatch):
    assert names(photos) == ["b.png", "sub/a.jpg"]
    assert names(photos / "sub") == ["a.jpg"]
    assert names(photos / "**" / "*.jpg") == ["a.jpg"]
    assert names(photos / "sub" / "a.jpg", photos / "b.png") == ["sub/a.jpg", "b.png"]
    monkeypatch.chdir(photos)
    assert names("*.png", photos) == ["b.png", "sub/a.jpg"]  # each file once


def test_equal_names_in_two_folders_differ_in_the_results(tmp_path, photos):
    (tmp_path / "more").mkdir()
    shutil.copy(photos / "b.png", tmp_path / "more" / "b.png")
    assert names(tmp_path / "more", photos / "b.png") == ["more/b.png", "photos/b.png"]


def test_a_file_whose_name_looks_like_a_pattern(photos):
    (photos / "b.png").rename(photos / "b[1].png")
    assert names(photos / "b[1].png") == ["b[1].png"]


def test_nothing_to_read(tmp_path):
    for missing in ("none.jpg", "*.jpg"):
        with pytest.raises(MissingFileError, match=r"input \('.*'\): not found .* Fix: give images"):
            find_sources([str(tmp_path / missing)])
    with pytest.raises(DataError, match="none found"):
        find_sources([str(tmp_path)])


def test_images_of_all_modes_become_upright_rgb(tmp_path, photo):
    image = Image.fromarray(photo)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    image.convert("L").save(tmp_path / "gray.png")
    image.convert("RGBA").save(tmp_path / "alpha.png")
    image.quantize(256).save(tmp_path / "palette.png")
    assert np.array_equal(pixels(tmp_path / "turned.png"), photo)
    assert np.array_equal(pixels(tmp_path / "alpha.png"), photo)
    assert np.array_equal(pixels(tmp_path / "gray.png"), np.asarray(image.convert("L").convert("RGB")))
    assert pixels(tmp_path / "palette.png").shape == photo.shape


def test_frames_of_a_video(video):
    (source,) = find_sources([str(video)])
    frames = list(source.images())
    assert source.is_video and source.count() == len(frames) == 5
    assert frames[0].shape == (48, 64, 3)
    assert [round(frame.mean() / 60) for frame in frames] == [0, 1, 2, 3, 4]


def test_frames_are_rgb(tmp_path):
    cv2 = pytest.importorskip("cv2")
    writer = cv2.VideoWriter(str(tmp_path / "red.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 8, (64, 48))
    writer.write(np.full((48, 64, 3), (0, 0, 200), np.uint8))
    writer.release()
    assert np.abs(pixels(tmp_path / "red.avi").mean((0, 1)) - [200, 0, 0]).max() < 5


def test_a_video_that_ends_early_is_named_after_its_frames(tmp_path):
    cv2 = pytest.importorskip("cv2")
    writer = cv2.VideoWriter(str(tmp_path / "whole.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 8, (64, 48))
    for value in range(0, 200, 5):
        writer.write(np.full((48, 64, 3), value, np.uint8))
    writer.release()
    content = (tmp_path / "whole.avi").read_bytes()
    (tmp_path / "cut.avi").write_bytes(content[: len(content) // 2])
    (source,) = find_sources([tmp_path / "cut.avi"])
    count = 0
    with pytest.raises(DataError, match=r"cut.avi'\): ends after \d+ of about 40 frames. Fix: repair it") as caught:
        for _ in source.images():
            count += 1
    assert count > 0 and f"ends after {count} of" in str(caught.value)
    assert len(list(find_sources([tmp_path / "whole.avi"])[0].images())) == 40


def test_no_inputs():
    with pytest.raises(DataError, match=r"inputs: none. Fix: give images"):
        find_sources([])


def test_damaged_files(tmp_path, video, monkeypatch):
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "cut.avi").write_bytes(video.read_bytes()[:200])
    for name in ("text.jpg", "cut.avi"):
        with pytest.raises(DataError, match=f"{name}'.*Fix: repair it"):
            pixels(tmp_path / name)
    Image.new("RGB", (40, 40)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match="bomb.png"):
        pixels(tmp_path / "bomb.png")
