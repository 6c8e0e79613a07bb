"""The plain tensor code between a detector's modules, against Detectron2's and torchvision's own."""

import math

import pytest
import torch
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.meta_arch.retinanet import permute_to_N_HWA_K
from detectron2.modeling.poolers import ROIPooler, assign_boxes_to_levels
from detectron2.structures import Boxes
from hypothesis import given
from hypothesis import strategies as st
from torchvision.ops import box_iou, nms

from gw_detectron.export.boxes import NO_BOX, clip, grid_anchors, per_anchor, suppress, take, top
from gw_detectron.export.meta_arch import assign_levels, image_rois, pool

SEEDS = st.integers(0, 2**31)


def random_boxes(seed, images, number, side=600.0, largest=300.0):
    generator = torch.Generator().manual_seed(seed)
    corners = side * torch.rand(images, number, 2, generator=generator)
    return torch.cat((corners, corners + largest * torch.rand(images, number, 2, generator=generator) ** 2), 2)


@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_anchors_and_their_predictions(offset):
    generator = DefaultAnchorGenerator(
        sizes=[[16, 24], [64]], aspect_ratios=[0.5, 1.0, 2.0], strides=[8, 16], offset=offset
    )
    maps = [torch.zeros(2, 4, 7, 5), torch.zeros(2, 4, 3, 9)]
    found = grid_anchors(generator, maps)
    for anchors, expected in zip(found, generator(maps), strict=True):
        assert torch.equal(anchors, expected.tensor)
    prediction = torch.rand(2, 3 * 4, 5, 6)
    assert torch.equal(per_anchor(prediction, 4), permute_to_N_HWA_K(prediction, 4))


@given(seed=SEEDS)
def test_clip(seed):
    boxes = random_boxes(seed, 2, 20) - 100
    sizes = torch.tensor([[200, 500], [480, 90]])
    found = clip(boxes, sizes)
    for image, size in enumerate(sizes.tolist()):
        expected = Boxes(boxes[image].clone())
        expected.clip(tuple(size))
        assert torch.equal(found[image], expected.tensor)


@given(
    seed=SEEDS, number=st.integers(1, 40), groups=st.integers(1, 12), threshold=st.sampled_from([0.0, 0.3, 0.5, 0.7])
)
def test_suppression_is_nms_of_each_image_and_group(seed, number, groups, threshold):
    generator = torch.Generator().manual_seed(seed)
    boxes = random_boxes(seed, 3, number, side=120.0) - 50  # also left of the image
    scores = torch.rand(3, number, generator=generator)
    scores[torch.rand(3, number, generator=generator) < 0.2] = NO_BOX
    group = torch.randint(groups, (3, number), generator=generator)
    found = suppress(boxes, scores, group, groups, threshold)
    expected = torch.full_like(scores, NO_BOX)
    for image in range(3):
        for value in range(groups):
            rows = ((group[image] == value) & (scores[image] > NO_BOX)).nonzero()[:, 0]
            kept = rows[nms(boxes[image, rows], scores[image, rows], threshold)]
            expected[image, kept] = scores[image, kept]
    overlaps = box_iou(boxes.flatten(0, 1), boxes.flatten(0, 1))
    if (overlaps - threshold).abs()[overlaps > 0].min() > 1e-4:  # else a rounding decides
        assert torch.equal(found, expected)


def test_suppression_of_few_boxes():
    scores = torch.full((1, 3), NO_BOX)
    for number in (0, 1):
        scores[0, :number] = 0.5
        assert torch.equal(suppress(torch.zeros(1, 3, 4), scores, torch.zeros(3, dtype=torch.int64), 1, 0.5), scores)
    boxes, scores = torch.tensor([[[90.0, 0.0, 100.0, 10.0], [10.0, 0.0, 20.0, 10.0]]]), torch.tensor([[0.9, 0.8]])
    assert torch.equal(suppress(boxes, scores, torch.tensor([0, 1]), 2, 0.5), scores)  # at opposite edges


def test_suppression_keeps_pixels_apart_at_the_size_of_coco():
    """80 classes on 1333 px: the IoU of shifted boxes is that of the boxes."""
    first = torch.tensor([100.0, 100.0, 110.0, 110.0])
    second = torch.tensor([100.0, 100.0, 110.0, 105.01])  # IoU 0.501
    boxes = torch.stack((first, second, torch.tensor([0.0, 0.0, 1333.0, 800.0])))[None]
    for group in range(80):
        scores = torch.tensor([[0.9, 0.8, 0.7]])
        groups = torch.tensor([group, group, (group + 1) % 80])
        assert suppress(boxes, scores, groups, 80, 0.5).tolist()[0][1] == NO_BOX
        assert suppress(boxes, scores, groups, 80, 0.502).tolist()[0][1] > 0


@given(seed=SEEDS, rows=st.integers(1, 9), count=st.integers(1, 12))
def test_top(seed, rows, count):
    scores = torch.rand(2, rows, generator=torch.Generator().manual_seed(seed))
    found, index = top(scores, count)
    expected = torch.full((2, count), NO_BOX)
    expected[:, : min(rows, count)] = scores.sort(1, descending=True).values[:, :count]
    assert torch.equal(found, expected)
    assert torch.equal(take(scores[:, :, None], index)[:, :rows, 0], expected[:, :rows])


@given(seed=SEEDS, canonical=st.sampled_from([(224, 4), (56, 4), (224, 3)]))
def test_levels(seed, canonical):
    pooler = ROIPooler(7, (1 / 4, 1 / 8, 1 / 16, 1 / 32), 0, "ROIAlignV2", *canonical)
    boxes = random_boxes(seed, 1, 60, largest=900.0)[0]
    sides = ((boxes[:, 2:] - boxes[:, :2]).prod(1).sqrt() / canonical[0]).double().log2()
    boxes = boxes[(sides - sides.round()).abs() > 1e-6]  # else a rounding decides
    expected = assign_boxes_to_levels([Boxes(boxes)], 2, 5, *canonical)
    assert torch.equal(assign_levels(pooler, boxes), expected)
    sides = canonical[0] * torch.tensor([0.0, 0.4999, 0.5, 1.0, 2.0, 99.0])
    at = [min(max(canonical[1] + step, 2), 5) - 2 for step in (-9, -2, -1, 0, 1, 9)]
    assert assign_levels(pooler, torch.stack((sides * 0, sides * 0, sides, sides), 1)).tolist() == at


@pytest.mark.parametrize("kind", ["ROIAlign", "ROIAlignV2"])
@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("levels", [1, 3])
def test_pooling(kind, ratio, levels):
    scales = [1 / 2**level for level in range(3, 3 + levels)]
    pooler = ROIPooler(7, scales, ratio, kind)
    maps = [torch.rand(2, 5, math.ceil(512 * scale), math.ceil(640 * scale)) for scale in scales]
    boxes = random_boxes(0, 2, 30)
    boxes[0, 3] = 0  # a row without a box
    expected = pooler(maps, [Boxes(each) for each in boxes])
    assert torch.equal(pool(pooler, maps, image_rois(boxes)), expected)
