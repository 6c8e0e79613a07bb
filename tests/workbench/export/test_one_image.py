"""A detector that takes one image of any size: resizing, detection and masks are those of Detectron2."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from detectron2.data.transforms import ResizeShortestEdge
from detectron2.layers import paste_masks_in_image
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gw_detectron.errors import ExportError
from gw_detectron.workbench.export.detector import check_detections, reference_cases
from gw_detectron.workbench.export.formats import ExportedFile, write_program
from gw_detectron.workbench.export.meta_arch import detector_program
from gw_detectron.workbench.export.one_image import (
    OneImageProgram,
    ResizeProgram,
    paste,
    resized_sides,
)
from gw_detectron.workbench.images import channels_first

from .tiny_networks import build_detector, needs_export, noise

SIDES = (128, 256)
SIZES = [(97, 150), (200, 140), (30, 300), (128, 128), (3, 800)]


@given(
    st.integers(2, 4000),
    st.integers(2, 4000),
    st.integers(2, 900),
    st.integers(2, 1400),
)
def test_the_sides_of_evaluation(height, width, shorter, longest):
    found = resized_sides(torch.tensor([height, width]), shorter, longest).tolist()
    resize = ResizeShortestEdge([shorter, shorter], longest).get_transform(
        np.broadcast_to(0, (height, width, 3))
    )

    by_shorter = Fraction(shorter, min(height, width))
    by_longest = Fraction(longest, max(height, width))
    scale = min(by_shorter, by_longest)
    expected = (resize.new_h, resize.new_w)
    for side, ours, theirs in zip((height, width), found, expected, strict=True):
        is_tie = (scale * side).denominator == 2  # their floats may fall below it
        assert 0 <= ours - max(2, theirs) <= is_tie


@pytest.mark.parametrize(
    ("size", "sides", "differing"),
    [
        ((100, 150), (200, 300), 0),
        ((145, 169), (128, 1333), 5e-3),
        ((480, 640), (128, 1333), 1e-2),
        ((224, 224), (128, 1333), 2e-2),
        ((90, 400), (800, 512), 2e-2),
    ],
)
def test_pixels_are_resized_as_by_pillow(size, sides, differing):
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    program = OneImageProgram(detector_program(build_detector("retinanet")), sides)

    found = program.resize(channels_first(pixels))

    height, width = found.shape[1:]
    assert [height, width] == resized_sides(torch.tensor(size), *sides).tolist()
    resized = Image.fromarray(pixels).resize((width, height), Image.BILINEAR)
    difference = (found - channels_first(np.asarray(resized))).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() <= differing


def test_pasted_masks():
    generator = torch.Generator().manual_seed(0)
    masks = torch.rand(40, 28, 28, generator=generator)
    corners = torch.rand(40, 2, 2, generator=generator).sort(1).values
    corners *= torch.tensor([90.0, 61.0])
    extremes = torch.tensor([[3.2, 4.1, 3.6, 60.0], [0.0, 0.0, 90.0, 61.0]])
    boxes = torch.cat((corners.flatten(1), extremes))
    masks = torch.cat((masks, masks[:2]))

    found = paste(masks, boxes, 61, 90)

    assert found.dtype == torch.bool
    assert found.any(dim=(1, 2)).sum() > 30
    assert torch.equal(found, paste_masks_in_image(masks, boxes, (61, 90)))
    assert paste(masks[:0], boxes[:0], 61, 90).shape == (0, 61, 90)


@pytest.mark.parametrize("kind", ["mask", "retinanet"])
@pytest.mark.parametrize("size", SIZES[:4])
def test_the_program_of_one_image(kind, size):
    model, (image,) = build_detector(kind), noise(size)
    program = OneImageProgram(
        detector_program(model), SIDES, paste_masks=kind == "mask"
    )
    boxes, scores, classes, *masks, count = program(image)
    inputs = {"image": program.resize(image), "height": size[0], "width": size[1]}
    with torch.no_grad():
        expected = model([inputs])[0]["instances"]  # boxes scaled back, masks pasted
    assert count == len(expected) > 1
    assert torch.allclose(boxes[:count], expected.pred_boxes.tensor, atol=1e-2, rtol=0)
    assert torch.allclose(scores[:count], expected.scores, atol=1e-4, rtol=0)
    assert torch.equal(classes[:count], expected.pred_classes)
    assert not boxes[count:].any()
    assert (classes[count:] == -1).all()
    for pasted in masks:
        assert pasted.dtype == torch.bool
        differing = (pasted ^ expected.pred_masks).sum()
        assert differing <= 1e-4 * pasted.sum()


def test_a_narrow_image_and_one_without_detections():
    detector = detector_program(build_detector("mask"))
    program = OneImageProgram(detector, SIDES, paste_masks=True)
    # padded to what the backbone takes
    boxes, _, _, masks, count = program(noise((3, 800))[0])
    assert count > 0
    assert masks.shape == (count, 3, 800)
    assert (boxes >= 0).all()
    assert (boxes <= torch.tensor([800, 3, 800, 3])).all()

    detector.score_threshold.fill_(1.0)
    *_, masks, count = program(noise((97, 150))[0])
    assert count == 0
    assert masks.shape == (0, 97, 150)


def test_programs_of_one_image_that_are_refused():
    detector = detector_program(build_detector("mask"))
    with pytest.raises(ExportError, match=r"paste_masks \(True\): .* no masks"):
        OneImageProgram(
            detector_program(build_detector("retinanet")), SIDES, paste_masks=True
        )
    assert detector.smallest_side == 17  # padded more than in Detectron2 below
    for sides in ((16, 256), (128, 16)):
        with pytest.raises(ExportError, match="^INPUT.MIN_SIZE_TEST"):
            OneImageProgram(detector, sides)


@needs_export
@pytest.mark.parametrize(
    "file_format", ["pt2", pytest.param("onnx", marks=pytest.mark.slow)]
)
def test_a_file_of_any_image_size(tmp_path, file_format):
    program = OneImageProgram(
        detector_program(build_detector("mask")), SIDES, paste_masks=True
    )
    file = write_program(program, tmp_path / f"model.{file_format}")
    for size in SIZES:
        image = noise(size)[0].round()
        with torch.no_grad():
            *_, masks, count = file.run(image)
            assert count == program(image)[-1]
        assert masks.shape == (count, *size)

    only = ResizeProgram(program.detector, SIDES)
    resize = write_program(only, tmp_path / f"resize.{file_format}")
    cases = reference_cases(program, noise((97, 150))[0], resize)
    report = check_detections(file, cases)
    assert report["unmatched"] == 0
    assert report["worst"]["resized_pixels"] < 0.05


@pytest.mark.parametrize(
    ("share", "message"), [(0.05, ""), (0.2, "resized_pixels differ")]
)
def test_a_runtime_that_rounds_some_pixels_differently(share, message):
    """Detections are compared on its pixels, so that only another rounding of too many pixels is a fault."""

    class Rounding:
        def resize(self, image):
            pixels = super().resize(image)
            generator = torch.Generator().manual_seed(0)
            changed = torch.rand(pixels.shape, generator=generator) < share
            return pixels + torch.where(pixels < 255, changed, 0)

    class Rounded(Rounding, OneImageProgram): ...

    class RoundedPixels(Rounding, ResizeProgram): ...

    detector = detector_program(build_detector("mask", "GW:groups=4", "GW:groups=4"))
    program, (image,) = OneImageProgram(detector, SIDES), noise((97, 150))
    file, resize = Rounded(detector, SIDES), RoundedPixels(detector, SIDES)
    file, resize = (ExportedFile(each, each.describe()) for each in (file, resize))
    with pytest.raises(ExportError, match="differ"):  # on the program's own pixels
        check_detections(file, reference_cases(program, image))
    cases = reference_cases(program, image, resize)
    if message:
        with pytest.raises(ExportError, match=message):
            check_detections(file, cases)
    else:
        worst = check_detections(file, cases)["worst"]
        assert worst["boxes"] < 1e-3
        assert worst["resized_pixels"] == pytest.approx(share**0.5, rel=0.05)
