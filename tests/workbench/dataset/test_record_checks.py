"""Datasets that are Python functions: what Detectron2 would meet after the training is refused before it."""

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.structures import BoxMode
from PIL import Image

from gw_detectron.errors import CheckReport
from gw_detectron.workbench.dataset.record_checks import check_records

from ..sound_run import only_error

CLASSES = ["cat", "dog"]


def records(count=3, **changes):
    """Records of photos with an object each; a change is a value, or None for no such field."""
    made = []
    for number in range(count):
        record = {
            "file_name": f"{number}.png",
            "image_id": number,
            "height": 20,
            "width": 30,
        }
        record |= changes
        box = {"bbox": [2, 2, 9, 9], "bbox_mode": BoxMode.XYXY_ABS, "category_id": 1}
        record["annotations"] = [box]
        made.append(
            {name: value for name, value in record.items() if value is not None}
        )
    return made


def record_faults(found, classes, evaluated):
    """Return the errors and warnings of records."""
    report = CheckReport()
    check_records(found, classes, report, evaluated=evaluated)
    return report.errors, report.warnings


def test_sound_records_have_no_error():
    for evaluated in (False, True):
        assert record_faults(records(), CLASSES, evaluated=evaluated) == ([], [])
    without_id = records(image_id=None)
    assert record_faults(without_id, CLASSES, evaluated=False) == ([], [])
    semantic = [{"file_name": "a.png", "sem_seg_file_name": "b.png"}]
    assert record_faults(semantic, None, evaluated=True) == ([], [])


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"image_id": None}, "no image_id"),
        ({"image_id": 7}, "share their image_id"),
        ({"width": None}, "no width"),
        ({"file_name": None}, "no file_name"),
    ],
)
def test_fields_that_the_evaluation_reads(changes, word):
    (error,), _ = record_faults(records(**changes), CLASSES, evaluated=True)
    assert word in error


@pytest.mark.parametrize("category", [2, None])
def test_classes_that_detectron2_cannot_use(category):
    found = records()
    found[1]["annotations"][0]["category_id"] = category
    (error,), _ = record_faults(found, CLASSES, evaluated=False)
    assert "1 of 3 annotations have a category_id" in error


def test_rotated_boxes_are_a_warning():
    found = records()
    for record in found:
        record["annotations"][0]["bbox_mode"] = BoxMode.XYWHA_ABS
    errors, warnings = record_faults(found, CLASSES, evaluated=False)
    assert not errors and "bbox_mode" in warnings[0]


def test_no_records_and_no_classes():
    (error,), _ = record_faults([], CLASSES, evaluated=False)
    assert "no records" in error
    (error,), _ = record_faults(records(), None, evaluated=True)
    assert "thing_classes" in error


@pytest.fixture
def function_dataset(tmp_path):
    """Register records of photos in a folder under a name, for a test."""
    names = []

    def register(name, made):
        for record in made:
            path = tmp_path / record["file_name"]
            Image.new("RGB", (30, 20), (record["image_id"], 0, 0)).save(path)
            record["file_name"] = str(path)
        DatasetCatalog.register(name, lambda: made)
        MetadataCatalog.get(name).set(thing_classes=CLASSES, evaluator_type="coco")
        names.append(name)

    yield register
    for name in names:
        DatasetCatalog.pop(name)
        MetadataCatalog.pop(name)


def test_a_run_on_functions_is_checked(check, function_dataset):
    function_dataset("own_train", records())
    function_dataset("own_val", records(image_id=1))

    error = only_error(
        check(DATASETS__TRAIN=("own_train",), DATASETS__TEST=("own_val",))
    )
    assert "own_val" in error and "image_id" in error


def test_photos_of_the_training_are_told(check, function_dataset):
    function_dataset("own_train", records())
    function_dataset("own_val", records(2))

    report = check(DATASETS__TRAIN=("own_train",), DATASETS__TEST=("own_val",))
    assert not report.errors
    assert any("2 of 2 checked images are copies" in text for text in report.warnings)
