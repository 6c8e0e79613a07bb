"""Which files are found, and how their pixels are read."""

import shutil

import numpy as np
import pytest

from gw_detectron.errors import DataError, MissingFileError
from gw_detectron.workbench.predict import find_sources, write_predictions


def names(*inputs):
    return [source.name for source in find_sources(map(str, inputs))]


def test_a_folder_a_pattern_and_files(tmp_path, photos, monkeypatch):
    assert names(photos) == ["b.png", "sub/a.jpg"]
    assert names(photos / "sub") == ["a.jpg"]
    assert names(photos / "**" / "*.jpg") == ["a.jpg"]
    assert names(photos / "sub" / "a.jpg", photos / "b.png") == ["sub/a.jpg", "b.png"]
    shutil.copy(photos / "b.png", photos / "sub" / "b[1].png")
    assert names(photos / "sub" / "b[1].png") == ["b[1].png"]  # no pattern
    (photos / "sub" / "b[1].png").unlink()
    monkeypatch.chdir(photos)
    assert names("*.png", photos) == ["b.png", "sub/a.jpg"]  # each file once
    (tmp_path / "more").mkdir()  # equal names in two folders
    shutil.copy(photos / "b.png", tmp_path / "more" / "b.png")
    assert names(tmp_path / "more", photos / "b.png") == ["more/b.png", "photos/b.png"]


def test_links_to_a_folder_above_name_each_file_once(photos):
    (photos / "again").symlink_to(".")
    (photos / "sub" / "c.jpg").symlink_to("c.jpg")

    assert names(photos / "**" / "*.*") == ["b.png", "sub/a.jpg", "sub/c.jpg"]
    assert names(photos) == ["b.png", "sub/a.jpg", "sub/c.jpg"]


def test_brackets_of_a_name_in_a_pattern(photos):
    folder = photos.rename(photos.with_name("set [2024]"))

    assert names(folder / "*.png") == ["b.png"]
    with pytest.raises(MissingFileError, match=r"\[\[\] means \["):
        find_sources([str(folder / "[b].png")])


def test_nothing_to_read(tmp_path):
    for missing in ("none.jpg", "*.jpg"):
        with pytest.raises(
            MissingFileError, match=r"input \('.*'\): not found .* Fix: give images"
        ):
            find_sources([str(tmp_path / missing)])
    for nothing in ([], [str(tmp_path)]):
        with pytest.raises(DataError, match="none"):
            find_sources(nothing)


def test_photos_of_a_phone_are_named_for_it(photos, predictor, tmp_path):
    photo = photos / "IMG_0001.HEIC"
    photo.write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")

    summary = write_predictions(predictor, find_sources([photos]), tmp_path / "out")

    assert summary.images == 2
    assert list(summary.failed) == ["IMG_0001.HEIC"]
    assert "a HEIC photo" in summary.failed["IMG_0001.HEIC"]


def test_frames_of_a_video(video):
    (source,) = find_sources([str(video)])
    frames = list(source.images())

    assert source.is_video
    assert frames[0].shape == (48, 64, 3)
    reds = [frame[..., 0].mean() / 60 for frame in frames]
    assert np.round(reds).tolist() == [0, 1, 2, 3, 4]
    assert frames[4][..., 2].mean() < 5


def test_a_gap_in_a_video_is_told(tmp_path, caplog):
    cv2 = pytest.importorskip("cv2")
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 8, (64, 48))
    random = np.random.default_rng(0)
    for _ in range(60):
        writer.write(random.integers(0, 256, (48, 64, 3), np.uint8))
    writer.release()
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 6000] = bytes(6000)
    path.write_bytes(content)

    frames = list(find_sources([path])[0].images())

    assert 54 <= len(frames) < 60
    assert f"{len(frames)} of about 60 frames can be read" in caplog.text


def test_damaged_files(tmp_path, video):
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "cut.avi").write_bytes(video.read_bytes()[:200])
    (tmp_path / "text.mp4").write_text("no video")
    for name in ("text.jpg", "cut.avi", "text.mp4"):
        with pytest.raises(DataError, match=name) as caught:
            list(find_sources([tmp_path / name])[0].images())
    assert "OpenCV cannot open it" in str(caught.value)

    content = video.read_bytes()
    (tmp_path / "half.avi").write_bytes(
        content[: content.rindex(b"00dc", 0, content.index(b"idx1")) - 100]
    )
    frames = find_sources([tmp_path / "half.avi"])[0].images()
    with pytest.raises(DataError, match=r"half.avi'\): . of about 5 frames"):
        for count, _ in enumerate(frames, 1):
            assert count < 5
