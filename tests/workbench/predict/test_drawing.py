"""Drawings: colors of classes and instances, contours, labels where they fit."""

import numpy as np
import pytest
import torch
from detectron2.data import Metadata
from detectron2.structures import Boxes, BoxMode, Instances

from gw_detectron.workbench.images.drawing import (
    _labels,
    draw_objects,
    object_colors,
)
from gw_detectron.workbench.predict import draw_predictions, draw_record

CLASSES = Metadata(thing_classes=["cat", "dog", "cow"])
CELLS = Metadata(thing_classes=["cell"])
GRAY = np.full((480, 640, 3), 128, np.uint8)
BOX = [100.0, 150.0, 300.0, 350.0]


def square(left=100):
    mask = np.zeros(GRAY.shape[:2], bool)
    mask[150:350, left : left + 200] = True
    return mask


def dark(picture):
    """Pixels of labels, whose ground is dark."""
    return picture.max(axis=2) < 60


@pytest.mark.parametrize("instances", [False, True])
def test_colors_of_the_dataset(instances):
    metadata = Metadata(
        thing_classes=["cat", "dog"], thing_colors=[(255, 0, 0), (0, 0, 51)]
    )
    colors = object_colors(metadata, [0, 1, 2], instances=instances)
    assert np.allclose(colors, [[1, 0, 0], [0, 0, 0.2], [1, 0, 0]])


def test_colors_of_classes_and_instances():
    assert np.array_equal(*object_colors(CLASSES, [1, 1], instances=False))

    colors = np.array(object_colors(CLASSES, [1] * 40, instances=True))
    steps = np.abs(np.diff(colors, axis=0)).max(axis=1)
    assert steps.min() > 0.8


def test_touching_masks_differ_and_have_contours_in_place_of_boxes():
    boxes = np.array([BOX, [300, 150, 500, 350]])
    masks = [square(), square(300)]

    picture = draw_objects(GRAY, CELLS, [0, 0], boxes, masks=masks).astype(int)

    colors = np.array(object_colors(CELLS, [0, 0], instances=True))
    expected = 0.35 * colors + 0.65 * 128 / 255
    inside = picture[250, [200, 400]]
    assert np.allclose(inside / 255, expected, atol=0.02)
    for fill, column in zip(inside, (200, 400), strict=True):
        contour = picture[148:153, column]
        assert np.ptp(contour, axis=1).max() > np.ptp(fill) + 50  # purer than the fill
    assert picture[100, 100].tolist() == [128, 128, 128]


@pytest.mark.parametrize("metadata, shown", [(CLASSES, True), (CELLS, False)])
def test_the_name_of_the_only_class_is_left_out(metadata, shown):
    picture = draw_objects(GRAY, metadata, [0], np.array([BOX]), masks=[square()])
    assert dark(picture)[150:180, 100:180].any() == shown


def test_labels_stand_where_they_hide_nothing():
    row = [[20 + 12 * i, 200, 30 + 12 * i, 210] for i in range(40)]
    boxes = np.array([*row, [300, 400, 310, 410]], float)
    classes = [0] * 41

    labels = dark(draw_objects(GRAY, CLASSES, classes, boxes))
    assert not labels[190:245, 40:480].any()
    assert labels[395:440, 290:360].any()

    notes = ["missed"] + [""] * 40
    labels = dark(draw_objects(GRAY, CLASSES, classes, boxes, notes=notes))
    assert not labels[190:245, 140:480].any()


def test_prediction_and_ground_truth_are_drawn_alike():
    instances = Instances(GRAY.shape[:2])
    instances.pred_boxes = Boxes(torch.tensor([BOX]))
    instances.pred_classes = torch.tensor([1])
    instances.scores = torch.tensor([0.9])
    instances.pred_masks = torch.from_numpy(square())[None]
    annotation = {
        "bbox": BOX,
        "bbox_mode": BoxMode.XYXY_ABS,
        "category_id": 1,
        "segmentation": [[100, 150, 300, 150, 300, 350, 100, 350]],
    }

    predicted = draw_predictions(GRAY, CLASSES, instances).astype(int)
    annotated = draw_record(GRAY, CLASSES, {"annotations": [annotation]})

    difference = np.abs(predicted - annotated)
    assert difference[300:340, 110:290].max() <= 3
    assert difference.any()  # the score


def test_labels_have_class_score_and_note():
    assert _labels(["cup", "can"], [1, 0], [0.5, 0.9], None) == ["can 50%", "cup 90%"]
    assert _labels(["cup"], [0, 0], None, ["missed", ""]) == ["missed", ""]
    assert _labels([], [7], None, None) == ["7"]
