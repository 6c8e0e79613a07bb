"""Limits, image sizes and anchors that do not fit the objects are told with numbers."""

import numpy as np
import pytest

from gw_detectron.config import default_config
from gw_detectron.workbench.dataset.data_fit import check_fit
from gw_detectron.workbench.dataset.fingerprint import read_fingerprint


def cells(per_image, size, image=(1000, 800)):
    """Read images of ``image`` (width, height) with square cells of ``size`` pixels."""
    annotations = [
        {"image_id": number, "category_id": 1, "bbox": [9 * k % 800, 9 * k % 700, size, size]}
        for number, count in enumerate(per_image)
        for k in range(count)
    ]
    images = [
        {"id": number, "width": image[0], "height": image[1]}
        for number in range(len(per_image))
    ]
    categories = [{"id": 1, "name": "cell"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    return read_fingerprint(content)


def warnings(trained, tested, eval_only=False, anchors=(32, 64, 128, 256, 512), **changes):
    cfg = default_config()
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("a", "unknown"), ("b",)
    cfg.merge_from_list(
        [w for key, value in changes.items() for w in (key.replace("__", "."), value)]
    )
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[size] for size in anchors]
    cfg.MODEL.RPN.IN_FEATURES = cfg.MODEL.RETINANET.IN_FEATURES = [
        f"p{level}" for level in range(2, 7)
    ]
    return list(check_fit(cfg, {"a": trained, "b": tested}, eval_only=eval_only))


MANY, RETINANET = {"TEST__DETECTIONS_PER_IMAGE": 500}, {"MODEL__META_ARCHITECTURE": "RetinaNet"}
SOUND = cells([10, 20, 0], 60)


def test_a_sound_config_has_no_warning():
    assert (
        warnings(SOUND, SOUND)
        == warnings(SOUND, cells([0], 1))
        == warnings(cells([0], 1), SOUND)
        == []
    )


@pytest.mark.parametrize(
    ("per_image", "changes", "words"),
    [
        (
            [150, 20],
            {},
            ["TEST.DETECTIONS_PER_IMAGE (100)", "1 of 2 images of b", "50 of 170 objects"],
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
def test_limits_of_the_evaluation(per_image, changes, words):
    for eval_only in (True, False):
        (warning,) = warnings(SOUND, cells(per_image, 60), eval_only, **changes)
        assert all(word in warning for word in words)
    key, value = warning.split("Fix: set ")[1].split(",")[0].split()
    assert (
        warnings(SOUND, cells(per_image, 60), **{**changes, key.replace(".", "__"): int(value)})
        == []
    )


def test_limits_of_the_training():
    (warning,) = warnings(cells([150], 60), SOUND, MODEL__ROI_HEADS__BATCH_SIZE_PER_IMAGE=64)
    assert "BATCH_SIZE_PER_IMAGE (64)" in warning and "134 of 150 objects" in warning
    assert (
        warnings(cells([150, *[10] * 9], 60), SOUND, MODEL__ROI_HEADS__BATCH_SIZE_PER_IMAGE=64)
        == []
    )
    changes = {
        "MODEL__RPN__POST_NMS_TOPK_TRAIN": 120,
        "MODEL__ROI_HEADS__BATCH_SIZE_PER_IMAGE": 999,
    }
    (warning,) = warnings(cells([150], 60), SOUND, **changes)
    assert "POST_NMS_TOPK_TRAIN (120)" in warning and "30 of 150" in warning
    assert (
        warnings(cells([150], 60), SOUND, True, MODEL__ROI_HEADS__BATCH_SIZE_PER_IMAGE=64) == []
    )


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
    assert f"MODEL.ANCHOR_GENERATOR.SIZES ({anchors[0]} to {anchors[-1]} pixels)" in warning
    assert f"{size} to {size} pixels" in warning and "10 of 10" in warning
    assert (
        warnings(odd, odd, anchors=[size * factor for factor in (0.25, 0.5, 1, 2, 4)]) == []
    )  # the fix


def test_objects_of_another_size_in_the_evaluation():
    for image, size, sides in (((2560, 1920), 40, 192), ((1000, 800), 60, 2400)):
        (warning,) = warnings(
            SOUND,
            cells([9], size, image),
            INPUT__MIN_SIZE_TEST=sides,
            INPUT__MAX_SIZE_TEST=9999,
        )
        assert (
            f"INPUT.MIN_SIZE_TEST, MAX_SIZE_TEST (({sides}" in warning
            and "and 60 in the training" in warning
        )
    assert np.median(SOUND.sizes(800, 1333)) == 60
