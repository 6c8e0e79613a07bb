"""The numbers of a COCO file, against counts by hand and Detectron2's own resizing and anchors."""

import numpy as np
import pytest
import torch
from detectron2.data import transforms
from detectron2.layers import ShapeSpec
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator

from gw_detectron.config import default_config
from gw_detectron.errors import DataError
from gw_detectron.workbench.dataset.fingerprint import (
    anchor_shapes,
    best_overlaps,
    read_fingerprint,
)

SQUARE = [[0, 0, 9, 0, 9, 9, 0, 9]]
CONTENT = {
    "images": [{"id": 5, "width": 100, "height": 50}, {"id": 3, "width": 30, "height": 40}],
    "categories": [{"id": 9, "name": "wheel"}, {"id": 2, "name": "car"}],
    "annotations": [
        {"image_id": 5, "category_id": 9, "bbox": [0, 0, 10, 20], "segmentation": SQUARE},
        {
            "image_id": 5,
            "category_id": 9,
            "bbox": [90, 40, 20, 20],
            "segmentation": {"size": [50, 100], "counts": "1"},
        },
        {"image_id": 3, "category_id": 2, "bbox": [5, 5, 4, 9], "iscrowd": 0},
        {"image_id": 3, "category_id": 2, "bbox": [5, 5, 4, 9], "iscrowd": 1},
        {"image_id": 3, "category_id": 2, "bbox": [5, 5, 0, 9]},
        {"image_id": 3, "category_id": 2, "bbox": [30, 5, 4, 9]},
        {"image_id": 3, "category_id": 2, "bbox": [float("nan"), 5, 4, 9]},
        {"image_id": 3, "category_id": 2},
        {"image_id": 4, "category_id": 2, "bbox": [5, 5, 4, 9]},
        {"image_id": 3, "category_id": 1, "bbox": [5, 5, 4, 9]},
    ],
}


def test_objects_that_can_be_learned_are_counted():
    found = read_fingerprint(CONTENT)
    assert found.classes == ["car", "wheel"]
    assert found.boxes.tolist() == [[10, 20], [10, 10], [4, 9]]  # the second leaves its image
    assert (found.image.tolist(), found.category.tolist()) == ([0, 0, 1], [1, 1, 0])
    assert (found.per_image.tolist(), found.per_class.tolist()) == ([2, 1], [1, 2])
    assert found.images_per_class.tolist() == [1, 1]
    assert (found.crowds, found.unusable) == (1, 6)
    assert found.masks == {"polygon": 1, "rle": 1, "none": 1}


def test_files_of_one_training_are_added_up():
    other = {**CONTENT, "categories": [{"id": 4, "name": "car"}, {"id": 30, "name": "wheel"}]}
    other["annotations"] = [{"image_id": 3, "category_id": 30, "bbox": [1, 1, 5, 5]}]
    found = read_fingerprint(CONTENT, other)
    assert (found.per_image.tolist(), found.per_class.tolist()) == ([2, 1, 0, 1], [1, 3])


@pytest.mark.parametrize(
    "content", [[], {"images": []}, {"images": [{}], "annotations": [], "categories": []}]
)
def test_other_contents_are_refused(content):
    with pytest.raises(DataError, match="COCO"):
        read_fingerprint(content)


@pytest.mark.parametrize("sides", [(40, 1333), (80, 90), (0, 90)])
def test_boxes_are_resized_as_detectron2_resizes_images(sides):
    found = read_fingerprint(CONTENT)
    resize = transforms.ResizeShortestEdge([sides[0]] * 2, sides[1])
    for box, resized, image in zip(
        found.boxes, found.resized(*sides), found.image, strict=True
    ):
        width, height = found.images[image].astype(int)
        expected = resize.get_transform(np.zeros((height, width, 3))).apply_coords(box[None])[0]
        assert resized == pytest.approx(expected, rel=0.02)  # whole pixels


@pytest.mark.parametrize("sizes", [[[16], [32, 48]], [[8, 24]]])
def test_anchors_are_those_of_detectron2(sizes):
    cfg, strides = default_config(), [4, 16]
    cfg.MODEL.ANCHOR_GENERATOR.SIZES, cfg.MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS = (
        sizes,
        [[0.25, 1.0, 2.0]],
    )
    levels = list(
        DefaultAnchorGenerator(
            cfg, [ShapeSpec(stride=stride) for stride in strides]
        ).cell_anchors
    )
    expected = torch.cat([level[:, 2:] - level[:, :2] for level in levels]).numpy()
    found = anchor_shapes(sizes, [[0.25, 1.0, 2.0]], strides)
    assert found[:, :2] == pytest.approx(expected, rel=1e-5)
    assert found[:, 2].tolist() == [
        s for s, level in zip(strides, levels, strict=True) for _ in level
    ]


def test_overlap_with_the_most_similar_anchor_at_its_mean_distance():
    boxes = np.array([[10.0, 10.0], [10.0, 40.0]])
    assert best_overlaps(boxes, np.array([[20.0, 20.0, 0], [10.0, 20.0, 0]])) == pytest.approx(
        [0.5, 0.5]
    )
    moved = best_overlaps(boxes[:1], np.array([[10.0, 10.0, 8], [20.0, 20.0, 4]]))
    assert moved == pytest.approx(
        [64 / 136]
    )  # 8 x 8 pixels in common; the larger anchor has a quarter
