"""A data.yaml of YOLO in a training, a resumed run, an evaluation and a comparison."""

import json
from dataclasses import replace

import pytest

from gw_detectron.errors import ConfigError
from gw_detectron.workbench.commands.train import get_parser
from gw_detectron.workbench.commands.train import run_here as main
from gw_detectron.workbench.compare import comparison
from gw_detectron.workbench.dataset import registration
from gw_detectron.workbench.run import DatasetFlags, RunRequest, prepare

from ....photos import CLASSES, photo_names, write_photos
from ....tiny_run import CONFIG, OPTS, arguments, key_words


def write_rows(folder, content):
    """Write the boxes of a COCO content as rows beside its photos."""
    sizes = {image["id"]: image for image in content["images"]}
    names = {each["id"]: each["name"] for each in content["categories"]}
    for image in sizes.values():
        rows = []
        for each in content["annotations"]:
            if each["image_id"] != image["id"]:
                continue
            x, y, width, height = each["bbox"]
            numbers = (
                CLASSES.index(names[each["category_id"]]),
                (x + width / 2) / image["width"],
                (y + height / 2) / image["height"],
                width / image["width"],
                height / image["height"],
            )
            rows.append(" ".join(map(str, numbers)))
        label = folder / image["file_name"].replace(".jpg", ".txt")
        label.write_text("\n".join(rows))


@pytest.fixture
def yolo(tmp_path):
    """A data.yaml of six photos to train on, three to evaluate on, and three others in test."""
    for part, count, first in (("train", 6, 0), ("val", 3, 20), ("test", 3, 40)):
        folder = tmp_path / "yolo" / part
        content = write_photos(folder, photo_names(count, first))
        (folder / "annotations.json").unlink()
        write_rows(folder / "photos", content)
    path = tmp_path / "yolo/data.yaml"
    path.write_text(f"train: train\nval: val\nnames: {CLASSES}\n")
    return path


def test_a_run_keeps_its_labels(tmp_path, yolo, one_thread):
    run = tmp_path / "run"
    flags = ("--train-json", str(yolo))
    main(arguments(run, *flags, MODEL__MASK_ON=False))
    written = json.loads((run / "datasets/custom_val.json").read_text())
    boxes = [row["bbox"] for row in written["annotations"]]
    assert len(boxes) == 6

    label = yolo.parent / "val/photos/IMG_0020.txt"
    label.write_text("0 0.5 0.5 0.5 0.5\n")
    main(get_parser(evaluation=True).parse_args([str(run), "--num-gpus", "0"]))
    main(
        get_parser().parse_args(
            [str(run), "--resume", "--num-gpus", "0", "SOLVER.MAX_ITER", "4"]
        )
    )

    again = json.loads((run / "datasets/custom_val.json").read_text())
    assert [row["bbox"] for row in again["annotations"]] == boxes
    said = (run / "inference/log.txt").read_text()
    assert f"'{yolo}' has changed since the run, but its labels of then" in said


def asked(tmp_path, search, scored):
    opts = key_words({**OPTS, "MODEL.MASK_ON": False})
    base = RunRequest(str(CONFIG), tuple(opts), num_gpus=0, data=search)
    output = tmp_path / "out"
    return comparison.Comparison(
        base, ["GN", "GW"], output, scored=scored, iterations=4
    )


def test_a_comparison_reads_labels_once(tmp_path, yolo, monkeypatch):
    search = DatasetFlags(train_json=str(yolo), val_json=str(yolo))
    scored = replace(search, val_json=str(yolo.parent / "test"))
    what = asked(tmp_path, search, scored)
    cfg, digests = comparison.check(what, print)
    what = comparison.read_labels_once(what, cfg)

    opened = []

    def read_labels(path, *other):
        opened.append(path)
        return real(path, *other)

    real = registration.read_labels
    monkeypatch.setattr(registration, "read_labels", read_labels)
    for is_scored in (True, False):
        prepare(what.request(tmp_path / "run", {}, scored=is_scored))

    assert opened
    assert all(path.startswith(f"{tmp_path}/out/labels/") for path in opened)
    tested = digests["--test-json, "]
    assert tested["folder of the images"] == str(yolo.parent / "test")
    assert tested["annotations"] != digests["dataset 'custom_val', "]["annotations"]


def test_a_comparison_is_not_scored_on_the_val_of_a_data_yaml(tmp_path, yolo):
    flags = DatasetFlags(train_json=str(yolo), val_json=str(yolo))
    what = asked(tmp_path, flags, flags)

    with pytest.raises(ConfigError, match="--test-json .* a data.yaml has photos"):
        comparison.check(what, print)
