"""The folder of predictions: COCO results that pycocotools reads, pictures and videos, all or nothing."""

import contextlib
import csv
import errno
import io
import json
import os
import re
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pycocotools.mask as mask_util
import pytest
from detectron2.data import Metadata
from PIL import Image
from pycocotools.coco import COCO

from gw_detectron.errors import (
    ConfigError,
    DataError,
    FileAccessError,
    MissingPackageError,
)
from gw_detectron.workbench.predict import (
    TiledPredictor,
    check_output,
    find_sources,
    open_predictor,
    results_folder,
    write_predictions,
    write_preview,
)
from gw_detectron.workbench.signals import Interrupted

from ...tiny_run import ROOT
from .conftest import Handmade


@pytest.fixture
def predict(predictor, tmp_path):
    """Predict on paths and return the summary and the content of predictions.json."""

    def predict(*paths, **options):
        output = tmp_path / "out"
        summary = write_predictions(
            predictor, find_sources(map(str, paths)), output, **options
        )
        return summary, json.loads((output / "predictions.json").read_text())

    return predict


@pytest.fixture
def fail(monkeypatch):
    """Let the detector raise an error on the second image from now on."""
    found = Handmade()(np.zeros((96, 131, 3)))
    return lambda error: monkeypatch.setattr(
        Handmade, "__call__", Mock(side_effect=[found, error])
    )


def test_results_and_pictures(tmp_path, photos, predict):
    summary, results = predict(photos)
    assert (summary.images, summary.detections, summary.failed) == (2, 2, {})
    (block,) = re.findall(
        r"```json\n(.*?)```",
        (ROOT / "docs" / "prediction.md").read_text(),
        flags=re.DOTALL,
    )
    assert results[:1] == json.loads(block)  # the page shows the first one
    assert mask_util.decode(results[0]["segmentation"]).sum() == 12 * 10
    assert (results[1]["image_id"], results[1]["file_name"]) == (2, "sub/a.jpg")
    for name in ("b.png", "sub/a.jpg"):
        with Image.open(tmp_path / "out" / "pictures" / name) as picture:
            assert picture.format == Image.registered_extensions()[Path(name).suffix]
            assert picture.size == (480, 351)


def test_pycocotools_reads_the_results(tmp_path, photos, predictor, predict):
    predictor.score_threshold = 0.2
    predict(photos, pictures=False)
    assert not (tmp_path / "out" / "pictures").exists()
    with contextlib.redirect_stdout(io.StringIO()):
        images = COCO(str(tmp_path / "out" / "images.json"))
        results = images.loadRes(str(tmp_path / "out" / "predictions.json"))
    assert [each["file_name"] for each in images.loadImgs([1, 2])] == [
        "b.png",
        "sub/a.jpg",
    ]
    assert images.loadCats([2, 7]) == [
        {"id": 2, "name": "fork"},
        {"id": 7, "name": "cup"},
    ]
    assert {row["category_id"] for row in results.imgToAnns[2]} == {2, 7}


def test_a_video(tmp_path, video, photos, predict):
    cv2 = pytest.importorskip("cv2")
    summary, results = predict(photos / "b.png", video)
    assert summary.images == 6
    assert [row.get("frame") for row in results] == [None, 0, 1, 2, 3, 4]
    assert [row["image_id"] for row in results] == [1, 2, 3, 4, 5, 6]
    assert results[5]["file_name"] == "clip.avi"

    drawn = cv2.VideoCapture(str(tmp_path / "out" / "pictures" / "clip.avi.mp4"))
    assert drawn.get(cv2.CAP_PROP_FRAME_COUNT) == 5
    assert drawn.get(cv2.CAP_PROP_FPS) == 8
    _, frame = drawn.read()
    assert frame.shape == (360, 480, 3)
    box = (slice(20, 70), slice(15, 60))  # inside the square, on a black frame
    assert frame[box].max() > 60
    assert frame[200:].max() < 40


ODD_NAMES = {
    b"b\xff.jpg": "b\\udcff.jpg",  # not UTF-8
    b"a\n\x1b[31m.png": "a\\n\\x1b[31m.png",
    b"n" * 251 + b".png": "n" * 251 + ".png",
    b"t" * 251 + b".tif": "t" * 251 + ".tif",
    b"=1+1.png": "'=1+1.png",
    b"-b.png": "'-b.png",
    "\u7ec6\u3000\u80de.png".encode(): "\u7ec6\u3000\u80de.png",
}


