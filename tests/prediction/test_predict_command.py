"""The command predict: what it prints, its exit status, and that all kinds of models give the same results."""

import json

import pytest

from gw_detectron.commands.predict import get_parser, main
from gw_detectron.config import read_config
from gw_detectron.errors import UserError
from gw_detectron.export import dataset_classes, export_detector, load_model

from .conftest import SIDES


def predict(*words):
    return main(get_parser().parse_args([str(word) for word in words]))


def results(folder):
    return json.loads((folder / "predictions.json").read_text())


def test_a_run_folder(tmp_path, run_folder, photos, capsys):
    output = tmp_path / "out"
    assert predict(run_folder, photos, "--output", output, "--score-threshold", "0.1", "--device", "cpu")
    printed = capsys.readouterr().out
    count = len(results(output))
    assert count > 6 and f"2 images, {count} objects with a score above 0.1, " in printed
    assert printed.endswith(f"Detector: {run_folder / 'model_final.pth'}\nPredictions: {output}\n")
    assert {each["category_name"] for each in results(output)} <= {"fork", "cup", "plate"}
    assert (output / "pictures" / "sub" / "a.jpg").is_file()
    assert predict(run_folder, photos / "b.png", "--output", output, "--json", "--no-pictures")
    summary = json.loads(capsys.readouterr().out)
    assert summary["detector"] == str(run_folder / "model_final.pth")
    assert summary["images"] == 1 and summary["output"] == str(output) and summary["failed"] == {}
    assert not (output / "pictures").exists()


def test_a_broken_file_is_the_exit_status(tmp_path, run_folder, photos, capsys):
    (photos / "a.jpg").write_bytes(b"no image")
    assert predict(run_folder, photos, "--output", tmp_path / "out") is False
    printed = capsys.readouterr()
    assert printed.err.startswith("a.jpg: image (") and printed.out.startswith("2 images, ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("photos/none.jpg", "--output", "out"), "not found"),
        (("photos", "--output", "photos"), "is not part of an earlier result"),
        (("photos", "--output", "out", "--config-file", "none.yaml"), "config is not found"),
    ],
)
def test_errors_write_nothing(tmp_path, run_folder, photos, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message):
        predict(run_folder, *words)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize(("file_format", "one_image"), [("pt2", True), ("onnx", False)])
def test_exported_files_agree_with_the_checkpoint(tmp_path, run_folder, photos, file_format, one_image):
    config = str(run_folder / "config.yaml")
    cfg = read_config(config)
    cfg.MODEL.WEIGHTS = str(run_folder / "model_final.pth")
    names, ids = dataset_classes(cfg, config)
    options = {"file_format": file_format, "sides": SIDES, "one_image": one_image, "paste_masks": one_image}
    export_detector(load_model(cfg), tmp_path / "exported", class_names=names, category_ids=ids, **options)
    words = (photos, "--score-threshold", "0.1", "--no-pictures", "--output")
    assert predict(run_folder, *words, tmp_path / "a")
    assert predict(tmp_path / "exported", *words, tmp_path / "b")
    expected, found = results(tmp_path / "a"), results(tmp_path / "b")
    assert len(found) == len(expected) > 6
    for a, b in zip(found, expected, strict=True):
        assert all(a[key] == b[key] for key in ("file_name", "category_id", "category_name"))
        assert a["score"] == pytest.approx(b["score"], abs=1e-3)
        assert a["bbox"] == pytest.approx(b["bbox"], abs=0.1)
