"""The command predict: what it prints, its exit status, and its errors."""

import csv
import json
import os
import re
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from gw_detectron.errors import DataError, UserError
from gw_detectron.workbench.commands.predict import get_parser, main

from ..report.fake_run import write_run


def predict(*words):
    return main(get_parser().parse_args([str(word) for word in words]))


def results(folder):
    return json.loads((folder / "predictions.json").read_text())


def test_a_run_folder(tmp_path, run_folder, photos, capsys):
    output = tmp_path / "out"

    assert predict(
        run_folder,
        photos,
        "--output",
        output,
        "--score-threshold",
        "0.1",
        "--device",
        "cpu",
    )

    printed = capsys.readouterr().out
    rows = results(output)
    assert len(rows) > 6
    assert f"2 images, {len(rows)} objects with a score above 0.1, " in printed
    detector = run_folder / "model_final.pth"
    assert printed.endswith(f"Detector: {detector}\nPredictions: {output}\n")
    assert {row["category_name"] for row in rows} <= {"fork", "cup", "plate"}
    assert (output / "pictures" / "sub" / "a.jpg").is_file()


def test_a_threshold_above_all_scores_is_told(tmp_path, run_folder, photos, capsys):
    words = ["--score-threshold", "1", "--device", "cpu", "--no-pictures"]

    assert predict(run_folder, photos, "--output", tmp_path / "out", *words)

    assert "Fix: give a lower one, or best" in capsys.readouterr().err


@pytest.mark.parametrize("tiles", [[], ["--tiles", "96"]])
def test_all_images_of_several_pages_are_counted(
    tmp_path, run_folder, photos, capsys, tiles
):
    page = Image.new("L", (96, 96))
    for number in range(12):
        pages = [page] * (1 if number else 2)
        page.save(photos / f"{number:02}.tif", save_all=True, append_images=pages)
    words = ["--output", tmp_path / "out", "--device", "cpu", "--no-pictures"]

    assert predict(run_folder, photos, *words, *tiles)

    told = capsys.readouterr().err
    assert "12 images are not read whole; not read: 00.tif (pages 2 to 3), 01" in told
    assert "01.tif (page 2), 02.tif (page 2), 03.tif (page 2) and 8 more. Fix" in told


def test_the_counts_are_those_of_the_results(tmp_path, run_folder, photos):
    output = tmp_path / "out"
    predict(
        run_folder,
        photos,
        "--output",
        output,
        "--score-threshold",
        "0.1",
        "--no-pictures",
    )

    with open(output / "counts.csv", newline="") as file:
        rows = list(csv.DictReader(file))

    assert [row["file_name"] for row in rows] == ["b.png", "sub/a.jpg"]
    found = Counter((row["file_name"], row["category_name"]) for row in results(output))
    for row in rows:
        name, total = row.pop("file_name"), row.pop("all")
        assert row == {
            label: str(found[name, label]) for label in ("fork", "cup", "plate")
        }
        assert int(total) == sum(map(int, row.values()))


def test_the_threshold_of_the_report(tmp_path, run_folder, photos, capsys):
    run = shutil.copytree(run_folder, tmp_path / "judged")
    words = [run, photos / "b.png", "--output", tmp_path / "out", "--no-pictures"]
    words += ["--score-threshold", "best", "--device", "cpu"]
    with pytest.raises(UserError, match="gw-detectron report"):
        predict(*words)

    (run / "report").mkdir()
    report = run / "report" / "report.json"
    numbers = {
        "summary": {"weights": "output/model_final.pth", "dataset": "photos_val"},
        "errors": {"best_threshold": 0.37},
    }
    report.write_text(json.dumps(numbers))
    assert predict(*words)
    printed = capsys.readouterr().out
    assert "Score threshold 0.37: the best F1 on photos_val." in printed
    assert "objects with a score above 0.37, " in printed

    os.utime(report, (0, 0))
    with pytest.raises(UserError, match="older than the weights"):
        predict(*words)
    numbers["summary"]["weights"] = "model_best.pth"
    report.write_text(json.dumps(numbers))
    with pytest.raises(UserError, match="it is of model_best.pth"):
        predict(*words)


