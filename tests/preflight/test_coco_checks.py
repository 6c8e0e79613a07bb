"""Malformed annotations are refused with the record, silently dropped ones are counted."""

import copy
import io
import json
import math
import time
from contextlib import redirect_stdout

import numpy as np
import pycocotools.mask as mask_util
import pytest
from detectron2.data import get_detection_dataset_dicts
from detectron2.data.datasets import load_coco_json
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from gw_detectron.errors import DataError
from gw_detectron.preflight.coco_checks import Use, check_coco

from .sound_run import coco_content

TRAIN, TEST = Use(training=True, masks=True), Use(training=False, masks=True)
HUGE, NAN = 10**400, math.nan
WRONG = [
    # list, index, changes, words
    ("images", 0, {"id": [1]}, "images[0]: id [1] is not of type int"),
    ("images", 1, {"id": None}, "images[1]: id None"),
    ("images", 1, {"id": {}}, "images[1]: id {}"),
    ("images", 1, {"id": "2"}, "images[1]: id '2' is not of type int"),
    ("images", 0, {"id": True}, "images[0]: id True"),
    ("images", 0, {"id": HUGE}, "images[0]: id "),
    ("images", 0, {"id": 2}, "images: duplicate id 2"),
    ("images", 0, {"file_name": 3}, "image 1: file_name 3"),
    ("images", 0, {"file_name": ""}, "image 1: file_name ''"),
    ("images", 0, {"file_name": "a\0.jpg"}, "image 1: file_name"),
    ("images", 0, {"height": "20"}, "image 1: height '20'"),
    ("images", 0, {"width": True}, "image 1: width True"),
    ("images", 0, {"width": HUGE}, "image 1: width 1000"),
    ("categories", 0, {"id": "9"}, "categories[0]: id '9'"),
    ("categories", 0, {"id": 2**60}, "categories[0]: id"),
    ("categories", 0, {"name": 3}, "category 9: name 3 is not a string"),
    ("annotations", 0, {"id": "1"}, "annotations[0]: id '1'"),
    ("annotations", 0, {"image_id": [1]}, "annotation 1: image_id [1] is not the id of one of the images"),
    ("annotations", 0, {"image_id": True}, "annotation 1: image_id True is not the id of one of the images"),
    ("annotations", 0, {"category_id": {}}, "annotation 1: category_id {} is not the id of one of the categories"),
    ("annotations", 0, {"bbox": [0, 0, HUGE, 1]}, "annotation 1: bbox"),
    ("annotations", 0, {"bbox": [0, 0, NAN, 1]}, "annotation 1: bbox"),
    ("annotations", 0, {"bbox": [True, 0, 1, 1]}, "annotation 1: bbox"),
    ("annotations", 0, {"bbox": "0,0,1,1"}, "annotation 1: bbox '0,0,1,1'"),
    ("annotations", 0, {"iscrowd": "0"}, "annotation 1: iscrowd '0' is not 0 or 1"),
    ("annotations", 0, {"ignore": 1}, "annotation 1: ignore 1 is not 0"),
    ("annotations", 0, {"segmentation": "polygon"}, "neither a list of polygons nor an RLE"),
    ("annotations", 0, {"segmentation": [[1, 2, "3", 4, 5, 6]]}, "neither a list of polygons nor an RLE"),
    ("annotations", 0, {"segmentation": []}, "annotation 1: segmentation [] is empty"),
    ("annotations", 0, {"segmentation": {"size": [20, 30]}}, "is not an RLE with size and counts"),
    ("annotations", 0, {"segmentation": {"size": [20, 30], "counts": [1, -1]}}, "is not an RLE"),
    ("annotations", 0, {"segmentation": {"size": [20, 30], "counts": "zz\n"}}, "is not an RLE"),
    ("annotations", 0, {"segmentation": {"size": [20, 30], "counts": [500, 99]}}, "counts of the RLE do not add up"),
    ("annotations", 0, {"segmentation": {"size": [30, 20], "counts": [600]}}, "size [30, 20] is not the image's"),
    ("annotations", 0, {"keypoints": [1, 2]}, "annotation 1: keypoints [1, 2] are not triples of numbers"),
    ("annotations", 0, {"keypoints": "many"}, "annotation 1: keypoints 'many'"),
]


@pytest.mark.parametrize(("kind", "index", "changes", "words"), WRONG)
@pytest.mark.parametrize("use", [TRAIN, TEST], ids=["training", "evaluation"])
def test_a_wrong_record_is_named(kind, index, changes, words, use):
    content = coco_content()
    content[kind][index].update(changes)
    with pytest.raises(DataError) as raised:
        check_coco(content, use)
    assert words in str(raised.value) and len(str(raised.value)) < 300


