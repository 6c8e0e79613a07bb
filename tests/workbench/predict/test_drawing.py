"""Drawings: colors of classes and instances, contours, labels where they fit; predictions and ground truth alike."""

import numpy as np
import pytest
import torch
from detectron2.data import Metadata
from detectron2.structures import Boxes, BoxMode, Instances

from gw_detectron.workbench.images.drawing import draw_objects, object_colors
from gw_detectron.workbench.predict import draw_predictions, draw_record

CLASSES = Metadata(thing_classes=["cat", "dog", "cow"])
CELLS = Metadata(thing_classes=["cell"])
GRAY = np.full((480, 640, 3), 128, np.uint8)
BOX = [100.0, 150.0, 300.0, 350.0]


def square(left=100):
    mask = np.zeros(GRAY.shape[:2], bool)
    mask[150:350, left : left + 200] = True
    return mask


def test_colors_are_those_of_the_dataset_of_the_class_or_of_the_instance():
    metadata = Metadata(
        thing_classes=["cat", "dog"], thing_colors=[(255, 0, 0), (0, 0, 51)]
    )
    for instances in (False, True):
        assert np.allclose(
            object_colors(metadata, [0, 1, 2], instances=instances),
            [[1, 0, 0], [0, 0, 0.2], [1, 0, 0]],
        )
    assert np.array_equal(*object_colors(CLASSES, [1, 1], instances=False))
    colors = np.array(object_colors(CLASSES, [1] * 40, instances=True))
    assert np.abs(colors[1:] - colors[:-1]).max(axis=1).min() > 0.8


def test_touching_masks_differ_and_have_contours_in_place_of_boxes():
    boxes = np.array([BOX, [300, 150, 500, 350]])
    picture = draw_objects(GRAY, CELLS, [0, 0], boxes, masks=[square(), square(300)])
    inside = [picture[250, 200].astype(int), picture[250, 400].astype(int)]
    for index, color in enumerate(object_colors(CELLS, [0, 0], instances=True)):
        assert np.allclose(
            inside[index] / 255, 0.35 * np.array(color) + 0.65 * 128 / 255, atol=0.02
        )
    contours = [picture[150 - 2 : 150 + 3, x].astype(int) for x in (200, 400)]
    for fill, contour in zip(inside, contours, strict=True):
        assert (
            np.ptp(contour, axis=1) > np.ptp(fill) + 50
        ).any()  # purer than the fill
    assert np.array_equal(picture[100, 100], [128, 128, 128])


@pytest.mark.parametrize("metadata, shown", [(CLASSES, True), (CELLS, False)])
def test_the_name_of_the_only_class_is_left_out(metadata, shown):
    picture = draw_objects(GRAY, metadata, [0], np.array([BOX]), masks=[square()])
    assert (
        picture[150:180, 100:180].max(axis=2) < 60
    ).any() == shown  # the dark ground of a label


def test_labels_stand_where_they_hide_nothing():
    small = np.array(
        [[20 + 12 * i, 200, 30 + 12 * i, 210] for i in range(40)]
        + [[300, 400, 310, 410]],
        float,
    )
    picture = draw_objects(GRAY, CLASSES, [0] * 41, small)
    dark = picture.max(axis=2) < 60
    assert not dark[190:245, 40:480].any() and dark[395:440, 290:360].any()
    noted = draw_objects(GRAY, CLASSES, [0] * 41, small, notes=["missed", *[""] * 40])
    assert not (noted.max(axis=2) < 60)[190:245, 140:480].any()


def test_prediction_and_ground_truth_are_drawn_alike():
    instances = Instances(GRAY.shape[:2])
    instances.pred_boxes = Boxes(torch.tensor([BOX]))
    instances.pred_classes = torch.tensor([1])
    instances.scores = torch.tensor([0.9])
    instances.pred_masks = torch.from_numpy(square())[None]
    polygon = [[100, 150, 300, 150, 300, 350, 100, 350]]
    record = {
        "annotations": [
            {
                "bbox": BOX,
                "bbox_mode": BoxMode.XYXY_ABS,
                "category_id": 1,
                "segmentation": polygon,
            }
        ]
    }
    predicted, annotated = (
        draw_predictions(GRAY, CLASSES, instances),
        draw_record(GRAY, CLASSES, record),
    )
    assert (
        np.abs(
            predicted[300:340, 110:290].astype(int) - annotated[300:340, 110:290]
        ).max()
        <= 3
    )
    assert not np.array_equal(predicted, annotated)  # the score