def test_the_best_checkpoint_of_a_run(tmp_path, run_folder, photos, capsys):
    run = shutil.copytree(run_folder, tmp_path / "best")
    best = run / "model_best.pth"
    shutil.copyfile(run_folder / "model_final.pth", best)
    output = tmp_path / "out"

    assert predict(run, photos / "b.png", "--output", output, "--no-pictures")

    assert f"Detector: {best} (the best one by TEST.BEST)\n" in capsys.readouterr().out
    assert not (output / "pictures").exists()


def test_names_of_classes_and_config_keys(tmp_path, run_folder, photos):
    output = tmp_path / "out"
    words = (
        "--output",
        output,
        "--score-threshold",
        0.1,
        "--class-names",
        "a, b,c",
        "--opts",
    )

    assert predict(run_folder, photos / "b.png", *words, "TEST.DETECTIONS_PER_IMAGE", 1)

    (row,) = results(output)
    assert row["category_name"] in ("a", "b", "c")


@pytest.mark.parametrize("tiles", [(), ("--tiles", 48)])
def test_the_advice_for_many_objects_works(tmp_path, run_folder, photos, capsys, tiles):
    words = ("--score-threshold", 0, "--no-pictures", "--device", "cpu", *tiles)
    limit = ("--opts", "TEST.DETECTIONS_PER_IMAGE", 1)
    predict(run_folder, photos / "b.png", "--output", tmp_path / "a", *words, *limit)
    advice = capsys.readouterr().err.rpartition("Fix: ")[2]
    assert ("smaller --tiles" in advice) == bool(tiles)

    start = advice.index("--opts")
    advised = advice[start : advice.index(" as the last words")].split()
    predict(run_folder, photos / "b.png", "--output", tmp_path / "b", *words, *advised)

    assert len(results(tmp_path / "b")) > len(results(tmp_path / "a"))


