"""Fields that small labeling tools leave out, and annotations that pycocotools would miscount."""

import copy
import json

import pytest
from detectron2.data import DatasetCatalog
from detectron2.evaluation import COCOEvaluator
from detectron2.structures import Boxes, Instances
from torch import tensor

from gw_detectron.data import CocoDataset, CocoDatasets, register_datasets
from gw_detectron.data.coco_completion import complete_coco

COMPLETE = {
    "images": [{"id": 7, "file_name": "a.jpg", "height": 40, "width": 60}],
    "categories": [{"id": 0, "name": "apple"}],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 0, "bbox": [1, 2, 10, 5], "area": 33, "iscrowd": 0},
        {"id": 2, "image_id": 7, "category_id": 0, "bbox": [20, 2, 30, 20], "area": 600.0, "iscrowd": 1},
    ],
}


def changed(change):
    content = copy.deepcopy(COMPLETE)
    for each in content["annotations"]:
        change(each)
    return content


def test_a_complete_file_is_not_copied():
    assert complete_coco(COMPLETE) == (COMPLETE, "")
    assert complete_coco(COMPLETE)[0] is COMPLETE


def test_area_and_iscrowd_follow_from_the_box():
    def strip(each):
        del each["area"], each["iscrowd"]

    given = changed(strip)
    before = copy.deepcopy(given)
    completed, added = complete_coco(given)
    assert given == before
    assert [(each["area"], each["iscrowd"]) for each in completed["annotations"]] == [(50.0, 0), (600.0, 0)]
    assert added.startswith("2 of 2 annotations have no area (width times height of bbox is taken), 2 of 2 annotations")
    given = copy.deepcopy(COMPLETE)
    del given["annotations"][1]["iscrowd"]
    completed, added = complete_coco(given)
    assert [each["iscrowd"] for each in completed["annotations"]] == [0, 0] and added.startswith("1 of 2")
    assert [each["area"] for each in completed["annotations"]] == [33, 600.0]


@pytest.mark.parametrize("change", [lambda each: each.update(id=each["id"] - 1), lambda each: each.pop("id")])
def test_annotations_are_numbered_from_1(change):
    completed, added = complete_coco(changed(change))
    assert completed == COMPLETE and "not numbered from 1" in added


@pytest.mark.parametrize(
    "damaged",
    [
        [1],
        {"images": []},
        {"annotations": [3]},
        {"annotations": [{"bbox": [1, 2]}]},
        {"annotations": [{"bbox": "1 2 3 4"}]},
        {"annotations": [{"bbox": [1, 2, None, 4]}]},
        {"annotations": [{"id": 3, "area": 1, "iscrowd": 0}, {"area": 1, "iscrowd": 0}]},
    ],
)
def test_a_malformed_file_is_left_to_the_checks(damaged):
    assert complete_coco(damaged) == (damaged, "")


def test_a_completed_file_is_evaluated_as_a_complete_one(tmp_path):
    """Perfect detections have an AP of 100, also of an annotation that had the id 0."""

    def strip(each):
        del each["area"], each["iscrowd"]
        each["id"] -= 1

    source = tmp_path / "small.json"
    source.write_text(json.dumps(changed(strip)))
    found = register_datasets(CocoDatasets(val={"small_val": CocoDataset(str(source), str(tmp_path))}), str(tmp_path))
    assert found.val["small_val"].json == str(tmp_path / "datasets" / "small_val.json")
    assert not (tmp_path / "datasets").exists()  # before it is used
    (record,) = DatasetCatalog.get("small_val")
    evaluator = COCOEvaluator("small_val", tasks=("bbox",), distributed=False, use_fast_impl=False)
    evaluator.reset()
    boxes = Boxes(tensor([[1.0, 2, 11, 7], [20, 2, 50, 22]]))
    instances = Instances((40, 60), pred_boxes=boxes, scores=tensor([0.9, 0.8]), pred_classes=tensor([0, 0]))
    evaluator.process([record], [{"instances": instances}])
    assert evaluator.evaluate()["bbox"]["AP"] == pytest.approx(100)


def test_a_split_file_is_completed(tmp_path):
    content = changed(lambda each: each.pop("area"))
    content["images"].append({"id": 8, "file_name": "b.jpg", "height": 40, "width": 60})
    source = tmp_path / "all.json"
    source.write_text(json.dumps(content))
    given = CocoDatasets(train={"one_train": CocoDataset(str(source), str(tmp_path), 0.5)})
    for name in [*register_datasets(given, str(tmp_path)).train, "one_val"]:
        DatasetCatalog.get(name)
        part = json.loads((tmp_path / "datasets" / f"{name}.json").read_text())
        assert len(part["images"]) == 1 and all(each["area"] > 0 for each in part["annotations"])
