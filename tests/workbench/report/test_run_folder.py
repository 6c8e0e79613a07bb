"""The content of a run folder, and how a missing part is named."""

import json
import os
import shlex
import shutil

import pytest
import torch
from detectron2.data import DatasetCatalog

from gw_detectron.errors import ConfigError, DataError, MissingFileError
from gw_detectron.workbench.commands.train import get_parser
from gw_detectron.workbench.report import RunFolder
from gw_detectron.workbench.report.sections import summary

from .fake_run import (
    IMAGES,
    OBJECTS,
    change_json,
    results_file,
    write_metrics,
    write_run,
)

HUGE = {"size": [10**6, 10**6], "counts": "0"}
DAMAGED = {"size": [96, 96], "counts": "~~~" * 50}


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "run")


@pytest.fixture
def evaluated(folder):
    """Evaluate the run with other weights."""
    config = (folder / "config.yaml").read_text()
    path = folder / "inference" / "config.yaml"
    path.write_text(config.replace("WEIGHTS: ''", "WEIGHTS: best.pth"))
    os.utime(path, (0, 0))  # a copy of the folder may have other times

    datasets = (folder / "datasets.yaml").read_text()
    for key in ("json: ", "images: "):
        datasets = datasets.replace(key, f"{key}../")
    (folder / "inference" / "datasets.yaml").write_text(datasets)
    return folder


def test_a_later_evaluation_decides_about_config_weights_and_predictions(evaluated):
    results_file(evaluated).write_text("[]")
    run = RunFolder(evaluated)

    assert run.config_file == evaluated / "inference" / "config.yaml"
    assert run.weights == "best.pth"
    assert run.detections.results == []
    assert "mIoU" not in summary(run).numbers


def advised_command(folder, reason):
    """Return the run that the error of unusable predictions advises to evaluate."""
    with pytest.raises(DataError, match=reason) as caught:
        _ = RunFolder(folder).detections

    command = str(caught.value).rpartition("by `")[2].partition("`")[0]
    name, action, *words = shlex.split(command)
    assert (name, action) == ("gw-detectron", "eval")
    return get_parser(evaluation=True).parse_args(words)


def with_values(**values):
    return lambda results: [{**result, **values} for result in results]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.unlink(), "coco_instances_results"),
        (lambda path: path.write_text('[{"image_id"'), "coco_instances_results"),
        (lambda path: path.write_text("[" * 5000), "coco_instances_results"),
        (lambda path: path.write_text("3"), "coco_instances_results"),
        (lambda path: path.write_text("{}"), "not a list of results"),
        (lambda path: path.write_text("[3]"), "1 of 1"),
        (lambda path: change_json(path, with_values(image_id=99)), "12 of 12"),
        (lambda path: change_json(path, with_values(image_id=[1])), "12 of 12"),
        (lambda path: change_json(path, with_values(category_id=7)), "12 of 12"),
        (lambda path: change_json(path, with_values(score="a")), "12 of 12"),
        (lambda path: change_json(path, with_values(score=float("nan"))), "12 of 12"),
        (lambda path: change_json(path, with_values(score=True)), "12 of 12"),
        (lambda path: change_json(path, with_values(bbox=[1, 2, 3])), "12 of 12"),
        (lambda path: change_json(path, with_values(bbox=None)), "12 of 12"),
        (lambda path: change_json(path, with_values(segmentation=None)), "12 of 12"),
        (lambda path: change_json(path, with_values(segmentation=HUGE)), "12 of 12"),
        (lambda path: change_json(path, with_values(segmentation=DAMAGED)), "12 of 12"),
        (lambda path: change_json(path, with_values(keypoints=[])), "12 of 12"),
        (lambda path: change_json(path, with_values(keypoints=[1, 2, 3])), "12 of 12"),
    ],
)
def test_unusable_predictions_are_named_with_a_command_that_can_be_pasted(
    tmp_path, damage, reason
):
    folder = write_run(tmp_path / "my run")
    damage(results_file(folder))

    assert advised_command(folder, reason).run == str(folder)


def test_an_evaluation_is_repeated_by_its_config(evaluated):
    results_file(evaluated).unlink()
    args = advised_command(evaluated, "coco_instances_results")

    assert args.config_file == str(evaluated / "inference" / "config.yaml")
    assert args.opts == ["OUTPUT_DIR", str(evaluated)]


