"""The command predict: what it prints, its exit status, and its errors."""

import csv
import json
import shutil
from collections import Counter

import pytest
from PIL import Image

from gw_detectron.errors import UserError
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
    count = len(results(output))
    assert (
        count > 6 and f"2 images, {count} objects with a score above 0.1, " in printed
    )
    assert printed.endswith(
        f"Detector: {run_folder / 'model_final.pth'}\nPredictions: {output}\n"
    )
    assert {each["category_name"] for each in results(output)} <= {
        "fork",
        "cup",
        "plate",
    }
    assert (output / "pictures" / "sub" / "a.jpg").is_file()
    with open(output / "counts.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = Counter(
        (each["file_name"], each["category_name"]) for each in results(output)
    )
    assert [row["file_name"] for row in rows] == ["b.png", "sub/a.jpg"]
    for row in rows:
        counts = [found[row["file_name"], name] for name in ("fork", "cup", "plate")]
        assert [int(row[name]) for name in ("fork", "cup", "plate", "all")] == [
            *counts,
            sum(counts),
        ]
    best = shutil.copytree(run_folder, tmp_path / "best") / "model_best.pth"
    shutil.copyfile(run_folder / "model_final.pth", best)
    assert predict(best.parent, photos / "b.png", "--output", output, "--no-pictures")
    assert f"Detector: {best} (the best one by TEST.BEST)\n" in capsys.readouterr().out
    assert not (output / "pictures").exists()
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
    assert [each["category_name"] in ("a", "b", "c") for each in results(output)] == [
        True
    ]


def test_a_preview_draws_annotations_without_a_model(tmp_path, capsys, caplog):
    folder = write_run(tmp_path / "run")  # six photos with three objects each
    words = (
        "--preview",
        folder / "annotations.json",
        folder / "photos",
        "--output",
        tmp_path / "out",
    )
    assert predict(*words) and predict(*words)  # replaces its own
    pictures = sorted((tmp_path / "out" / "pictures").iterdir())
    assert len(pictures) == 6 and Image.open(pictures[0]).size == (480, 480)
    rows = (tmp_path / "out" / "counts.csv").read_text().splitlines()
    assert len(rows) == 7 and all(row.endswith(",3") for row in rows[1:])
    content = json.loads((folder / "annotations.json").read_text())
    content["annotations"][0]["ignore"] = 1
    (folder / "annotations.json").write_text(json.dumps(content))
    assert (
        predict(*words)
        and (tmp_path / "out" / "counts.csv").read_text().count(",2\n") == 1
    )
    for each in (
        *content["images"],
        *content["annotations"],
    ):  # with the name of a folder
        key = "id" if "file_name" in each else "image_id"
        each[key] = f"2023/{each[key]}"
    faults = (
        {"bbox": None},
        {"bbox": [1, 2, 3]},
        {"bbox": [1, 2, 3, "4"]},
        {"keypoints": [5, 5, 2]},
    )
    for each, fault in zip(content["annotations"], ({}, *faults), strict=False):
        each |= {"keypoints": [3, 4, 2, 0, 0, 0]} | fault
    (folder / "annotations.json").write_text(json.dumps(content))
    assert predict(*words) and "4 of 18 annotations left out" in caplog.text
    for change in ({}, {"images": [], "annotations": [3], "categories": []}, []):
        (folder / "annotations.json").write_text(json.dumps(change))
        with pytest.raises(UserError, match="annotations.json"):
            predict(*words)
    assert len(sorted((tmp_path / "out" / "pictures").iterdir())) == 6
    for extra in (["more"], ["--score-threshold", "0.7"], ["--no-pictures"]):
        with pytest.raises(UserError, match="--preview: takes no "):
            predict(*words[:3], *extra, *words[3:])


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
