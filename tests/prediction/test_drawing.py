"""Drawings: one color for a class, in predictions and ground truth."""

import numpy as np
import torch
from detectron2.data import Metadata
from detectron2.structures import Boxes, BoxMode, Instances

from gw_detectron.prediction import draw_predictions, draw_record
from gw_detectron.prediction.drawing import class_colors, draw_objects

CLASSES = Metadata(thing_classes=["cat", "dog", "cow"])
GRAY = np.full((480, 640, 3), 128, np.uint8)
BOX = [100.0, 150.0, 300.0, 350.0]


def square():
    mask = np.zeros(GRAY.shape[:2], bool)
    mask[150:350, 100:300] = True
    return mask


def test_colors_are_those_of_the_dataset_or_of_the_class():
    metadata = Metadata(thing_classes=["cat", "dog"], thing_colors=[(255, 0, 0), (0, 0, 51)])
    assert np.allclose(class_colors(metadata, [0, 1, 2]), [[1, 0, 0], [0, 0, 0.2], [1, 0, 0]])
    for index in range(3):
        picture = draw_objects(GRAY, CLASSES, [index], np.array([BOX]), masks=[square()])
        drawn = picture[300, 150] / 255  # half the color, half the image
        assert np.allclose(drawn, (class_colors(CLASSES, [index])[0] + 128 / 255) / 2, atol=0.02)
        assert np.array_equal(picture[450, 600], [128, 128, 128])


def test_prediction_and_ground_truth_are_drawn_alike():
    instances = Instances(GRAY.shape[:2])
    instances.pred_boxes = Boxes(torch.tensor([BOX]))
    instances.pred_classes = torch.tensor([1])
    instances.scores = torch.tensor([0.9])
    instances.pred_masks = torch.from_numpy(square())[None]
    polygon = [[100, 150, 300, 150, 300, 350, 100, 350]]
    record = {"annotations": [{"bbox": BOX, "bbox_mode": BoxMode.XYXY_ABS, "category_id": 1, "segmentation": polygon}]}
    predicted, annotated = draw_predictions(GRAY, CLASSES, instances), draw_record(GRAY, CLASSES, record)
    assert np.abs(predicted[300:340, 110:290].astype(int) - annotated[300:340, 110:290]).max() <= 3
    assert not np.array_equal(predicted, annotated)  # the score
