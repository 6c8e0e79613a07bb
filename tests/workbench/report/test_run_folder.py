"""What is found in a run folder, and how a missing part is named."""

import json
import os
import shlex

import pytest
from detectron2.data import DatasetCatalog

from gw_detectron.errors import ConfigError, DataError, MissingFileError
from gw_detectron.workbench.report import RunFolder
from gw_detectron.workbench.report.sections import summary

from .fake_run import IMAGES, OBJECTS, write_run


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "run")


def results_file(folder):
    return folder / "inference" / "coco_instances_results.json"


def test_a_later_evaluation_decides_about_config_weights_and_predictions(folder):
    evaluated = folder / "inference" / "config.yaml"
    evaluated.write_text(
        (folder / "config.yaml").read_text().replace("WEIGHTS: ''", "WEIGHTS: best.pth")
    )
    (folder / "inference" / "datasets.yaml").write_text(
        (folder / "datasets.yaml")
        .read_text()
        .replace("json: ", "json: ../")
        .replace("images: ", "images: ../")
    )
    os.utime(evaluated, (0, 0))  # a copy of the folder may have other times
    results_file(folder).write_text("[]")
    run = RunFolder(folder)
    assert (
        run.config_file == evaluated
        and run.weights == "best.pth"
        and run.detections.results == []
    )
    assert "mIoU" not in summary(run).numbers


def change_results(folder, **values):
    results = json.loads(results_file(folder).read_text())
    results_file(folder).write_text(json.dumps([{**each, **values} for each in results]))


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda folder: results_file(folder).unlink(), "coco_instances_results"),
        (
            lambda folder: results_file(folder).write_text('[{"image_id"'),
            "coco_instances_results",
        ),
        (lambda folder: change_results(folder, image_id=99), r"\(99\)"),
        (lambda folder: change_results(folder, category_id=7), r"\(7\)"),
    ],
)
def test_unusable_predictions_are_named_with_a_command_that_can_be_pasted(
    tmp_path, change, reason
):
    folder = write_run(tmp_path / "my run")
    change(folder)
    with pytest.raises(DataError, match=reason) as caught:
        _ = RunFolder(folder).detections
    words = shlex.split(str(caught.value).rpartition("run `")[2].partition("`")[0])
    flags = ["--eval-only", "--config-file", str(folder / "config.yaml")]
    opts = ["OUTPUT_DIR", str(folder), "MODEL.WEIGHTS", str(folder / "model_final.pth")]
    assert words == ["gw-detectron", "train", *flags, *opts]


def test_annotations_of_a_dataset_that_was_registered_in_python(folder):
    content = json.loads((folder / "annotations.json").read_text())
    (folder / "inference" / "py_val_coco_format.json").write_text(json.dumps(content))
    records = [{**image, "image_id": image["id"]} for image in content["images"]]
    DatasetCatalog.register("py_val", lambda: records)
    run = RunFolder(folder)
    run.cfg.DATASETS.TEST = ("py_val",)
    assert len(run.detections.truth.anns) == IMAGES * OBJECTS


def test_datasets_that_cannot_be_used_are_named(folder):
    run = RunFolder(folder)
    run.cfg.DATASETS.TEST = ()
    with pytest.raises(DataError, match=r"DATASETS\.TEST"):
        _ = run.records
    content = json.loads((folder / "annotations.json").read_text())
    (folder / "annotations.json").write_text(json.dumps({**content, "annotations": []}))
    with pytest.raises(DataError, match=r"annotations\.json"):
        _ = RunFolder(folder).detections


def test_the_summary_reads_iterations_speed_and_segmentation_from_the_metrics(folder):
    with (folder / "metrics.json").open("a") as file:
        file.write(json.dumps({"iteration": 40, "sem_seg/mIoU": 34.32}) + "\n")
    numbers = summary(RunFolder(folder)).numbers
    assert numbers["iterations"] == numbers["evaluated_after_iteration"] == 40
    assert numbers["seconds_per_iteration"] == 0.5 and numbers["mIoU"] == 34.3
    assert numbers["scores"]["bbox"]["AP"] > 13 and numbers["images"] == IMAGES
    (folder / "metrics.json").write_text(
        json.dumps({"iteration": 40, "bbox/AP": 5.0})
    )  # as after a lost file
    assert summary(RunFolder(folder)).numbers["iterations"] == 0


@pytest.mark.parametrize(
    "name, values, best",
    [
        ("bbox/AP", [float("nan"), 10, 30, 25, 30], 300),
        ("validation/total_loss", [float("nan"), 2, 1, 3, float("inf")], 300),
        ("bbox/AP", [float("nan"), float("inf")], None),
    ],
)
def test_the_best_iteration_is_of_the_weights_that_are_kept(folder, name, values, best):
    (folder / "model_best.pth").touch()
    records = [
        {"iteration": 100 * number - 1, name: value} for number, value in enumerate(values, 1)
    ]
    (folder / "metrics.json").write_text("\n".join(map(json.dumps, records)))
    run = RunFolder(folder)
    run.cfg.TEST.BEST = name
    assert run.best_iteration == best


def test_predictions_are_those_of_the_weights(folder):
    """The best ones, until the user moves their file away: the last evaluation's then belong to the last weights."""
    for name in ("model_final.pth", "model_best.pth", "inference/model_best_results.json"):
        (folder / name).write_text("[]")
    assert RunFolder(folder).detections.results == []
    (folder / "model_best.pth").unlink()
    assert len(RunFolder(folder).detections.results) > 3


@pytest.mark.parametrize("wrong", [{"images": 0}, {"score": -0.1}, {"score": float("nan")}])
def test_options_out_of_range_are_refused(folder, wrong):
    with pytest.raises(ConfigError, match=f"--{next(iter(wrong))}"):
        RunFolder(folder, **wrong)
    with pytest.raises(MissingFileError, match=r"config\.yaml"):
        RunFolder(folder / "photos")
