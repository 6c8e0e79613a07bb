"""COCO files: completed as small labeling tools write them, split by the names of images, derived on demand."""

import copy
import hashlib
import json

import pycocotools.mask as mask_util
import pytest
from detectron2.data.datasets import load_coco_json
from detectron2.structures import BoxMode

from gw_detectron.errors import DataError
from gw_detectron.workbench.dataset.coco_content import (
    complete_coco,
    content_to_records,
    records_to_content,
    split_coco,
)

NAMES = [f"2023/{number}.jpg" for number in range(2000)]
COMPLETE = {
    "images": [{"id": 7, "file_name": "a.jpg", "height": 40, "width": 60}],
    "categories": [{"id": 0, "name": "apple"}],
    "annotations": [
        {
            "id": 1,
            "image_id": 7,
            "category_id": 0,
            "bbox": [1, 2, 10, 5],
            "area": 33,
            "iscrowd": 0,
        },
        {
            "id": 2,
            "image_id": 7,
            "category_id": 0,
            "bbox": [20, 2, 30, 20],
            "area": 600.0,
            "iscrowd": 1,
        },
    ],
}


def changed(change):
    content = copy.deepcopy(COMPLETE)
    for each in content["annotations"]:
        change(each)
    return content


def test_area_and_iscrowd_follow_from_the_box():
    given = changed(lambda each: [each.pop(key) for key in ("area", "iscrowd")])
    given["annotations"][1]["iscrowd"] = None
    before = copy.deepcopy(given)
    completed = complete_coco(given)[0]
    assert given == before
    assert [(each["area"], each["iscrowd"]) for each in completed["annotations"]] == [
        (50.0, 0),
        (600.0, 0),
    ]


def test_ignored_objects_are_crowds():
    given = changed(lambda each: each.update(ignore=each["id"] == 1))
    first, second = complete_coco(given)[0]["annotations"]
    assert (first["ignore"], first["iscrowd"]) == (0, 1)
    assert second == {**COMPLETE["annotations"][1], "ignore": False}


@pytest.mark.parametrize(
    "number",
    [
        lambda old: old - 1,
        lambda old: -old,
        lambda old: old << 100,
        str,
        float,
        lambda old: None,
    ],
)
def test_annotations_are_numbered_from_1(number):
    renumbered = changed(lambda each: each.update(id=number(each["id"])))
    assert complete_coco(renumbered)[0] == COMPLETE
    assert complete_coco(changed(lambda each: each.pop("id")))[0] == COMPLETE


def test_a_validation_file_gets_the_categories_of_the_training():
    classes = {0: "apple", 3: "pear"}
    completed, notes = complete_coco(COMPLETE, classes)
    assert [category["name"] for category in completed["categories"]] == ["apple", "pear"]
    assert "no pear" in notes[0]
    assert complete_coco(completed, classes) == (completed, [])
    for other in ({}, {0: "apple"}, {0: "plum", 3: "pear"}, {3: "pear"}):
        assert complete_coco(COMPLETE, other)[0] is COMPLETE


@pytest.mark.parametrize(
    ("corners", "box"), [([1, 2, 4.1, 8], [1, 2, 4.1 - 1, 6]), ([1, 2, 3], [1, 2, 3])]
)
def test_a_python_functions_boxes_are_measured_exactly_and_a_malformed_one_is_left_to_preflight(
    corners, box
):
    entry = {"bbox": tuple(corners), "bbox_mode": BoxMode.XYXY_ABS, "category_id": 0}
    record = {
        "file_name": "a.jpg",
        "height": 20,
        "width": 30,
        "image_id": 1,
        "annotations": [entry],
    }
    (found,) = records_to_content([record], ["cat"], evaluated=False)["annotations"]
    assert found["bbox"] == box


DAMAGED = [
    [1],
    {"images": [{"id": 1}]},
    {"images": [{"id": 1, "file_name": 3}, None], "annotations": [3]},
    {
        "images": [{"id": 1, "file_name": "a"}, {"id": 2, "file_name": "b"}],
        "annotations": [{"bbox": "1 2 3 4"}],
    },
]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_malformed_file_is_left_to_preflight(damaged):
    assert complete_coco(damaged)[0] is damaged
    assert split_coco(damaged, 0.5) == (damaged, damaged)


def numbered(names, first_id=1):
    return {
        "info": {"year": 2023},
        "categories": [{"id": 1, "name": "cup"}],
        "images": [
            {"id": number, "file_name": name} for number, name in enumerate(names, first_id)
        ],
        "annotations": [
            {"id": 2 * number + extra, "image_id": number}
            for number, _ in enumerate(names, first_id)
            for extra in (0, 1)
        ],
    }


def names(part):
    return {image["file_name"] for image in part["images"]}


@pytest.mark.parametrize("fraction", [0.05, 0.9])
def test_the_hash_of_the_name_decides_and_objects_go_with_their_image(fraction):
    def place(name):
        return int(hashlib.sha256(name.encode()).hexdigest(), 16) / 16**64

    whole = numbered(NAMES)
    train, val = split_coco(copy.deepcopy(whole), fraction)
    assert names(val) == {name for name in NAMES if place(name) < fraction}
    assert names(train) == set(NAMES) - names(val)
    for part in (train, val):
        assert part["categories"] == whole["categories"] and part["info"] == whole["info"]
        assert {a["image_id"] for a in part["annotations"]} == {
            image["id"] for image in part["images"]
        }
    assert len(train["annotations"]) + len(val["annotations"]) == 4000


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_no_side_is_empty(fraction):
    for count in (2, 10):
        train, val = split_coco(numbered(NAMES[:count]), fraction)
        assert sorted((len(train["images"]), len(val["images"]))) == [1, count - 1]
    with pytest.raises(DataError, match="1 images"):
        split_coco(numbered(NAMES[:1]), fraction)


def test_records_are_those_of_detectron2(tmp_path):
    square = [2, 2, 12, 2, 12, 12, 2, 12]
    run_length = {"size": [40, 60], "counts": [40, 20, 2340]}
    masks = [
        [square],
        [square, [1, 2]],
        [[1, 2, 3, 4]],
        run_length,
        mask_util.frPyObjects([square], 40, 60)[0],
        [],
        None,
    ]
    annotations = [
        {
            "id": index + 1,
            "image_id": 5 - index % 2,
            "category_id": 9 - 2 * (index % 3),
            "bbox": [1, 2, 3, 4],
            "iscrowd": 0,
        }
        for index in range(len(masks))
    ]
    for annotation, mask in zip(annotations, masks, strict=True):
        if mask is not None:
            annotation["segmentation"] = mask
    annotations[0]["keypoints"] = [1, 2, 2, 3, 4, 0]
    annotations[4]["segmentation"]["counts"] = annotations[4]["segmentation"]["counts"].decode()
    content = {
        "images": [
            {"id": n, "file_name": f"{n}.jpg", "height": 40, "width": 60} for n in (5, 4, 3)
        ],
        "categories": [{"id": n, "name": str(n)} for n in (9, 5, 7)],
        "annotations": annotations,
    }
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))

    expected = load_coco_json(str(path), "photos", "test_records")
    assert content_to_records(content, "photos") == expected
