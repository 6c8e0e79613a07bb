"""Annotations that are right in form and lose AP in silence: refused, or counted in a warning."""

import copy

import numpy as np
import pycocotools.mask as mask_util
import pytest

from gw_detectron.errors import DataError
from gw_detectron.workbench.dataset.annotation_checks import DatasetNeeds
from gw_detectron.workbench.dataset.coco_content import complete_coco
from gw_detectron.workbench.dataset.geometry import is_run_length, mask_boxes

from ..sound_run import coco_faults

TRAIN = DatasetNeeds(training=True, masks=True)
TEST = DatasetNeeds(training=False, masks=True)
KEYPOINT_TRAIN = TRAIN._replace(keypoints=2)
KEYPOINT_TEST = TEST._replace(keypoints=2)
NEEDS = pytest.mark.parametrize("needs", [TRAIN, TEST], ids=["training", "evaluation"])
HEIGHT = 240
WIDTH = 320
COUNT = 20


def polygon(x, y, width, height):
    right = x + width
    bottom = y + height
    return [x, y, right, y, right, bottom, x, bottom]


def run_length(x, y, width, height, size=(HEIGHT, WIDTH)):
    mask = np.zeros(size, np.uint8, order="F")
    mask[y : y + height, x : x + width] = 1
    rle = mask_util.encode(mask)
    rle["counts"] = rle["counts"].decode()
    return rle


def cut_run_length(*box):
    rle = run_length(*box)
    rle["counts"] = rle["counts"][:-1]
    return rle


