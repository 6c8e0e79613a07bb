"""Drawings: one color for a class, whoever is drawn."""

import numpy as np
import pytest
import torch
from detectron2.data import Metadata
from detectron2.structures import Boxes, BoxMode, Instances
from detectron2.utils.visualizer import Visualizer

from gw_detectron.pictures import class_colors, draw_objects, draw_predictions, draw_record

CLASSES = Metadata(thing_classes=["cat", "dog", "cow"])
GRAY = np.full((480, 640, 3), 128, np.uint8)
BOX = [100.0, 150.0, 300.0, 350.0]


def square():
    mask = np.zeros(GRAY.shape[:2], bool)
    mask[150:350, 100:300] = True
    return mask


def test_classes_have_different_colors():
    colors = class_colors(Metadata(thing_classes=[str(index) for index in range(70)]))
    assert len({tuple(color) for color in colors}) == 70


def test_more_classes_than_colors_repeat_them():
    colors = class_colors(Metadata(thing_classes=[str(index) for index in range(100)]))
    assert colors.shape == (100, 3) and np.array_equal(colors[70], colors[0])


def test_colors_of_the_dataset_are_used():
    metadata = Metadata(thing_classes=["cat", "dog"], thing_colors=[(255, 0, 0), (0, 0, 51)])
    assert np.allclose(class_colors(metadata), [[1, 0, 0], [0, 0, 0.2]])


@pytest.mark.parametrize("index", range(3))
def test_a_mask_has_the_color_of_its_class(index):
    picture = draw_objects(GRAY, CLASSES, [index], np.array([BOX]), masks=[square()])
    drawn = picture[300, 150] / 255  # half the color, half the image
    assert np.allclose(drawn, (class_colors(CLASSES)[index] + 128 / 255) / 2, atol=0.02)
    assert np.array_equal(picture[450, 600], [128, 128, 128])


def test_a_mask_of_two_columns_is_drawn():
    """Detectron2 refuses such an array."""
    thin = np.full((300, 2, 3), 128, np.uint8)
    picture = draw_objects(thin, CLASSES, [0], np.array([[0, 0, 2, 300]]), masks=[np.ones((300, 2), bool)])
    assert np.abs(picture.astype(int) - 128).max() > 50


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


def test_an_image_without_objects_stays():
    instances = Instances(GRAY.shape[:2])
    instances.pred_boxes, instances.pred_classes = Boxes(torch.zeros(0, 4)), torch.zeros(0, dtype=torch.int64)
    instances.scores, instances.pred_masks = torch.zeros(0), torch.zeros(0, *GRAY.shape[:2], dtype=torch.bool)
    assert np.array_equal(draw_predictions(GRAY, CLASSES, instances), GRAY)
    assert np.array_equal(draw_record(GRAY, CLASSES, {}), GRAY)


def test_small_images_are_enlarged():
    assert draw_record(GRAY[:64, :128], CLASSES, {}).shape == (240, 480, 3)


def test_no_objects_have_no_keypoints():
    assert np.array_equal(draw_record(GRAY, CLASSES, {"annotations": []}, keypoints=True), GRAY)


def test_keypoints_are_drawn_on_request_only():
    points = [120.0, 200.0, 2, 250.0, 300.0, 2]
    record = {"annotations": [{"bbox": BOX, "bbox_mode": BoxMode.XYXY_ABS, "category_id": 0, "keypoints": points}]}
    without, with_points = (draw_record(GRAY, CLASSES, record, keypoints=wanted) for wanted in (False, True))
    assert np.array_equal(without[250, 180], [128, 128, 128])
    assert not np.array_equal(without[195:205, 115:125], with_points[195:205, 115:125])


def test_a_note_is_drawn_beside_its_object_only():
    plain, noted = (
        draw_objects(GRAY, CLASSES, [1], np.array([BOX]), scores=[0.9], notes=notes) for notes in (None, ["duplicate"])
    )
    rows, columns = np.nonzero((plain != noted).any(-1))
    assert len(rows) > 50 and rows.max() - rows.min() < 40 and 90 < columns.min() < columns.max() < 270


def test_any_number_of_classes_without_names_is_drawn():
    first, repeated = (draw_objects(GRAY, Metadata(), [index], np.array([BOX]), masks=[square()]) for index in (5, 75))
    assert np.array_equal(first[300:340, 110:290], repeated[300:340, 110:290])


def test_labels_of_small_images_can_be_read():
    """Detectron2's font size becomes 0 where the image is enlarged by more than 10."""
    small = np.full((40, 40, 3), 128, np.uint8)
    plain = draw_objects(small, Metadata(), [], np.zeros((0, 4)))
    labels = [draw_objects(small, CLASSES, [1], np.array([[5, 15, 30, 35]]), scores=[s]) for s in (0.11, 0.88)]
    assert plain.shape == labels[0].shape
    assert (labels[0] != labels[1]).any(-1).sum() > 20  # the digits differ


def test_a_class_name_is_no_formula():
    """Matplotlib would parse text between two dollar signs."""
    names = Metadata(thing_classes=["1$ #1 / 10$ #2", "a $x_$"])
    image = draw_objects(np.zeros((60, 80, 3), np.uint8), names, [0, 1], np.array([[5, 5, 40, 40], [20, 20, 70, 50]]))
    assert image.any()


@pytest.fixture
def no_boxes(monkeypatch):
    monkeypatch.setattr(Visualizer, "draw_box", lambda *args, **kwargs: None)


def changed(picture):
    """Return the first and last row and column that differ from gray."""
    rows, columns = np.nonzero((picture != 128).any(-1))
    return rows.min(), rows.max(), columns.min(), columns.max()


@pytest.mark.parametrize("box", [[620, 460, 640, 480], [0, 470, 640, 480], [600, 0, 640, 480], [-5, -5, 30, 30]])
def test_labels_stay_within_the_image(box, no_boxes):
    inside = draw_objects(GRAY, CLASSES, [0], np.array([[100, 100, 200, 200]]), scores=[0.9])
    top, bottom, left, right = changed(inside)
    border = changed(draw_objects(GRAY, CLASSES, [0], np.array([box]), scores=[0.9]))
    assert np.allclose([border[1] - border[0], border[3] - border[2]], [bottom - top, right - left], atol=3)


def test_labels_do_not_cover_each_other(no_boxes):
    one, five = (draw_objects(GRAY, CLASSES, [0] * n, np.tile(BOX, (n, 1))) for n in (1, 5))
    top, bottom, left, right = changed(one)
    assert np.allclose(changed(five), [top, top + 5 * (bottom - top), left, right], atol=12)


def test_labels_without_room_cover_others_at_their_boxes(no_boxes):
    one, many = (draw_objects(GRAY, CLASSES, [0] * n, np.tile(BOX, (n, 1))) for n in (1, 40))
    top, bottom, left, right = changed(one)
    first, last, *columns = changed(many)
    assert first == top and GRAY.shape[0] - last < 2 * (bottom - top) and columns == [left, right]


@pytest.mark.parametrize("side", [100, 480, 640, 4000])
def test_letters_have_a_size_that_can_be_read(side, no_boxes):
    picture = draw_objects(np.full((side, side, 3), 128, np.uint8), CLASSES, [0], np.array([[10, 10, 80, 80]]))
    top, bottom, _, _ = changed(picture)
    assert 16 <= bottom - top <= 28 or (side == 4000 and 80 < bottom - top < 140)