def test_files_of_any_name(tmp_path, photo, predict):
    (tmp_path / "in").mkdir()
    for name in ODD_NAMES:
        path = os.path.join(os.fsencode(tmp_path / "in"), name)
        with open(path, "wb") as file:
            Image.fromarray(photo).save(file, "PNG")

    summary, results = predict(tmp_path / "in")

    assert (summary.images, summary.failed) == (len(ODD_NAMES), {})
    found = {os.fsencode(row["file_name"]) for row in results}
    assert found == set(ODD_NAMES)
    with open(tmp_path / "out" / "counts.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["file_name"] for row in rows} == set(ODD_NAMES.values())
    assert len(list((tmp_path / "out" / "pictures").iterdir())) == len(ODD_NAMES)


def test_no_picture_replaces_another(tmp_path, photo, predict):
    names = ["a.tif", "a.tif.png", "image_0.png", "image_1.png"]
    (tmp_path / "in").mkdir()
    for name in names:
        Image.fromarray(photo).save(tmp_path / "in" / name, "PNG")

    predict(tmp_path / "in")

    drawn = {path.name for path in (tmp_path / "out" / "pictures").iterdir()}
    assert drawn == {*names[1:], "_image_0.png"}


def test_classes_of_any_name(tmp_path, photos, predictor, predict, monkeypatch):
    names = ["\ud800\n", "=cmd"]
    monkeypatch.setattr(predictor, "metadata", Metadata(thing_classes=names))

    _, results = predict(photos)

    assert {row["category_name"] for row in results} == {"=cmd"}
    lines = (tmp_path / "out" / "counts.csv").read_text().splitlines()
    assert lines[0] == "file_name,\\ud800\\n,'=cmd,all"


@pytest.mark.parametrize(
    "resized, scale, tile", [(800, 0.0, 800), (800, 0.5, 1600), (0, 0.0, 1024)]
)
def test_an_image_that_needs_tiles_is_named(
    photos, predictor, predict, resized, scale, tile
):
    predictor.cfg.INPUT.MIN_SIZE_TEST = resized
    predictor.image_scale = scale
    Image.new("L", (14_000, 13_000)).save(photos / "huge.png")

    summary, _ = predict(photos)

    assert summary.failed == {
        "huge.png": f"more than 179 megapixels. Fix: give --tiles {tile}, or shrink it."
    }


@pytest.mark.parametrize(
    "scale, resized, longest, is_shrunk",
    [
        (0.45, 20, 1333, True),
        (0.40, 20, 1333, False),
        # the longer side, of 131 pixels, decides
        (0.45, 96, 27, True),
        (0.40, 96, 27, False),
        # of unknown training images
        (0.0, 20, 1333, False),
        # not resized, or enlarged
        (3.0, 0, 1333, False),
        (3.0, 110, 1333, False),
    ],
)
def test_images_that_are_shrunk_more_than_in_training_are_named(
    photos, predictor, predict, scale, resized, longest, is_shrunk
):
    """The photos have a shorter side of 96 pixels, of which 20 are 0.208."""
    predictor.image_scale = scale
    predictor.cfg.INPUT.MIN_SIZE_TEST = resized
    predictor.cfg.INPUT.MAX_SIZE_TEST = longest

    summary, _ = predict(photos)

    assert summary.shrunk == (["b.png", "sub/a.jpg"] if is_shrunk else [])


def test_images_with_as_many_objects_as_the_model_gives_are_named(
    tmp_path, photos, run_folder
):
    limit = ("TEST.DETECTIONS_PER_IMAGE", 3)
    plain = open_predictor(run_folder, opts=limit, score_threshold=0.01)
    for predictor in (plain, TiledPredictor(plain, 64, 16)):
        sources = find_sources([str(photos)])
        summary = write_predictions(predictor, sources, tmp_path / "out")

        assert summary.full == ["b.png", "sub/a.jpg"]

    few = open_predictor(run_folder, opts=limit, score_threshold=0.99)
    summary = write_predictions(few, find_sources([str(photos)]), tmp_path / "few")
    assert summary.full == []


def test_broken_files_are_named_and_the_others_predicted(tmp_path, photos, predict):
    (photos / "a.jpg").write_bytes(b"no image")
    (photos / "c.png").touch()
    (photos / "self.png").symlink_to("self.png")
    summary, results = predict(photos)

    assert list(summary.failed) == ["a.jpg", "c.png", "self.png"]
    assert "not an image file" in summary.failed["a.jpg"]
    assert [row["image_id"] for row in results] == [1, 2]

    for path in (photos / "b.png", photos / "sub" / "a.jpg"):
        path.unlink()
    with pytest.raises(DataError, match=r"inputs \(3\): none can be predicted.*a.jpg"):
        predict(photos)
    earlier = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert earlier == results


def test_an_image_that_needs_too_much_memory_is_named_and_the_others_predicted(
    photos, predict, fail
):
    fail(MemoryError())
    summary, results = predict(photos)
    assert list(summary.failed) == ["sub/a.jpg"]
    assert [row["file_name"] for row in results] == ["b.png"]


def test_what_is_done_is_kept_if_a_file_cannot_be_written(
    tmp_path, photos, predict, monkeypatch
):
    broken = Mock(side_effect=ValueError("counts"))
    monkeypatch.setattr(results_folder, "write_counts", broken)
    with pytest.raises(ValueError, match="counts"):
        predict(photos)

    rows = json.loads((tmp_path / "out.partial" / "predictions.json").read_text())
    assert len(rows) == 2


@pytest.mark.parametrize("is_enough", [True, False])
def test_a_full_disk_keeps_whole_results_without_pictures_or_none(
    tmp_path, photos, predict, monkeypatch, caplog, is_enough
):
    write = results_folder._Prediction.write

    def write_to_full_disk(run, folder):
        if (folder / "pictures").exists() or not is_enough:
            (folder / "predictions.json").write_text("[half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(run, folder)

    monkeypatch.setattr(results_folder._Prediction, "write", write_to_full_disk)
    with pytest.raises(FileAccessError, match=r"disk space .*, then run again\.$"):
        predict(photos)

    partial = tmp_path / "out.partial"
    assert partial.exists() == ("images done until now: 2" in caplog.text) == is_enough
    if is_enough:
        assert len(json.loads((partial / "predictions.json").read_text())) == 2
        assert not (partial / "pictures").exists()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), Interrupted(signal.SIGTERM), ZeroDivisionError()]
)
def test_what_is_done_is_kept_beside_the_output(tmp_path, photos, predict, fail, error):
    predict(photos)
    for _ in range(2):  # the second time replaces the first
        fail(error)
        with pytest.raises(type(error)):
            predict(photos)

    for name, count in (("out", 2), ("out.partial", 1)):
        content = json.loads((tmp_path / name / "predictions.json").read_text())
        assert [row["category_id"] for row in content] == [7] * count
    (picture,) = (tmp_path / "out.partial" / "pictures").rglob("*.*")
    assert picture.name == "b.png"
    assert len(COCO(tmp_path / "out.partial" / "images.json").imgs) == 1
    (tmp_path / "out.partial" / "thesis.tex").touch()
    with pytest.raises(FileAccessError, match=r"out\.partial.*thesis\.tex"):
        predict(photos)