def objects(change=None, first=0):
    """Return twenty rectangles; ``change`` returns other fields by the box, from ``first`` on."""
    annotations = []
    for number in range(COUNT):
        x = 10 + 45 * (number % 5)
        y = 20 + 50 * (number // 5)
        box = [x, y, 20 + number, 32]
        annotation = {
            "id": number + 1,
            "image_id": 1,
            "category_id": 1,
            "iscrowd": 0,
            "area": box[2] * 32,
            "bbox": box,
            "segmentation": [polygon(*box)],
            "keypoints": [x + 3, y + 4, 2, 0, 0, 0],
            "num_keypoints": 1,
        }
        if change and number >= first:
            annotation |= change(*box)
        annotations.append(annotation)
    return {
        "images": [{"id": 1, "file_name": "a.jpg", "height": HEIGHT, "width": WIDTH}],
        "categories": [{"id": 1, "name": "cell"}],
        "annotations": annotations,
    }


def has_masks(content):
    last = content["annotations"][-1]
    return bool(last["segmentation"])


def test_masks_are_measured_as_pycocotools_does():
    two_polygons = [polygon(3, 4, 50, 60), polygon(60, 70, 5, 6)]
    block = run_length(3, 4, 50, 60)
    corner = run_length(0, 0, 7, 9)
    column = run_length(100, 30, 1, 20)
    plain = {
        "size": [HEIGHT, WIDTH],
        "counts": [HEIGHT * 2 + 5, 11, HEIGHT * (WIDTH - 2) - 16],
    }
    masks = [two_polygons, [], block, corner, column, plain, None]

    outlines, areas = mask_boxes(masks, [(HEIGHT, WIDTH)] * len(masks))

    none = [np.nan] * 4
    expected = [
        [3, 4, 65, 76],
        none,
        [3, 4, 53, 64],
        [0, 0, 7, 9],
        [100, 30, 101, 50],
        [2, 5, 3, 16],
        none,
    ]
    np.testing.assert_array_equal(outlines, expected)
    np.testing.assert_array_equal(areas, [3030, np.nan, 3000, 63, 20, 11, np.nan])

    many = mask_boxes([block] * 300, [(HEIGHT, WIDTH)] * 300)[1]
    assert set(many) == {3000}


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
    "an RLE that is no text of counts": (
        lambda *b: {"segmentation": {"size": [HEIGHT, WIDTH], "counts": "~~~~" * 99}},
        "damaged",
    ),
    "an RLE without its end": (
        lambda *b: {"segmentation": cut_run_length(*b)},
        "damaged",
    ),
    "one flat list": (lambda *b: {"segmentation": polygon(*b)}, "flat list"),
    "more pixels than memory has": (
        lambda *b: {"segmentation": [[*polygon(*b), 1e9, 1e9]]},
        "up to 1e6",
    ),
    "not a number": (
        lambda *b: {"segmentation": [[float("nan"), *polygon(*b)[1:]]]},
        "flat list",
    ),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
@NEEDS
def test_masks_and_boxes_that_contradict_each_other_are_refused(change, words, needs):
    content = objects(change, first=10)

    errors, _ = coco_faults(content, needs)

    errors = [error for error in errors if "an area" not in error]  # which may follow
    assert len(errors) == 1
    assert "10 of 20" in errors[0]
    assert words in errors[0]


def test_few_contradictions_are_a_warning():
    change, _ = REFUSED["the center of the box"]

    errors, (warning,) = coco_faults(objects(change, first=COUNT - 1), TRAIN)

    assert not errors
    assert "1 of 20" in warning
    assert "ids 20" in warning


ACCEPTED = {
    "outlines of turned boxes": lambda *b: {"attributes": {"rotation": 30.0}},
    "attributes that turn nothing": lambda *b: {
        "segmentation": [],
        "attributes": {"rotation": 0.0},
    },
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
    "boxes without masks": lambda *b: {"segmentation": [], "area": 90},
}


@pytest.mark.parametrize("change", ACCEPTED.values(), ids=ACCEPTED)
@NEEDS
def test_annotations_as_tools_and_people_write_them_pass(change, needs):
    content = objects(change)
    needs = needs._replace(masks=has_masks(content), keypoints=2)

    assert coco_faults(content, needs) == ([], [])
    assert complete_coco(content)[0] is content


@pytest.mark.parametrize("height", [HEIGHT + 0.5, float(HEIGHT)])
@NEEDS
def test_sizes_of_images_that_are_no_integers_are_refused(height, needs):
    content = objects()
    content["images"][0]["height"] = height

    with pytest.raises(DataError, match=f"image 1: width and .*{WIDTH}, {height}"):
        coco_faults(content, needs)
    assert coco_faults(content, needs._replace(masks=False)) == ([], [])
    if height == HEIGHT:
        completed, _ = complete_coco(content)
        assert coco_faults(completed, needs) == ([], [])


def test_run_lengths_of_any_counts_are_accepted():
    random = np.random.default_rng(0)
    for share in (0, 0.01, 0.5, 1):
        mask = np.asfortranarray(random.random((90, 70)) < share, np.uint8)
        rle = mask_util.encode(mask)
        rle["counts"] = rle["counts"].decode()

        assert is_run_length(rle, (90, 70))


@pytest.mark.parametrize("flag", ["maybe", [1]])
@pytest.mark.parametrize("field", ["iscrowd", "ignore"])
@NEEDS
def test_flags_that_are_neither_set_nor_unset_are_refused(flag, field, needs):
    content, _ = complete_coco(objects(lambda *b: {field: flag}, first=COUNT - 1))

    (error,), _ = coco_faults(content, needs)

    assert error.startswith("1 of 20 annotations have an iscrowd or ignore")
    assert "ids 20" in error


@pytest.mark.parametrize(
    "mask", [[[]], [[1, 1, 9, 1]], [1, 1, 9, 1, 9, 9], [[[1, 1], [9, 1], [9, 9]]]]
)
@NEEDS
def test_polygons_that_cost_detectron2_the_box_are_told_without_masks(mask, needs):
    fields = {"segmentation": mask}
    content = objects(lambda *b: fields, first=COUNT - 3)

    errors, warnings = coco_faults(content, needs._replace(masks=False))

    (text,) = errors + warnings
    assert text.startswith("3 of 20")
    assert "polygon" in text


# a change of objects, the first of them, and words of the warning
WARNED = {
    "brush masks of CVAT": (
        lambda *b: {"segmentation": run_length(*b), "iscrowd": 1},
        8,
        "iscrowd 1",
    ),
    "polygons of crowds": (lambda *b: {"iscrowd": 1}, 8, "iscrowd 1"),
    "one box for all": (
        lambda *b: {"bbox": [1, 1, 310, 230], "area": 71300},
        19,
        "smaller",
    ),
    "twice": (
        lambda *b: {
            "bbox": [10, 20, 20, 32],
            "segmentation": [polygon(10, 20, 20, 32)],
        },
        19,
        "repeat the bbox",
    ),
    "turned boxes of CVAT": (
        lambda *b: {"segmentation": [], "attributes": {"rotation": 30.0}},
        8,
        "12 of 20 annotations have a bbox without its rotation",
    ),
}


@pytest.mark.parametrize(("change", "first", "words"), WARNED.values(), ids=WARNED)
def test_unusual_annotations_are_counted(change, first, words):
    content = objects(change, first)

    errors, warnings = coco_faults(content, TRAIN._replace(masks=has_masks(content)))

    assert not errors
    (warning,) = [warning for warning in warnings if words in warning]
    assert " of 20 annotations" in warning


AREAS = {
    "normalized": lambda x, y, w, h: w * h / (WIDTH * HEIGHT),
    "negative": lambda x, y, w, h: -w * h,
    "of the photo twice as large": lambda x, y, w, h: 4 * w * h,
    "null": lambda *b: None,
}


@pytest.mark.parametrize("area", AREAS.values(), ids=AREAS)
@pytest.mark.parametrize("masks", [True, False])
def test_areas_that_the_geometry_refutes_are_refused_or_replaced(area, masks):
    def change(*box):
        segmentation = [polygon(*box)] if masks else []
        return {"area": area(*box), "segmentation": segmentation}

    content = objects(change, first=10)
    before = copy.deepcopy(content)
    evaluation = TEST._replace(masks=masks)

    errors, _ = coco_faults(content, evaluation)
    completed, (note,) = complete_coco(content)

    assert any("area" in error for error in errors)
    assert "10 of 20" in note
    areas = [annotation["area"] for annotation in completed["annotations"]]
    assert areas == [annotation["area"] for annotation in objects()["annotations"]]
    assert coco_faults(completed, evaluation) == ([], [])
    assert content == before


def test_areas_are_not_asked_of_a_training():
    content = objects(lambda *b: {"area": -1})
    assert coco_faults(content, TRAIN) == ([], [])


KEYPOINTS = {
    "num_keypoints 0": {"num_keypoints": 0},
    "no num_keypoints": {"num_keypoints": None},
    "an empty list": {"keypoints": []},
}


@pytest.mark.parametrize("changes", KEYPOINTS.values(), ids=KEYPOINTS)
def test_keypoints_are_counted(changes):
    content = objects(lambda *b: changes, first=10)

    errors, _ = coco_faults(content, KEYPOINT_TEST)
    completed, _ = complete_coco(content)

    assert errors
    assert coco_faults(completed, KEYPOINT_TEST) == ([], [])
    labeled = 0 if "keypoints" in changes else 1
    assert completed["annotations"][-1]["num_keypoints"] == labeled


def test_null_keypoints_are_completed():
    fields = {"keypoints": None, "num_keypoints": 3}
    content = objects(lambda *b: fields, first=10)

    completed, _ = complete_coco(content)

    assert coco_faults(completed, KEYPOINT_TEST) == ([], [])
    assert completed["annotations"][-1]["num_keypoints"] == 0


def test_another_number_of_keypoints_is_refused():
    (error,), _ = coco_faults(objects(), TRAIN._replace(keypoints=3))
    assert "NUM_KEYPOINTS" in error


@pytest.mark.parametrize(
    "keypoints",
    [[0.2, 0.3, 2, 0, 0, 0], [300, 200, 1, 310, 210, 2], [900, 800, 2, 30, 40, 1]],
)
def test_keypoints_outside_of_their_box_are_refused(keypoints):
    fields = {"keypoints": keypoints}
    content = objects(lambda *b: fields, first=9)

    (error,), _ = coco_faults(content, KEYPOINT_TRAIN)

    assert "keypoints outside" in error


@pytest.mark.parametrize("needs", [KEYPOINT_TRAIN, KEYPOINT_TEST])
def test_keypoints_of_crowds_are_not_checked(needs):
    fields = {"keypoints": [300, 200, 2, 0, 0, 0], "num_keypoints": 9, "iscrowd": 1}
    content = objects(lambda *b: fields, first=COUNT - 3)

    errors, _ = coco_faults(content, needs)

    assert not errors


def test_counts_of_keypoints_are_not_checked_where_only_boxes_are_evaluated():
    content = objects(lambda *b: {"num_keypoints": 9})
    assert coco_faults(content, TEST) == ([], [])
