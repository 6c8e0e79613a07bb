"""Annotations that are right in form and lose AP in silence: refused, or counted in a warning."""

import copy

import numpy as np
import pycocotools.mask as mask_util
import pytest

from gw_detectron.workbench.dataset.annotation_checks import DatasetNeeds, check_coco
from gw_detectron.workbench.dataset.coco_content import complete_coco
from gw_detectron.workbench.dataset.geometry import mask_boxes

TRAIN, TEST = DatasetNeeds(training=True, masks=True), DatasetNeeds(training=False, masks=True)
HEIGHT, WIDTH, COUNT = 240, 320, 20


def polygon(x, y, width, height):
    return [x, y, x + width, y, x + width, y + height, x, y + height]


def run_length(x, y, width, height, size=(HEIGHT, WIDTH)):
    mask = np.zeros(size, np.uint8, order="F")
    mask[y : y + height, x : x + width] = 1
    rle = mask_util.encode(mask)
    return {"size": list(size), "counts": rle["counts"].decode()}


def objects(change=None, first=0):
    """Twenty rectangles; ``change`` gets those from ``first`` on, and their box."""
    content = {
        "images": [{"id": 1, "file_name": "a.jpg", "height": HEIGHT, "width": WIDTH}],
        "categories": [{"id": 1, "name": "cell"}],
        "annotations": [],
    }
    for number in range(COUNT):
        box = [10 + 45 * (number % 5), 20 + 50 * (number // 5), 20 + number, 32]
        each = {
            "id": number + 1,
            "image_id": 1,
            "category_id": 1,
            "iscrowd": 0,
            "area": box[2] * box[3],
            "bbox": box,
        }
        each |= {
            "segmentation": [polygon(*box)],
            "keypoints": [box[0] + 3, box[1] + 4, 2, 0, 0, 0],
            "num_keypoints": 1,
        }
        if change and number >= first:
            each |= change(*box)
        content["annotations"].append(each)
    return content


def test_masks_are_measured_as_pycocotools_does():
    boxes = [(3, 4, 50, 60), (0, 0, 7, 9), (100, 30, 1, 20)]
    plain = {"size": [HEIGHT, WIDTH], "counts": [HEIGHT * 2 + 5, 11, HEIGHT * (WIDTH - 2) - 16]}
    masks = [
        [polygon(*boxes[0]), polygon(60, 70, 5, 6)],
        [],
        *(run_length(*box) for box in boxes),
        plain,
        None,
    ]
    found, areas = mask_boxes(masks, [(HEIGHT, WIDTH)] * len(masks))
    assert found[0].tolist() == [3, 4, 65, 76] and areas[0] == 3000 + 30
    assert np.isnan(areas[[1, 6]]).all() and np.isnan(found[[1, 6]]).all()
    for index, (x, y, width, height) in enumerate(boxes, 2):
        assert (
            found[index].tolist() == [x, y, x + width, y + height]
            and areas[index] == width * height
        )
    assert found[5].tolist() == [2, 5, 3, 16] and areas[5] == 11
    assert set(mask_boxes([run_length(*boxes[0])] * 300, [(HEIGHT, WIDTH)] * 300)[1]) == {3000}


# a change of objects, and a word of the error
REFUSED = {
    "polygons of the photo four times as large": (
        lambda *b: {"segmentation": [polygon(*(4 * v for v in b))]},
        "mask",
    ),
    "the center of the box": (
        lambda x, y, w, h: {"bbox": [x + w / 2, y + h / 2, w, h]},
        "mask far",
    ),
    "an RLE without a pixel": (
        lambda *b: {"segmentation": run_length(0, 0, 0, 0)},
        "empty mask",
    ),
    "y and x exchanged": (lambda x, y, w, h: {"bbox": [y, x, h, w]}, "mask far"),
    "corners inside of the image": (
        lambda x, y, w, h: {"bbox": [x, y, x + w, y + h]},
        "x1 y1 x2 y2",
    ),
    "points on a line": (
        lambda x, y, *_: {"segmentation": [[x, y, x + 9, y, x + 5, y, x + 2, y]]},
        "empty mask",
    ),
    "an RLE of the transposed image": (
        lambda *b: {"segmentation": run_length(*b, (WIDTH, HEIGHT))},
        "another size",
    ),
    "one flat list": (lambda *b: {"segmentation": polygon(*b)}, "flat list"),
    "not a number": (
        lambda *b: {"segmentation": [[float("nan"), *polygon(*b)[1:]]]},
        "flat list",
    ),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("needs", [TRAIN, TEST], ids=["training", "evaluation"])
def test_masks_and_boxes_that_contradict_each_other_are_refused(change, words, needs):
    content = objects(change, first=COUNT // 2)
    errors, _ = check_coco(content, needs)
    errors = [error for error in errors if "an area" not in error]  # which may follow
    assert len(errors) == 1 and words in errors[0] and f"{COUNT // 2} of {COUNT}" in errors[0]


def test_few_contradictions_are_a_warning():
    errors, (warning,) = check_coco(
        objects(REFUSED["the center of the box"][0], first=COUNT - 1), TRAIN
    )
    assert not errors and f"1 of {COUNT}" in warning and "ids 20" in warning


ACCEPTED = {
    "rectangles": lambda *b: {},
    "run lengths": lambda *b: {"segmentation": run_length(*b)},
    "rounded boxes": lambda x, y, w, h: {"bbox": [x + 0.7, y - 0.8, w - 1, h + 1]},
    "loose boxes": lambda x, y, w, h: {
        "bbox": [x - 4, y - 3, w + 6, h + 5],
        "area": (w + 6) * (h + 5),
    },
    "a third of the box": lambda x, y, w, h: {
        "segmentation": [[x, y, x + w, y + h, x + w, y + h / 3]]
    },
    "boxes alone": lambda *b: {"segmentation": [], "area": 90},
}


@pytest.mark.parametrize("change", ACCEPTED.values(), ids=ACCEPTED)
def test_what_tools_and_people_write_passes(change):
    content = objects(change)
    masks = bool(content["annotations"][0]["segmentation"])
    for needs in (TRAIN, TEST):
        assert check_coco(content, needs._replace(masks=masks, keypoints=2)) == ([], [])
    assert complete_coco(content)[0] is content


@pytest.mark.parametrize(
    "mask", [[[]], [[1, 1, 9, 1]], [1, 1, 9, 1, 9, 9], [[[1, 1], [9, 1], [9, 9]]]]
)
@pytest.mark.parametrize("needs", [TRAIN, TEST], ids=["training", "evaluation"])
def test_polygons_that_cost_detectron2_the_box_are_told_without_masks(mask, needs):
    errors, warnings = check_coco(
        objects(lambda *b: {"segmentation": mask}, COUNT - 3), needs._replace(masks=False)
    )
    (text,) = errors + warnings
    assert text.startswith(f"3 of {COUNT}") and "polygon" in text


WARNED = {
    "brush masks of CVAT": (
        lambda *b: {"segmentation": run_length(*b), "iscrowd": 1},
        8,
        "iscrowd 1",
    ),
    "polygons of crowds": (lambda *b: {"iscrowd": 1}, 8, "iscrowd 1"),
    "one box for all": (lambda *b: {"bbox": [1, 1, 310, 230], "area": 71300}, 19, "smaller"),
    "twice": (
        lambda *b: {"bbox": [10, 20, 20, 32], "segmentation": [polygon(10, 20, 20, 32)]},
        19,
        "repeat the bbox",
    ),
    "over the border": (
        lambda x, y, w, h: {"bbox": [x, y, WIDTH, h], "segmentation": []},
        18,
        "leaves their image",
    ),
}


@pytest.mark.parametrize(("change", "first", "words"), WARNED.values(), ids=WARNED)
def test_what_may_be_meant_is_counted(change, first, words):
    errors, warnings = check_coco(objects(change, first), TRAIN._replace(masks=words[0] != "l"))
    assert not errors and any(
        words in warning and f" of {COUNT} annotations" in warning for warning in warnings
    )


AREAS = {
    "normalized": lambda x, y, w, h: w * h / (WIDTH * HEIGHT),
    "negative": lambda x, y, w, h: -w * h,
    "of the photo twice as large": lambda x, y, w, h: 4 * w * h,
    "null": lambda *b: None,
}


@pytest.mark.parametrize("area", AREAS.values(), ids=AREAS)
@pytest.mark.parametrize("masks", [True, False])
def test_areas_that_the_geometry_refutes(area, masks):
    content = objects(
        lambda *b: {"area": area(*b)} | ({} if masks else {"segmentation": []}),
        first=COUNT // 2,
    )
    before = copy.deepcopy(content)
    errors, _ = check_coco(content, TEST._replace(masks=masks))
    assert any("area" in error for error in errors)
    assert check_coco(content, TRAIN._replace(masks=masks))[0] == []
    completed, notes = complete_coco(content)
    assert content == before
    assert [each["area"] for each in completed["annotations"]] == [
        each["area"] for each in objects()["annotations"]
    ]
    assert f"{COUNT // 2} of {COUNT}" in notes[0]
    assert check_coco(completed, TEST._replace(masks=masks)) == ([], [])


KEYPOINTS = {
    "num_keypoints 0": {"num_keypoints": 0},
    "no num_keypoints": {"num_keypoints": None},
    "an empty list": {"keypoints": []},
    "null": {"keypoints": None, "num_keypoints": 3},
}


@pytest.mark.parametrize("changes", KEYPOINTS.values(), ids=KEYPOINTS)
def test_keypoints_are_counted(changes):
    content = objects(lambda *b: changes, first=COUNT // 2)
    needs = TEST._replace(keypoints=2)
    if changes.get("keypoints", True) is not None:
        assert check_coco(content, needs)[0]
    completed = complete_coco(content)[0]
    assert check_coco(completed, needs) == ([], [])
    assert completed["annotations"][-1]["num_keypoints"] == (0 if "keypoints" in changes else 1)


def test_another_number_of_keypoints_and_keypoints_outside_of_their_box():
    assert "NUM_KEYPOINTS" in check_coco(objects(), TRAIN._replace(keypoints=3))[0][0]
    for place in ([0.2, 0.3, 2, 0, 0, 0], [300, 200, 1, 310, 210, 2], [900, 800, 2, 30, 40, 1]):
        (error,), _ = check_coco(
            objects(lambda *b, place=place: {"keypoints": place}, 9),
            TRAIN._replace(keypoints=2),
        )
        assert "keypoints outside" in error
    crowd = objects(
        lambda *b: {"keypoints": [300, 200, 2, 0, 0, 0], "num_keypoints": 9, "iscrowd": 1},
        COUNT - 3,
    )
    for needs in (TRAIN, TEST):
        assert not check_coco(crowd, needs._replace(keypoints=2))[0]


def test_a_completion_says_what_it_replaced(content):
    wrong = [annotation | {"area": 0} for annotation in content["annotations"]]
    notes = complete_coco({**content, "annotations": wrong})[1]
    assert len(notes) == 1
    assert "2 of 2 annotations have a wrong area" in notes[0]
