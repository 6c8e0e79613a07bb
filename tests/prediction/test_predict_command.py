"""The command predict: what it prints, its exit status, and its errors."""

import json

import pytest

from gw_detectron.commands.predict import get_parser, main
from gw_detectron.errors import UserError


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
