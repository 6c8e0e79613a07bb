"""COCO files: completed as labeling tools write them, split by file names, converted to records."""

import copy
import hashlib
import json

import pycocotools.mask as mask_util
import pytest
from detectron2.data.datasets import load_coco_json

from gw_detectron.errors import DataError
from gw_detectron.workbench.dataset.coco_content import (
    complete_coco,
    content_to_records,
    read_json,
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


@pytest.fixture
def complete():
    return copy.deepcopy(COMPLETE)


def test_area_and_iscrowd_follow_from_the_box(complete):
    for annotation in complete["annotations"]:
        del annotation["area"], annotation["iscrowd"]
    complete["annotations"][1]["iscrowd"] = None
    before = copy.deepcopy(complete)

    first, second = complete_coco(complete)[0]["annotations"]

    assert (first["area"], first["iscrowd"]) == (50.0, 0)
    assert (second["area"], second["iscrowd"]) == (600.0, 0)
    assert complete == before


@pytest.mark.parametrize(
    "flags",
    [
        ("0", "1"),
        ("false", "True"),
        ("", 2),
        (0.0, "yes"),
        (float("nan"), " Y"),
        ("0.00", "1.0"),
        ("None", True),
        ("N", "t"),
    ],
)
def test_flags_are_read_as_tools_write_them(complete, flags):
    for annotation, flag in zip(complete["annotations"], flags, strict=True):
        annotation["iscrowd"] = flag

    assert complete_coco(complete)[0] == COMPLETE


@pytest.mark.parametrize("area", [10**400, float("inf"), "33", [33], None])
def test_an_area_that_is_no_number_is_replaced(complete, area):
    complete["annotations"][0]["area"] = area

    completed, _ = complete_coco(complete)

    assert completed["annotations"][0]["area"] == 50.0


def test_ignored_objects_are_crowds(complete):
    ignored, other = complete["annotations"]
    ignored["ignore"] = True
    other["ignore"] = False

    first, second = complete_coco(complete)[0]["annotations"]

    assert (first["ignore"], first["iscrowd"]) == (0, 1)
    assert second == other


@pytest.mark.parametrize(
    "numbers", [(0, 1), (-1, -2), (1 << 100, 2), ("1", "2"), (1.0, 2.0), (4, 4)]
)
def test_annotations_are_numbered_from_1(complete, numbers):
    for annotation, number in zip(complete["annotations"], numbers, strict=True):
        annotation["id"] = number

    completed, _ = complete_coco(complete)

    assert completed == COMPLETE
    assert {type(annotation["id"]) for annotation in completed["annotations"]} == {int}


def test_annotations_without_an_id_are_numbered_from_1(complete):
    first, second = complete["annotations"]
    first["id"] = None
    del second["id"]

    assert complete_coco(complete)[0] == COMPLETE


def test_whole_sizes_of_images_become_integers(complete):
    complete["images"][0] |= {"height": 40.0, "width": 60.0}
    before = copy.deepcopy(complete)

    completed, notes = complete_coco(complete)

    assert completed == COMPLETE
    (image,) = completed["images"]
    assert (type(image["height"]), type(image["width"])) == (int, int)
    assert notes == []
    assert complete == before


def test_a_validation_file_gets_the_categories_of_the_training():
    classes = {0: "apple", 3: "pear"}

    completed, (note,) = complete_coco(COMPLETE, classes)

    names = [category["name"] for category in completed["categories"]]
    assert names == ["apple", "pear"]
    assert "no pear" in note
    assert complete_coco(completed, classes) == (completed, [])


@pytest.mark.parametrize(
    "classes", [{}, {0: "apple"}, {0: "plum", 3: "pear"}, {3: "pear"}]
)
def test_a_file_with_other_categories_than_the_training_stays(classes):
    assert complete_coco(COMPLETE, classes)[0] is COMPLETE


DAMAGED = [
    [1],
    {"images": [{"id": 1}]},
    {"images": [{"id": 1, "file_name": 3}, None], "annotations": [3]},
    {
        "images": [{"id": 1, "file_name": "a"}, {"id": 2, "file_name": "b"}],
        "annotations": [{"bbox": "1 2 3 4"}],
    },
    {
        "images": [{"id": 1, "file_name": "a"}, {"id": 2, "file_name": "b"}],
        "annotations": [{"image_id": [1]}],
    },
]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_malformed_file_is_left_to_the_checks(damaged):
    assert complete_coco(damaged)[0] is damaged
    assert split_coco(damaged, 0.5) == (damaged, damaged)


def two_objects_each(names):
    """Return a file of images with these names and two objects in each."""
    images = []
    annotations = []
    for number, name in enumerate(names, 1):
        images.append({"id": number, "file_name": name})
        annotations.append({"id": 2 * number, "image_id": number})
        annotations.append({"id": 2 * number + 1, "image_id": number})
    return {
        "info": {"year": 2023},
        "categories": [{"id": 1, "name": "cup"}],
        "images": images,
        "annotations": annotations,
    }


def hash_of(name):
    """Return a number from 0 to 1."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) / 16**64


@pytest.mark.parametrize("fraction", [0.05, 0.9])
def test_the_hash_of_the_name_decides_and_objects_go_with_their_image(fraction):
    whole = two_objects_each(NAMES)

    train, val = split_coco(copy.deepcopy(whole), fraction)

    def is_val(image):
        return hash_of(image["file_name"]) < fraction

    assert val["images"] == [image for image in whole["images"] if is_val(image)]
    assert train["images"] == [image for image in whole["images"] if not is_val(image)]
    for part in (train, val):
        assert part["categories"] == whole["categories"]
        assert part["info"] == whole["info"]
        owners = {annotation["image_id"] for annotation in part["annotations"]}
        assert owners == {image["id"] for image in part["images"]}
        assert len(part["annotations"]) == 2 * len(part["images"])


@pytest.mark.parametrize("fraction", [0.001, 0.999])
@pytest.mark.parametrize("count", [2, 10])
def test_no_side_is_empty(fraction, count):
    train, val = split_coco(two_objects_each(NAMES[:count]), fraction)

    sizes = [len(train["images"]), len(val["images"])]
    assert sorted(sizes) == [1, count - 1]


def test_one_image_cannot_be_split():
    with pytest.raises(DataError, match="images with 1 different file names"):
        split_coco(two_objects_each(NAMES[:1]), 0.5)


@pytest.mark.parametrize(
    "mask",
    [
        {"size": [10**6, 10**6], "counts": "PPP"},
        {"size": [40, 60], "counts": [10**12]},
        {"size": [40, 60], "counts": [2401, -1]},
        {"size": None, "counts": "1"},
        "text",
        7,
    ],
)
def test_a_mask_of_another_image_is_left_out(complete, mask):
    complete["annotations"][0]["segmentation"] = mask

    (record,) = content_to_records(complete, "photos")

    assert "segmentation" not in record["annotations"][0]


@pytest.mark.parametrize(
    "changes", [{"keypoints": 5}, {"keypoints": ["a"]}, {"category_id": 9}]
)
def test_a_malformed_annotation_has_no_record(complete, changes):
    complete["annotations"][1] |= changes

    with pytest.raises(DataError, match="not in COCO format at {'id': 2"):
        content_to_records(complete, "photos")


def test_records_are_those_of_detectron2(tmp_path):
    square = [2, 2, 12, 2, 12, 12, 2, 12]
    compressed = mask_util.frPyObjects([square], 40, 60)[0]
    compressed["counts"] = compressed["counts"].decode()
    masks = [
        [square],
        [square, [1, 2]],
        [[1, 2, 3, 4]],
        {"size": [40, 60], "counts": [40, 20, 2340]},
        compressed,
        [],
    ]
    annotations = [{}, *({"segmentation": mask} for mask in masks)]
    annotations[1]["keypoints"] = [1, 2, 2, 3, 4, 0]
    for index, annotation in enumerate(annotations):
        annotation |= {
            "id": index + 1,
            "image_id": 5 - index % 2,
            "category_id": 9 - 2 * (index % 3),
            "bbox": [1, 2, 3, 4],
            "iscrowd": 0,
        }
    size = {"height": 40, "width": 60}
    content = {
        "images": [{"id": n, "file_name": f"{n}.jpg", **size} for n in (5, 4, 3)],
        "categories": [{"id": n, "name": str(n)} for n in (9, 5, 7)],
        "annotations": annotations,
    }
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))

    expected = load_coco_json(str(path), "photos", "test_records")
    assert content_to_records(content, "photos") == expected


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"\n<!DOCTYPE html><html>Sign in</html>", "a web page"),
        (b"<?xml version='1.0'?>\n<!-- x --><Error>", "a web page"),
    ],
)
def test_a_json_that_is_another_file_is_told_by_its_kind(tmp_path, content, kind):
    path = tmp_path / "a.json"
    path.write_bytes(content)

    with pytest.raises(DataError, match=f"a.json': not a json: .*{kind}"):
        read_json(str(path))


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        ('{"shapes": [], "imagePath": "a.jpg"}', "shapes, imagePath"),
        ("{}", "none"),
        ("null", "none"),
        ("[]", "none"),
    ],
)
def test_another_format_is_told_by_its_keys(tmp_path, content, keys):
    path = tmp_path / "a.json"
    path.write_text(content)

    with pytest.raises(DataError, match=f"no list images .its keys: {keys}.* Fix: "):
        read_json(str(path))


def test_a_csv_is_told_what_can_be_read(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("filename,class\na.jpg,cat\n")

    with pytest.raises(
        DataError, match=r"not a json\. Fix: give a COCO json, or labels"
    ):
        read_json(str(path))


@pytest.mark.parametrize("content", [b"{'a': 1}", b"[<html>]", b"{", b"!"])
def test_a_broken_json_is_no_web_page(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)

    with pytest.raises(DataError, match="invalid JSON"):
        read_json(str(path))
