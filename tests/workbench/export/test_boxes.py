"""The plain tensor code between a detector's modules, against Detectron2's and torchvision's own."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.ops import box_iou, nms

from gw_detectron.workbench.export.base import NO_BOX, suppress


def random_boxes(seed, images, number, side=600.0, largest=300.0):
    generator = torch.Generator().manual_seed(seed)
    corners = side * torch.rand(images, number, 2, generator=generator)
    sides = largest * torch.rand(images, number, 2, generator=generator) ** 2
    return torch.cat((corners, corners + sides), 2)


@given(
    st.integers(0, 2**31),
    st.integers(1, 40),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.3, 0.5, 0.7]),
)
def test_suppression_is_nms_of_each_image_and_group(seed, number, groups, threshold):
    generator = torch.Generator().manual_seed(seed)
    boxes = random_boxes(seed, 3, number, side=120.0) - 50  # also left of the image
    scores = torch.rand(3, number, generator=generator)
    scores[torch.rand(3, number, generator=generator) < 0.2] = NO_BOX
    group = torch.randint(groups, (3, number), generator=generator)

    found = suppress(boxes, scores, group, groups, threshold)

    expected = torch.full_like(scores, NO_BOX)
    for image, value in itertools.product(range(3), range(groups)):
        is_member = (group[image] == value) & (scores[image] > NO_BOX)
        rows = is_member.nonzero()[:, 0]
        order = nms(boxes[image, rows], scores[image, rows], threshold)
        kept = rows[order]
        expected[image, kept] = scores[image, kept]
    flat = boxes.flatten(0, 1)
    overlaps = box_iou(flat, flat)
    gaps = (overlaps - threshold).abs()[overlaps > 0]
    if gaps.min() > 1e-4:  # else a rounding decides
        assert torch.equal(found, expected)


def test_suppression_keeps_pixels_apart_at_the_size_of_coco():
    """80 classes on 1333 px: the IoU of shifted boxes is that of the boxes."""
    first = torch.tensor([100.0, 100.0, 110.0, 110.0])
    second = torch.tensor([100.0, 100.0, 110.0, 105.01])  # IoU 0.501
    image = torch.tensor([0.0, 0.0, 1333.0, 800.0])
    boxes = torch.stack((first, second, image))[None]
    scores = torch.tensor([[0.9, 0.8, 0.7]])
    for group in range(80):
        groups = torch.tensor([group, group, (group + 1) % 80])
        below = suppress(boxes, scores, groups, 80, 0.5)
        above = suppress(boxes, scores, groups, 80, 0.502)
        assert below[0, 1] == NO_BOX
        assert above[0, 1] > 0