@pytest.mark.parametrize("use", [TRAIN, TEST, Use(True), Use(False)])
def test_sound_annotations_pass(use):
    content = coco_content()
    assert check_coco(content, use) == []
    for image, name in zip(content["images"], "ab", strict=True):  # names instead of numbers
        image["id"] = name
    for annotation, name in zip(content["annotations"], "ab", strict=True):
        annotation["image_id"] = name
    content["categories"][0]["id"] = content["annotations"][1]["category_id"] = -3
    assert check_coco(content, use) == []


def test_categories_of_one_name():
    """Detectron2 keeps one AP per name."""
    content = coco_content()
    content["categories"].append({**content["categories"][0], "id": 77})
    name = content["categories"][0]["name"]
    words = f"2 categories are named {name!r}: only one of their APs is listed. Fix: give each its own name."
    assert check_coco(content, TRAIN) == check_coco(content, TEST) == [words]


def test_keypoints_of_another_number():
    content, use = coco_content(), Use(True, keypoints=2)
    with pytest.raises(DataError, match="has no field 'keypoints'"):
        check_coco(content, use)
    for annotation in content["annotations"]:
        annotation["keypoints"] = [1, 2, 2] * 2
    assert check_coco(content, use) == []
    content["annotations"][1]["keypoints"] = [1, 2, 2]
    with pytest.raises(DataError, match="annotation 2: keypoints .* are not 6 numbers"):
        check_coco(content, use)


def test_run_lengths_need_the_mask_format_bitmask():
    content = coco_content()
    rle = mask_util.encode(np.asfortranarray(np.eye(20, 30, dtype=np.uint8)))
    content["annotations"][0]["segmentation"] = {"size": [20, 30], "counts": rle["counts"].decode()}
    assert check_coco(content, TRAIN) == []
    with pytest.raises(DataError, match="annotation 1: .* needs INPUT.MASK_FORMAT bitmask"):
        check_coco(content, TRAIN._replace(run_lengths=False))
    content["annotations"][0]["iscrowd"] = 1  # crowds are not trained on
    assert check_coco(content, TRAIN._replace(run_lengths=False)) == []


@pytest.mark.parametrize("seed", range(20))
def test_the_sum_of_compressed_run_lengths(seed):
    generator = np.random.default_rng(seed)
    height, width = generator.integers(1, 400, 2).tolist()
    rle = mask_util.encode(np.asfortranarray(generator.random((height, width)) < generator.random(), dtype=np.uint8))
    content = coco_content()
    content["images"][0].update(height=height, width=width)
    content["annotations"][0].update(bbox=[0, 0, 1, 1], segmentation={**rle, "counts": rle["counts"].decode()})
    assert check_coco(content, TRAIN) == []
    content["images"][0]["width"] += 1
    content["annotations"][0]["segmentation"]["size"] = [height, width + 1]
    with pytest.raises(DataError, match="do not add up"):  # pycocotools would decode it to random pixels
        check_coco(content, TRAIN)


BAD_BOXES = {
    "boxes without area": [[2, 2, 0, 5], [2, 2, 5, -1]],
    "boxes outside of their image": [[-9, 2, 5, 5], [30, 2, 5, 5], [2, 20, 5, 5]],
}


@pytest.mark.parametrize(("reason", "box"), [(reason, box) for reason, boxes in BAD_BOXES.items() for box in boxes])
def test_boxes_that_cannot_be_learned(reason, box):
    content = coco_content()
    content["annotations"][1]["bbox"] = box
    assert f"1 objects are {reason} (ids 2); they are not trained on" in check_coco(content, TRAIN)[0]
    assert "no detection can match" in check_coco(content, TEST)[0]
    content["annotations"][0]["bbox"] = box
    with pytest.raises(DataError, match=f"{reason}, so there is nothing to learn"):
        check_coco(content, TRAIN)


@pytest.mark.parametrize("use", [TRAIN, TEST])
def test_normalized_boxes(use):
    content = coco_content()
    boxes = [[0.5, 0.2, 0.25, 0.125], [0, 0, 1, 1], [1, 1, 5, 5]]
    content["annotations"] = [{**content["annotations"][0], "id": n, "bbox": box} for n, box in enumerate(boxes, 1)]
    with pytest.raises(DataError, match="2 of 3 boxes have no number above 1: bbox looks normalized by the size"):
        check_coco(content, use)
    content["annotations"] = content["annotations"][1:]
    check_coco(content, use)


