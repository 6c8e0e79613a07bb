"""The numbers of a COCO file, against counts by hand and Detectron2's own resizing and anchors."""

import numpy as np
import pytest
import torch
from detectron2.data import transforms
from detectron2.data.build import (
    filter_images_with_few_keypoints,
    filter_images_with_only_crowd_annotations,
)
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator

from gw_detectron.config import default_config
from gw_detectron.errors import DataError
from gw_detectron.workbench.dataset.coco_content import content_to_records
from gw_detectron.workbench.dataset.fingerprint import (
    anchor_shapes,
    best_overlaps,
    join_fingerprints,
    read_fingerprint,
)

SQUARE = [[0, 0, 9, 0, 9, 9, 0, 9]]
CONTENT = {
    "images": [
        {"id": 5, "width": 100, "height": 50},
        {"id": 3, "width": 30, "height": 40},
    ],
    "categories": [{"id": 9, "name": "wheel"}, {"id": 2, "name": "car"}],
    "annotations": [
        {
            "image_id": 5,
            "category_id": 9,
            "bbox": [0, 0, 10, 20],
            "segmentation": SQUARE,
        },
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


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("classes", ["car", "wheel"]),
        ("boxes", [[10, 20], [10, 10], [4, 9]]),  # the second leaves its image
        ("image", [0, 0, 1]),
        ("category", [1, 1, 0]),
        ("per_image", [2, 1]),
        ("per_class", [1, 2]),
        ("images_per_class", [1, 1]),
        ("masks", {"polygon": 1, "rle": 1, "none": 1}),
    ],
)
def test_objects_that_can_be_learned_are_counted(field, expected):
    data = read_fingerprint(CONTENT)
    value = getattr(data, field)
    np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("filter_empty", [True, False])
@pytest.mark.parametrize("fewest", [None, 0, 1, 2])
def test_images_that_are_trained_on_are_those_of_detectron2(filter_empty, fewest):
    box = {"category_id": 1, "bbox": [1, 1, 5, 5], "iscrowd": 0}
    of_images = [
        [],
        [{**box, "bbox": [1, 1, 0, 5]}],
        [{**box, "iscrowd": 1, "keypoints": [1, 1, 2, 2, 2, 1]}],
        [{**box, "segmentation": [[1, 1, 2, 2]]}],
        [{**box, "segmentation": [[1, 1, 2, 2], SQUARE[0]]}],
        [{**box, "keypoints": [1, 1, 2, 0, 0, 0]}, box],
        [{**box, "keypoints": [1, 1, 2, 0, 0, 0]}] * 2,
        [{**box, "keypoints": [0] * 6}, box],
    ]
    content = {
        "categories": [{"id": 1, "name": "car"}],
        "images": [],
        "annotations": [],
    }
    for number, annotations in enumerate(of_images):
        content["images"].append(
            {"id": number, "file_name": "a.jpg", "width": 20, "height": 20}
        )
        content["annotations"] += [{**row, "image_id": number} for row in annotations]

    cfg = default_config()
    cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS = filter_empty
    cfg.MODEL.KEYPOINT_ON = fewest is not None
    cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE = fewest or 0
    records = content_to_records(content, "")
    if filter_empty:
        records = filter_images_with_only_crowd_annotations(records)
    if fewest:
        records = filter_images_with_few_keypoints(records, fewest)

    data = read_fingerprint(content)

    assert data.trained_images(cfg) == len(records)
    twice = join_fingerprints([data, data])
    assert twice.trained_images(cfg) == 2 * len(records)


def test_files_of_one_training_are_added_up():
    wheel = {"image_id": 3, "category_id": 30, "bbox": [1, 1, 5, 5]}
    other = {
        "images": CONTENT["images"],
        "categories": [{"id": 4, "name": "car"}, {"id": 30, "name": "wheel"}],
        "annotations": [wheel],
    }

    parts = [read_fingerprint(content) for content in (CONTENT, other)]
    data = join_fingerprints(parts)

    assert data.per_image.tolist() == [2, 1, 0, 1]
    assert data.per_class.tolist() == [1, 3]


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"images": []},
        {"images": [{}], "annotations": [], "categories": []},
        {"images": [{"id": 1, "width": float("inf"), "height": 9}], "categories": []},
    ],
)
def test_other_contents_are_refused(content):
    with pytest.raises(DataError, match="COCO"):
        read_fingerprint(content)


@pytest.mark.parametrize("sides", [(40, 1333), (80, 90), (0, 90)])
def test_boxes_are_resized_as_detectron2_resizes_images(sides):
    shorter, longest = sides
    data = read_fingerprint(CONTENT)
    resized = data.resized(shorter, longest)
    resize = transforms.ResizeShortestEdge([shorter, shorter], longest)

    expected = []
    for index, box in zip(data.image, data.boxes, strict=True):
        width, height = data.images[index].astype(int)
        image = np.zeros((height, width, 3))
        transform = resize.get_transform(image)
        expected += list(transform.apply_coords(box[None]))

    # Detectron2 rounds to whole pixels
    assert resized == pytest.approx(np.array(expected), rel=0.02)


@pytest.mark.parametrize(
    ("sizes", "strides_of_anchors"),
    [([[16], [32, 48]], [4] * 3 + [16] * 6), ([[8, 24]], [4] * 6 + [16] * 6)],
)
def test_anchors_are_those_of_detectron2(sizes, strides_of_anchors):
    ratios = [[0.25, 1.0, 2.0]]
    strides = [4, 16]
    generator = DefaultAnchorGenerator(
        sizes=sizes, aspect_ratios=ratios, strides=strides
    )
    corners = torch.cat(list(generator.cell_anchors)).numpy()
    lower, upper = np.split(corners, 2, axis=1)

    anchors = anchor_shapes(sizes, ratios, strides)

    shapes, stride = np.split(anchors, [2], axis=1)
    assert shapes == pytest.approx(upper - lower, rel=1e-5)
    assert stride[:, 0].tolist() == strides_of_anchors


CENTERED = [[20.0, 20.0, 0], [10.0, 20.0, 0]]
MOVED = [[10.0, 10.0, 8], [20.0, 20.0, 4]]


@pytest.mark.parametrize(
    ("box", "anchors", "overlap"),
    [
        ([10.0, 10.0], CENTERED, 0.5),
        ([10.0, 40.0], CENTERED, 0.5),
        # 8 x 8 pixels in common; the larger anchor has a quarter
        ([10.0, 10.0], MOVED, 64 / 136),
    ],
)
def test_overlap_with_the_most_similar_anchor_at_its_mean_distance(
    box, anchors, overlap
):
    boxes = np.array([box])
    overlaps = best_overlaps(boxes, np.array(anchors))
    assert overlaps == pytest.approx([overlap])
