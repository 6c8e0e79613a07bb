"""What is found in a run folder, and how a missing part is named."""

import dataclasses
import json
import os
import shlex
import shutil

import pytest
import torch
from detectron2.data import DatasetCatalog

from gw_detectron.errors import ConfigError, MissingFileError, MissingInputError
from gw_detectron.report import ReportOptions, RunFolder
from gw_detectron.report.example_images import predictions_section
from gw_detectron.report.overview import summary_section

from .fake_run import IMAGES, OBJECTS, write_run


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "run")


def results_file(folder):
    return folder / "inference" / "coco_instances_results.json"


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(MissingFileError, match=r"no config\.yaml"):
        RunFolder(tmp_path)


def test_predictions_and_ground_truth_are_found(folder):
    run = RunFolder(folder)
    assert len(run.records) == IMAGES and len(run.detections.truth.anns) == IMAGES * OBJECTS
    assert run.detections.tasks == ["bbox"] and len(run.detections.results) == 12
    assert run.weights == str(folder / "model_final.pth") and run.training_time == "0:00:20"


def test_the_times_of_a_resumed_run_are_added(folder):
    log = folder / "log.txt"
    log.write_text(log.read_text() + log.read_text().replace("0:00:20", "1 day, 2:59:50"))
    assert RunFolder(folder).training_time == "1 day, 3:00:10"


def test_a_later_evaluation_decides_about_config_weights_and_predictions(folder):
    evaluated = folder / "inference" / "config.yaml"
    text = (folder / "config.yaml").read_text().replace("WEIGHTS: ''", "WEIGHTS: best.pth")
    evaluated.write_text(text)
    shutil.copy(folder / "datasets.yaml", folder / "inference")
    (folder / "inference" / "datasets.yaml").write_text(
        (folder / "datasets.yaml").read_text().replace("json: ", "json: ../").replace("images: ", "images: ../")
    )
    os.utime(evaluated, (0, 0))  # a copy of the folder may have other times
    results_file(folder).write_text("[]")
    for place in (folder, folder / "inference"):
        run = RunFolder(place)
        assert run.config_file == evaluated and run.weights == "best.pth" and run.detections.results == []


def test_an_evaluated_folder_can_be_moved(folder, tmp_path):
    weights = f"WEIGHTS: {folder}/best.pth"
    text = (folder / "config.yaml").read_text()
    (folder / "inference" / "config.yaml").write_text(text.replace("WEIGHTS: ''", weights))
    moved = folder.rename(tmp_path / "moved")
    assert RunFolder(moved).weights == str(folder / "best.pth")  # which a message names
    (moved / "best.pth").touch()
    for place in (moved, moved / "inference"):
        assert RunFolder(place).weights == str(moved / "best.pth")
    folder.mkdir()
    (folder / "best.pth").touch()
    assert RunFolder(moved).weights == str(folder / "best.pth")


def break_results(folder):
    results_file(folder).write_text('[{"image_id"')


def change_images(folder):
    results = json.loads(results_file(folder).read_text())
    results_file(folder).write_text(json.dumps([{**each, "image_id": 99} for each in results]))


def change_categories(folder):
    results = json.loads(results_file(folder).read_text())
    results_file(folder).write_text(json.dumps([{**each, "category_id": 7} for each in results]))


def remove_annotations(folder):
    path = folder / "annotations.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "annotations": []}))


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda folder: results_file(folder).unlink(), "not found"),
        (break_results, "not complete"),
        (change_images, "lacks (99)"),
        (change_categories, "has categories that 'fake_val' lacks (7)"),
    ],
)
def test_missing_or_unusable_predictions_are_named_with_a_command(folder, change, reason):
    change(folder)
    with pytest.raises(MissingInputError) as caught:
        _ = RunFolder(folder).detections
    assert reason in caught.value.reason
    assert caught.value.command.startswith("gw-detectron train --eval-only --config-file")
    assert str(folder / "model_final.pth") in caught.value.command and str(caught.value).count("Fix:") == 1


@pytest.mark.parametrize("iteration", [19, 40, 39])
def test_predictions_of_another_iteration_than_the_weights_are_not_judged(tmp_path, iteration):
    """As after a training that was stopped between two evaluations; its last record is of iteration 40."""
    folder = write_run(tmp_path / "run", weights=True)
    saved = torch.load(folder / "model_final.pth", weights_only=False)
    torch.save({**saved, "iteration": iteration}, folder / "model_final.pth")
    run = RunFolder(folder)
    assert summary_section(run).numbers["evaluated_after_iteration"] == 40
    if iteration == 19:
        with pytest.raises(MissingInputError, match=r"of iteration 40 in metrics.json, not of") as caught:
            _ = run.detections
        assert "--eval-only" in caught.value.command
        assert summary_section(run).numbers["scores"]["bbox"]["AP"] == 12.5  # the logged one
    else:
        assert run.detections.results


def test_annotations_of_a_dataset_that_was_registered_in_python(folder):
    content = json.loads((folder / "annotations.json").read_text())
    (folder / "inference" / "py_val_coco_format.json").write_text(json.dumps(content))
    records = [{**image, "image_id": image["id"]} for image in content["images"]]
    DatasetCatalog.register("py_val", lambda: records)
    try:
        run = RunFolder(folder)
        run.cfg.DATASETS.TEST = ("py_val",)
        assert len(run.detections.truth.anns) == IMAGES * OBJECTS
    finally:
        DatasetCatalog.pop("py_val")


