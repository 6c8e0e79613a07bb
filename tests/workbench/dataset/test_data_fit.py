"""Limits, image sizes and anchors that do not fit the objects are told with numbers."""

import pytest

from gw_detectron.config import default_config
from gw_detectron.errors import CheckReport
from gw_detectron.workbench.dataset.data_fit import check_fit
from gw_detectron.workbench.dataset.fingerprint import read_fingerprint


def cells(per_image, size, image=(1000, 800)):
    """Read images of ``image`` (width, height) with square cells of ``size`` pixels."""
    width, height = image
    images = []
    annotations = []
    for number, count in enumerate(per_image):
        images.append({"id": number, "width": width, "height": height})
        for k in range(count):
            box = [9 * k % 800, 9 * k % 700, size, size]
            annotations.append({"image_id": number, "category_id": 1, "bbox": box})

    categories = [{"id": 1, "name": "cell"}]
    return read_fingerprint(
        {"images": images, "annotations": annotations, "categories": categories}
    )


def warnings(
    trained, tested, eval_only=False, anchors=(32, 64, 128, 256, 512), **changes
):
    cfg = default_config()
    cfg.DATASETS.TRAIN = ("a", "unknown")
    cfg.DATASETS.TEST = ("b",)
    cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS = False
    for key, value in changes.items():
        cfg.merge_from_list([key.replace("__", "."), value])
    levels = ["p2", "p3", "p4", "p5", "p6"]
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[size] for size in anchors]
    cfg.MODEL.RPN.IN_FEATURES = levels
    cfg.MODEL.RETINANET.IN_FEATURES = levels
    report = CheckReport()
    check_fit(cfg, {"a": trained, "b": tested}, report, eval_only=eval_only)
    return report.warnings


MANY = {"TEST__DETECTIONS_PER_IMAGE": 500}
RETINANET = {"MODEL__META_ARCHITECTURE": "RetinaNet"}
SOUND = cells([10, 20, 0], 60)


def test_a_sound_config_has_no_warning():
    empty = cells([0], 1)

    assert warnings(SOUND, SOUND) == []
    assert warnings(SOUND, empty) == []
    assert warnings(empty, SOUND) == []


@pytest.mark.parametrize("eval_only", [True, False])
@pytest.mark.parametrize(
    ("per_image", "changes", "words"),
    [
        (
            [150, 20],
            {},
            [
                "TEST.DETECTIONS_PER_IMAGE (100)",
                "1 of 2 images of b",
                "50 of 170 objects",
            ],
        ),
        (
            [272],
            {**MANY, "MODEL__RPN__POST_NMS_TOPK_TEST": 100},
            ["POST_NMS_TOPK_TEST (100)", "172"],
        ),
        (
            [40],
            {**RETINANET, "TEST__DETECTIONS_PER_IMAGE": 30},
            ["(30)", "up to 40", "10 of 40"],
        ),
    ],
)
def test_limits_of_the_evaluation(per_image, changes, words, eval_only):
    dense = cells(per_image, 60)

    (warning,) = warnings(SOUND, dense, eval_only, **changes)

    assert all(word in warning for word in words)
    fix = warning.partition("Fix: set ")[2].partition(",")[0]
    key, value = fix.split()
    fixed = {**changes, key.replace(".", "__"): int(value)}
    assert warnings(SOUND, dense, eval_only, **fixed) == []


def test_minus_one_is_no_limit_of_detections():
    dense = cells([150, 20], 60)
    assert warnings(SOUND, dense, TEST__DETECTIONS_PER_IMAGE=-1) == []


def test_limits_of_the_training():
    dense = cells([150], 60)
    mostly_sparse = cells([150, *[10] * 9], 60)
    small_batch = {"MODEL__ROI_HEADS__BATCH_SIZE_PER_IMAGE": 64}
    few_proposals = {
        "MODEL__RPN__POST_NMS_TOPK_TRAIN": 120,
        "MODEL__ROI_HEADS__BATCH_SIZE_PER_IMAGE": 999,
    }

    (warning,) = warnings(dense, SOUND, **small_batch)
    assert "BATCH_SIZE_PER_IMAGE (64)" in warning
    assert "134 of 150 objects" in warning

    (warning,) = warnings(dense, SOUND, **few_proposals)
    assert "POST_NMS_TOPK_TRAIN (120)" in warning
    assert "30 of 150" in warning

    assert warnings(mostly_sparse, SOUND, **small_batch) == []
    assert warnings(dense, SOUND, True, **small_batch) == []


@pytest.mark.parametrize(
    ("size", "anchors"),
    [
        (10, (16, 32, 64, 128, 256)),
        (41, (512, 590, 680, 780, 900)),
        (700, (32, 64, 128, 256, 400)),
    ],
)
def test_anchors_of_another_size_than_the_objects(size, anchors):
    odd = cells([5, 5], size)

    (warning,) = warnings(odd, odd, anchors=anchors)

    assert (
        f"MODEL.ANCHOR_GENERATOR.SIZES ({anchors[0]} to {anchors[-1]} pixels)"
        in warning
    )
    assert f"{size} to {size} pixels" in warning
    assert "10 of 10" in warning
    fitting = [size / 4, size / 2, size, size * 2, size * 4]
    assert warnings(odd, odd, anchors=fitting) == []


def test_images_without_objects_are_counted_unless_they_are_trained_on():
    (warning,) = warnings(SOUND, SOUND, DATALOADER__FILTER_EMPTY_ANNOTATIONS=True)

    assert "1 of 3 images" in warning
    assert "FILTER_EMPTY_ANNOTATIONS" in warning


def test_images_without_keypoints_are_counted():
    changes = {"DATALOADER__FILTER_EMPTY_ANNOTATIONS": True, "MODEL__KEYPOINT_ON": True}

    empty, few = warnings(SOUND, SOUND, **changes)

    assert "1 of 3 images of a have no object" in empty
    assert "2 of 3 images of a have fewer labeled keypoints" in few
    assert "MIN_KEYPOINTS_PER_IMAGE 0" in few