def test_earlier_predictions_are_replaced_and_other_folders_are_not(
    tmp_path, photos, predict
):
    predict(photos)
    predict(photos / "b.png")
    assert [path.name for path in (tmp_path / "out" / "pictures").iterdir()] == [
        "b.png"
    ]
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for output in (tmp_path / "out", tmp_path / "link"):
        with pytest.raises(
            ConfigError, match=r"would replace the input '.*pictures/b.png'"
        ):
            check_output(output, find_sources([tmp_path / "out" / "pictures"]))
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(FileAccessError, match=r"thesis\.tex"):
        predict(photos)
    (tmp_path / "own" / "pictures").mkdir(parents=True)
    with pytest.raises(FileAccessError, match=r"pictures but no predictions\.json"):
        check_output(tmp_path / "own", [])
    with pytest.raises(FileAccessError, match=r"pictures but no counts\.csv"):
        write_preview("", "", tmp_path / "own")


def test_without_opencv_there_are_json_files_but_no_pictures_or_videos(
    monkeypatch, photos, video, predict
):
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(
        MissingPackageError,
        match="pictures: not installed: .*Fix: pip install opencv-python-headless",
    ):
        predict(photos)
    with pytest.raises(
        MissingPackageError, match=r"video \('.*clip.avi'\): not installed"
    ):
        predict(video, pictures=False)
    assert predict(photos, pictures=False)[0].images == 2