def test_annotations_of_a_dataset_that_was_registered_in_python(folder):
    text = (folder / "annotations.json").read_text()
    (folder / "inference" / "py_val_coco_format.json").write_text(text)
    images = json.loads(text)["images"]
    records = [{**image, "image_id": image["id"]} for image in images]
    DatasetCatalog.register("py_val", lambda: records)
    run = RunFolder(folder)
    run.cfg.DATASETS.TEST = ("py_val",)

    assert len(run.detections.truth.anns) == IMAGES * OBJECTS


def test_an_info_that_pycocotools_cannot_copy_is_not_read(folder):
    path = folder / "annotations.json"
    change_json(path, lambda content: {**content, "info": "DEEP"})
    path.write_text(path.read_text().replace('"DEEP"', "[" * 600 + "]" * 600))

    assert RunFolder(folder).detections.scores("bbox")["AP"] > 13


def test_a_run_of_a_comparison_tells_what_it_does_not_keep(folder):
    shutil.rmtree(folder / "inference")
    (folder / "result.json").write_text("{}")

    with pytest.raises(MissingFileError, match=r"compare keeps .* Fix: see"):
        _ = RunFolder(folder).detections


def test_datasets_that_cannot_be_used_are_named(folder):
    run = RunFolder(folder)
    run.cfg.DATASETS.TEST = ()
    with pytest.raises(DataError, match=r"DATASETS\.TEST"):
        _ = run.records

    change_json(
        folder / "annotations.json", lambda content: {**content, "annotations": []}
    )
    with pytest.raises(DataError, match=r"annotations\.json"):
        _ = RunFolder(folder).detections


def test_the_summary_reads_iterations_speed_and_segmentation_from_the_metrics(folder):
    with (folder / "metrics.json").open("a") as file:
        file.write(json.dumps({"iteration": 40, "sem_seg/mIoU": 34.32}) + "\n")
    numbers = summary(RunFolder(folder)).numbers

    assert numbers["iterations"] == 40
    assert numbers["seconds_per_iteration"] == 0.5
    assert numbers["mIoU"] == 34.3
    assert numbers["scores"]["bbox"]["AP"] > 13
    assert numbers["images"] == IMAGES


def test_a_run_that_has_not_ended_says_of_how_many_iterations(tmp_path):
    folder = write_run(tmp_path / "run", SOLVER__MAX_ITER=983)
    section = summary(RunFolder(folder))

    assert section.numbers["iterations"] == 40
    assert ("iterations", "40 of 983") in section.tables[-1].rows


def test_without_losses_no_iteration_is_counted(folder):
    write_metrics(folder, {"iteration": 40, "bbox/AP": 5.0})  # as after a lost file

    assert summary(RunFolder(folder)).numbers["iterations"] == 0


@pytest.mark.parametrize(
    ("content", "best"),
    [({"model": {}, "iteration": 14}, 15), ({"model": {}}, None), ([], None)],
)
def test_the_best_iteration_is_that_of_the_kept_weights(folder, content, best):
    torch.save(content, folder / "model_best.pth")

    assert RunFolder(folder).best_iteration == best


def test_records_that_are_no_metrics_are_skipped(folder):
    lines = ["[1]", "null", '{"iteration": "a"}', '{"iteration": 3, "lr": [1]}']
    (folder / "metrics.json").write_text(
        "\n".join([*lines, '{"iteration": 4, "lr": 1}'])
    )
    run = RunFolder(folder)

    assert run.logged("lr") == [(4, 1)]
    assert run.metric_names == ["iteration", "lr"]


def test_predictions_are_those_of_the_weights(folder):
    """The best ones until their file is moved away; then those of the last weights."""
    for name in (
        "model_final.pth",
        "model_best.pth",
        "inference/model_best_results.json",
    ):
        (folder / name).write_text("[]")
    assert RunFolder(folder).detections.results == []

    (folder / "model_best.pth").unlink()
    assert len(RunFolder(folder).detections.results) > 3


@pytest.mark.parametrize(
    "wrong", [{"images": 0}, {"score": -0.1}, {"score": float("nan")}]
)
def test_options_out_of_range_are_refused(folder, wrong):
    (flag,) = wrong
    with pytest.raises(ConfigError, match=f"--{flag}"):
        RunFolder(folder, **wrong)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(MissingFileError, match=r"config\.yaml"):
        RunFolder(tmp_path)
