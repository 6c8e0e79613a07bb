"""torchvision's transforms in Detectron2's pipeline: what the image shows is where boxes, masks and points are."""

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.data.transforms import AugInput, RandomFlip, ResizeShortestEdge
from detectron2.structures import polygons_to_bitmask

from gw_detectron.config import changed_config, default_config
from gw_detectron.errors import ConfigError
from gw_detectron.workbench.images.augmentations import (
    build_augmentations,
    training_mapper,
)

CALLS = (
    "RandomRotation(30)",
    "RandomAffine(degrees=20, translate=[0.1, 0.1], scale=[0.7, 1.2], shear=10)",
    "RandomPerspective(0.4, p=1.0)",
    "RandomHorizontalFlip(p=1)",
    "RandomHorizontalFlip",
    "RandomVerticalFlip(p=1.0)",
    "RandomCrop(size=[90, 110])",
    "RandomResizedCrop(size=120)",
    "RandomZoomOut(p=1.0, side_range=[1.0, 2.0])",
    "Pad(padding=[7, 3])",
    "ElasticTransform(alpha=20.0)",
    "ColorJitter(brightness=0.2, contrast=0.2)",
)


def config(*calls, **changes):
    return changed_config(default_config(), {"INPUT.AUGMENTATIONS": calls, **changes})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("seed", range(2))
def test_masks_polygons_and_boxes_follow_the_image(call, seed):
    image, mask = np.zeros((150, 200, 3), np.uint8), np.zeros((150, 200), np.uint8)
    corners = np.array([[60, 40], [130, 40], [130, 100], [100, 70], [60, 100]], float)
    mask[:] = polygons_to_bitmask([corners.ravel()], 150, 200)
    image[mask == 1] = 255
    torch.manual_seed(seed)
    (augmentation,) = build_augmentations(config(call))
    moved = AugInput(image)
    transform = augmentation(moved)
    shown = moved.image[:, :, 0] > 100
    polygon = polygons_to_bitmask(
        [transform.apply_polygons([corners])[0].ravel()], *shown.shape
    )
    for found in (transform.apply_segmentation(mask) > 0, polygon):
        assert (found & shown).sum() > 0.93 * (found | shown).sum()
    x0, y0, x1, y1 = transform.apply_box(np.array([[60, 40, 130, 100]]))[0]
    rows, columns = np.nonzero(shown)
    assert (
        x0 - 2 < columns.min()
        and y0 - 2 < rows.min()
        and columns.max() < x1 + 2
        and rows.max() < y1 + 2
    )


def test_both_color_orders_and_gray_images_are_changed_alike():
    image = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    results = []
    for order, pixels in (("RGB", image), ("BGR", image[:, :, ::-1])):
        torch.manual_seed(0)
        (augmentation,) = build_augmentations(
            config("ColorJitter(hue=0.5, saturation=0.5)", **{"INPUT.FORMAT": order})
        )
        results.append(augmentation.get_transform(pixels).apply_image(pixels))
    assert np.array_equal(results[0], results[1][:, :, ::-1]) and not np.array_equal(
        results[0], image
    )
    (augmentation,) = build_augmentations(
        config("RandomRotation(90)", **{"INPUT.FORMAT": "L"})
    )
    assert augmentation.get_transform(image[:, :, :1]).apply_image(None).shape == (
        20,
        30,
        1,
    )


@pytest.mark.parametrize("mask_format", ["polygon", "bitmask"])
def test_training_examples_are_crops_with_boxes_inside(small_dataset, mask_format):
    calls = ("RandomRotation(20)", "RandomCrop(size=48)", "RandomErasing(p=1.0)")
    changes = {
        "INPUT.MASK_FORMAT": mask_format,
        "MODEL.MASK_ON": True,
        "INPUT.MIN_SIZE_TRAIN": (96,),
    }
    mapper, counts = training_mapper(config(*calls, **changes)), []
    for record in DatasetCatalog.get("gw_synthetic_train"):
        torch.manual_seed(record["image_id"])
        example = mapper(record)
        assert example["image"].shape == (3, 96, 96)
        boxes = example["instances"].gt_boxes.tensor
        assert ((boxes >= 0) & (boxes <= 96)).all()
        counts.append(len(boxes))
        (tight := example["instances"].gt_masks.get_bounding_boxes()).clip((96, 96))
        assert torch.equal(boxes, tight.tensor)
    assert sum(counts) > 5
    one = next(each for each in record["annotations"] if not each["iscrowd"])
    whole = {**one, "bbox": [0, 0, record["width"], record["height"]]}
    example = training_mapper(config("ColorJitter(0.2)", **changes))(
        {**record, "annotations": [whole]}
    )
    assert example["instances"].gt_boxes.tensor.tolist() == [
        [0, 0, *example["image"].shape[:0:-1]]
    ]  # as annotated
    assert build_augmentations(
        config("RandomCrop(size=4096)")
    )  # the images may be large enough


REFUSED = (
    *(
        "RandomKrop(size=5)",
        "RandomCrop(size=",
        "",
        "RandomRotation('x')",
        "Lambda(len)",
    ),
    *(
        "RandomCrop(size=open('x'))",
        "RandomCrop(size=5).__class__()",
        "__import__('os').system('true')",
    ),
    *(
        "RandAugment()",
        "Normalize(mean=[0.5], std=[0.5])",
        "FiveCrop(size=5)",
        "MixUp()",
        "RandomIoUCrop()",
    ),
)


@pytest.mark.parametrize("call", REFUSED)
def test_what_cannot_be_used_is_refused(call):
    with pytest.raises(ConfigError, match="INPUT.AUGMENTATIONS"):
        build_augmentations(config(call))


@pytest.mark.parametrize("call", ["RandomHorizontalFlip()", "RandomVerticalFlip()"])
def test_a_flip_that_does_not_exchange_keypoints_is_refused(call):
    with pytest.raises(ConfigError, match="INPUT.RANDOM_FLIP"):
        build_augmentations(config(call, **{"MODEL.KEYPOINT_ON": True}))


def test_colors_change_after_resizing():
    crop, resize, flip, *colors = training_mapper(
        config("ColorJitter(0.3)", "RandomCrop(size=9)")
    ).augmentations.augs
    assert (
        crop.moves
        and isinstance(resize, ResizeShortestEdge)
        and isinstance(flip, RandomFlip)
    )
    assert [each.recolors for each in colors] == [True]