def test_a_core_is_spared(tmp_path, run_folder, photos, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    predict(run_folder, photos / "b.png", "--output", tmp_path / "out")

    assert threads == [2, 3]


def test_the_advice_for_images_that_are_shrunk_works(tmp_path, run_folder, capsys):
    """The training resized images by 0.5, and the shorter side is resized to 96 pixels."""
    Image.new("RGB", (600, 590)).save(tmp_path / "large.png")
    words = (run_folder, tmp_path / "large.png", "--no-pictures", "--device", "cpu")
    predict(*words, "--output", tmp_path / "a")
    said = capsys.readouterr().err
    assert "shrunk more than twice as much as the training images: large.png" in said

    tile = said.partition("give --tiles ")[2].partition(";")[0]
    predict(*words, "--output", tmp_path / "b", "--tiles", tile)

    assert tile == "192"
    assert "shrunk" not in capsys.readouterr().err


@pytest.fixture
def preview(tmp_path):
    """Preview six photos with three objects each, which ``change`` may alter."""
    folder = write_run(tmp_path / "run")
    path = folder / "annotations.json"
    words = ("--preview", path, folder / "photos", "--output", tmp_path / "out")

    def preview(content=None, *extra):
        if content is not None:
            path.write_text(json.dumps(content))
        return predict(*words[:3], *extra, *words[3:])

    preview.content = json.loads(path.read_text())
    return preview


def test_a_preview_draws_annotations_without_a_model(tmp_path, preview):
    for _ in range(2):  # it replaces its own
        assert preview()

    pictures = sorted((tmp_path / "out" / "pictures").iterdir())
    assert len(pictures) == 6
    assert Image.open(pictures[0]).size == (480, 480)
    rows = (tmp_path / "out" / "counts.csv").read_text().splitlines()
    assert len(rows) == 7
    assert {row.split(",")[-1] for row in rows[1:]} == {"3"}


def test_a_preview_of_labels_that_know_their_photos(tmp_path):
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    Image.new("RGB", (60, 40)).save(tmp_path / "images" / "a.png")
    (tmp_path / "labels" / "a.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    (tmp_path / "data.yaml").write_text("train: images\nnames: [cell]\n")

    assert predict("--preview", tmp_path / "data.yaml", "--output", tmp_path / "out")

    assert [path.name for path in (tmp_path / "out/pictures").iterdir()] == ["1_a.jpg"]
    assert (tmp_path / "out/counts.csv").read_text().splitlines()[-1].endswith(",1")


def test_a_preview_names_pages_that_are_not_drawn(tmp_path, preview, caplog):
    photo = preview.content["images"][0]["file_name"]
    path = tmp_path / "run" / "photos" / photo
    with Image.open(path) as image:
        image.save(path, "TIFF", save_all=True, append_images=[image])

    assert preview()

    assert f"1 images are not read whole; not read: {path} (page 2)." in caplog.text


def test_only_a_preview_of_labels_does_without_run(tmp_path, preview):
    folder = tmp_path / "run"
    for words in ((), ("--preview", folder / "annotations.json")):
        with pytest.raises(UserError, match="RUN"):
            predict(*words, "--output", tmp_path / "out")


def test_a_preview_does_not_count_ignored_objects(tmp_path, preview):
    preview.content["annotations"][0]["ignore"] = 1
    assert preview(preview.content)
    assert (tmp_path / "out" / "counts.csv").read_text().count(",2\n") == 1


def test_a_preview_leaves_broken_annotations_out(preview, caplog):
    content = preview.content
    for image in content["images"]:  # with the name of a folder
        image["id"] = f"2023/{image['id']}"
    for annotation in content["annotations"]:
        annotation["image_id"] = f"2023/{annotation['image_id']}"
    faults = (
        {},
        {"bbox": None},
        {"bbox": [1, 2, 3]},
        {"bbox": [1, 2, 3, "4"]},
        {"keypoints": [5, 5, 2]},
    )
    for annotation, fault in zip(content["annotations"], faults, strict=False):
        annotation |= {"keypoints": [3, 4, 2, 0, 0, 0]} | fault

    assert preview(content)

    assert "4 of 18 annotations left out" in caplog.text


def test_a_preview_that_cannot_be_drawn_keeps_the_earlier_one(tmp_path, preview):
    preview()
    for content in ({}, {"images": [], "annotations": [3], "categories": []}, []):
        with pytest.raises(UserError, match=r"annotations\.json"):
            preview(content)
    assert len(list((tmp_path / "out" / "pictures").iterdir())) == 6


@pytest.mark.parametrize(
    "extra", [["more"], ["--score-threshold", "0.7"], ["--no-pictures"]]
)
def test_a_preview_takes_no_flags_of_predictions(preview, extra):
    with pytest.raises(UserError, match="--preview"):
        preview(None, *extra)


def test_the_advice_on_an_image_of_16_bits_has_words_to_add(tmp_path, run_folder):
    words = [run_folder, tmp_path / "deep.png", "--output", tmp_path / "out"]
    pixels = np.arange(96 * 131, dtype=np.uint16).reshape(96, 131)
    Image.fromarray(pixels).save(words[1])

    with pytest.raises(DataError, match="more than 8 bits") as error:
        predict(*words)

    advised = re.search(r"--opts [^)]*", str(error.value))[0]
    assert predict(*words, *advised.split())


def test_a_broken_file_is_the_exit_status(tmp_path, run_folder, photos, capsys):
    (photos / "a.jpg").write_bytes(b"no image")
    assert predict(run_folder, photos, "--output", tmp_path / "out") is False
    printed = capsys.readouterr()
    assert printed.err.startswith("a.jpg: image (") and printed.out.startswith(
        "2 images, "
    )


def test_errors_write_nothing(tmp_path, run_folder, photos, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for words, message in (
        (("photos/none.jpg", "--output", "out"), "not found"),
        (("photos", "--output", "photos"), "so it is not an earlier result"),
        (("photos", "--output", "out", "--config-file", "none.yaml"), "none.yaml"),
    ):
        with pytest.raises(UserError, match=message):
            predict(run_folder, *words)
        assert sorted(tmp_path.rglob("*")) == before