@pytest.mark.parametrize("use", [TRAIN, TEST])
def test_boxes_of_two_corners(use):
    content = coco_content()
    boxes = [[15, 2, 25, 12], [2, 12, 12, 19.5], [1, 1, 5, 5]]  # the last one fits either way
    content["annotations"] = [{**content["annotations"][0], "id": n, "bbox": box} for n, box in enumerate(boxes, 1)]
    with pytest.raises(DataError, match="2 of 3 boxes leave their image: bbox looks like x1 y1 x2 y2. Fix: "):
        check_coco(content, use)
    content["annotations"][0]["bbox"] = [15, 2, 10, 10]
    assert check_coco(content, use) == []


def test_boxes_that_leave_the_image_are_not_corners():
    content = coco_content()
    for annotation in content["annotations"]:
        annotation["bbox"] = [15, 12, 16, 8]  # one pixel too wide: rounding
    assert check_coco(content, TRAIN) == []
    for annotation in content["annotations"]:
        annotation["bbox"] = [20, 2, 15, 10]  # cut off at the border; x2 would be left of x1
    assert check_coco(content, TRAIN) == []


def test_objects_that_detectron2_drops_are_counted(tmp_path):
    content = coco_content()
    content["annotations"][0]["segmentation"] = [[1, 2, 3, 4]]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content))
    with redirect_stdout(io.StringIO()):
        assert [len(record["annotations"]) for record in load_coco_json(str(path), "")] == [0, 1]
    assert "1 objects are without a polygon of at least three points (ids 1)" in check_coco(content, Use(True))[0]


@pytest.mark.parametrize(("number", "found"), [(0, 0.0), (7, 1.0)])
def test_annotation_0_counts_as_a_miss(number, found):
    content = coco_content()
    content["annotations"] = [{**content["annotations"][0], "id": number}]
    assert (number == 0) == ("annotation 0: " in " ".join(check_coco(content, TEST)))
    truth = COCO()
    truth.dataset = copy.deepcopy(content)
    with redirect_stdout(io.StringIO()):
        truth.createIndex()
        result = truth.loadRes([{**content["annotations"][0], "score": 1.0}])
        evaluation = COCOeval(truth, result, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    assert evaluation.stats[0] == pytest.approx(found)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "\ufeff{}", '{"a": ' + "9" * 5000 + "}", "\x1f\x8b", "", "null", "[]", '"x"', "NaN"]
)
def test_text_that_is_no_annotation_file(check, coco, text):
    coco(text)
    problem = check(DATASETS__TEST=("tiny_coco",)).problems[0]
    assert "tiny.json'" in problem and "Fix: " in problem


def test_bytes_that_are_no_text(check, coco):
    coco().write_bytes(b"\x1f\x8b\x08\x00\xff\xfe")
    assert "in UTF-8, not compressed" in check().problems[0]


def test_keypoints_of_a_dataset_without_names(check):
    problem = " ".join(check(MODEL__KEYPOINT_ON=True, MODEL__ROI_KEYPOINT_HEAD__NUM_KEYPOINTS=17).problems)
    assert "has no field 'keypoints'" in problem


@pytest.mark.parametrize(("visibility", "least", "trained"), [(0, 1, 0), (2, 1, 2), (1, 3, 0), (0, 0, 2)])
def test_images_without_enough_visible_keypoints(check, coco, content, visibility, least, trained):
    for annotation in content["annotations"]:
        annotation |= {"keypoints": [5, 5, visibility] * 2, "num_keypoints": 2 * (visibility > 0)}
    coco()
    head = {"MODEL__ROI_KEYPOINT_HEAD__NUM_KEYPOINTS": 2, "MODEL__ROI_KEYPOINT_HEAD__MIN_KEYPOINTS_PER_IMAGE": least}
    problems = " ".join(check(MODEL__KEYPOINT_ON=True, **head).problems)
    assert ("MIN_KEYPOINTS_PER_IMAGE" in problems) == (not trained)
    if trained:
        assert len(get_detection_dataset_dicts("tiny_coco", min_keypoints=least)) == trained
    else:
        assert f"tiny.json': no image has more than {2 * (visibility > 0)} visible keypoints, fewer than" in problems
        with pytest.raises(AssertionError, match="No valid data found"):
            get_detection_dataset_dicts("tiny_coco", min_keypoints=least)


def test_classes_that_were_registered_differently(check, coco):
    from detectron2.data import MetadataCatalog

    coco()
    MetadataCatalog.get("tiny_coco").thing_classes = ["cat", "horse"]
    assert all("differ from thing_classes" in problem for problem in check().problems)


def test_a_hundred_thousand_annotations_take_seconds():
    content = coco_content()
    content["annotations"] = [{**content["annotations"][0], "id": number} for number in range(1, 100_001)]
    start = time.process_time()
    assert check_coco(content, TRAIN) == []
    assert time.process_time() - start < 10