def test_scaled_schedules_and_segmentation_are_read_from_the_metrics(folder):
    with (folder / "metrics.json").open("a") as file:
        file.write(json.dumps({"iteration": 79, "sem_seg/mIoU": 34.32}) + "\n")
    run = RunFolder(folder)
    run.cfg.SOLVER.REFERENCE_WORLD_SIZE = 2
    section = summary_section(run)
    assert section.numbers["iterations"] == 80 and "images_per_second" not in section.numbers
    assert section.numbers["mIoU"] == 34.3 and section.cards["mIoU"] == "34.3"


def test_no_command_trains_into_a_folder_with_checkpoints(folder):
    (folder / "metrics.json").write_text('{"iteration"')
    with pytest.raises(MissingInputError, match=r"metrics.json': no complete record; .* every 20 iterations. Fix: "):
        _ = RunFolder(folder).metrics
    (folder / "metrics.json").unlink()
    with pytest.raises(MissingInputError, match=r"metrics.json': not found. Fix: ") as caught:
        _ = RunFolder(folder).metrics
    assert shlex.split(caught.value.command)[:3] == ["gw-detectron", "train", "--config-file"]
    (folder / "model_final.pth").write_bytes(b"PK")
    for read in (lambda run: run.metrics, lambda run: run.checkpoint):
        with pytest.raises(MissingInputError, match=r" Fix: ") as caught:
            read(RunFolder(folder))
        assert not caught.value.command


def test_no_command_makes_objects(folder):
    remove_annotations(folder)
    with pytest.raises(MissingInputError, match=r"no annotations. Fix: evaluate on images with objects") as caught:
        _ = RunFolder(folder).detections
    assert not caught.value.command
    run = RunFolder(folder)
    run.cfg.MODEL.META_ARCHITECTURE = "SemanticSegmentor"
    with pytest.raises(MissingInputError, match="predicts no objects") as caught:
        _ = run.detections
    assert not caught.value.command


def test_a_run_without_a_dataset_is_told_to_name_one(folder):
    results_file(folder).unlink()
    run = RunFolder(folder)
    run.cfg.DATASETS.TEST = ()
    with pytest.raises(MissingInputError) as caught:
        _ = run.detections
    assert "--val-json FILE --val-images DIR" in caught.value.command
    with pytest.raises(MissingInputError, match=r"DATASETS.TEST \(empty\): no dataset to judge the run on"):
        _ = run.records


def test_a_dataset_that_is_gone_is_named(folder):
    shutil.rmtree(folder / "photos")
    with pytest.raises(MissingInputError, match="no folder"):
        _ = RunFolder(folder).detections


def test_a_command_can_be_pasted(tmp_path):
    folder = write_run(tmp_path / "my run", predict=False)
    with pytest.raises(MissingInputError) as caught:
        _ = RunFolder(folder).detections
    words = shlex.split(caught.value.command)
    flags = ["--eval-only", "--config-file", str(folder / "config.yaml")]
    opts = ["OUTPUT_DIR", str(folder), "MODEL.WEIGHTS", str(folder / "model_final.pth")]
    assert words == ["gw-detectron", "train", *flags, *opts]


def test_without_predictions_the_summary_has_the_logged_ap(folder):
    assert summary_section(RunFolder(folder)).numbers["scores"]["bbox"]["AP"] > 13
    results_file(folder).unlink()
    numbers = summary_section(RunFolder(folder)).numbers
    assert numbers["scores"] == {"bbox": {**dict.fromkeys(("AP50", "AP75", "APs", "APm", "APl")), "AP": 12.5}}
    assert numbers["iterations"] == 40 and numbers["images_per_second"] == 4  # 2 images in 0.5 s
    run = RunFolder(folder)
    assert numbers["dataset"] == run.dataset and numbers["images"] == len(run.records)
    run.cfg.SOLVER.ACCUMULATE = 2
    assert summary_section(run).numbers["images_per_second"] == 8


def test_a_logged_ap_is_not_that_of_a_later_evaluation(folder):
    """It may be of another dataset, such as one without annotations."""
    with (folder / "metrics.json").open("a") as file:
        file.write(json.dumps({"iteration": 79, "sem_seg/mIoU": 34.32}) + "\n")
    shutil.copy(folder / "config.yaml", folder / "inference")
    results_file(folder).unlink()
    numbers = summary_section(RunFolder(folder)).numbers
    assert numbers["scores"] == {} and "mIoU" not in numbers


def test_a_damaged_tag_costs_the_weights_alone(folder):
    (folder / "last_checkpoint").write_text("")
    numbers = summary_section(RunFolder(folder)).numbers
    assert "weights" not in numbers and numbers["iterations"] == 40


def test_pictures_show_images_with_objects(folder):
    run = RunFolder(folder, ReportOptions(images=2))
    first, *others = run.matches
    run.matches = [dataclasses.replace(first, found=[], kinds=[], taken=[], missed=[]), *others]
    assert first.image_id not in predictions_section(run).numbers
    run.matches = [dataclasses.replace(each, found=[], kinds=[], taken=[], missed=[]) for each in run.matches]
    assert len(predictions_section(run).numbers) == 2  # there is nothing else to show


@pytest.mark.parametrize("wrong", [{"images": 0}, {"iou": 1.5}, {"score": -0.1}, {"score": float("nan")}])
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"--{next(iter(wrong))}"):
        ReportOptions(**wrong)
