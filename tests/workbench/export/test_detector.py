"""Whole detectors as programs find what Detectron2's own inference finds."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from detectron2.modeling import build_model
from PIL import Image
from torch import nn

from gw_detectron.errors import ExportError
from gw_detectron.layers import use_backend
from gw_detectron.workbench.export import detector, export_detector, read_image_for
from gw_detectron.workbench.export.meta_arch import detector_program

from .tiny_networks import (
    build_detector,
    detector_config,
    eager,
    needs_export,
    noise,
    open_exported,
    padded,
)

NAMES = {
    "mask": ["boxes", "scores", "classes", "masks", "count"],
    "retinanet": ["boxes", "scores", "classes", "count"],
}
TOLERANCES = {"boxes": 1e-2, "scores": 1e-4, "classes": 0, "masks": 1e-3}
SIDES = (96, 200)
SIZES = [[(130, 161)], [(200, 140), (97, 222)], [(129, 129), (160, 160), (140, 288)]]
# config keys of detectors that are compared without an export
VARIANTS = {
    "Faster R-CNN": (
        "mask",
        {"MODEL__MASK_ON": False, "whiten": "GW:groups=4", "fpn": "BW:channels=8"},
    ),
    "class-agnostic, ROIAlign": (
        "mask",
        {
            "MODEL__ROI_BOX_HEAD__CLS_AGNOSTIC_BBOX_REG": True,
            "MODEL__ROI_BOX_HEAD__POOLER_TYPE": "ROIAlign",
            "MODEL__ROI_BOX_HEAD__POOLER_SAMPLING_RATIO": 2,
            "MODEL__ROI_MASK_HEAD__CLS_AGNOSTIC_MASK": True,
            "MODEL__ROI_MASK_HEAD__POOLER_TYPE": "ROIAlign",
        },
    ),
    "Detectron2's heads": (
        "mask",
        {
            "MODEL__ROI_BOX_HEAD__NAME": "FastRCNNConvFCHead",
            "MODEL__ROI_BOX_HEAD__NORM": "GN",
            "MODEL__ROI_BOX_HEAD__CONV_DIM": 32,
            "MODEL__ROI_MASK_HEAD__NAME": "MaskRCNNConvUpsampleHead",
            "MODEL__ROI_MASK_HEAD__NORM": "",
        },
    ),
    "few proposals": (
        "mask",
        {"MODEL__RPN__POST_NMS_TOPK_TEST": 3, "MODEL__PROPOSAL_GENERATOR__MIN_SIZE": 8},
    ),
    "many candidates": (
        "mask",
        {"MODEL__RPN__PRE_NMS_TOPK_TEST": 1000, "MODEL__RPN__POST_NMS_TOPK_TEST": 300},
    ),
    "GWRetinaNet": (
        "retinanet",
        {
            "MODEL__META_ARCHITECTURE": "GWRetinaNet",
            "MODEL__RETINANET__NORM": "GW:groups=4",
        },
    ),
    "RetinaNet of many candidates": (
        "retinanet",
        {"MODEL__RETINANET__TOPK_CANDIDATES_TEST": 2000},
    ),
}


def check(outputs, model, images):
    """Compare the rows of each image with Detectron2's detections, and the rows behind them with zeros."""
    count = outputs["count"]
    assert outputs["classes"].dtype == count.dtype == torch.int64
    for image, expected in enumerate(eager(model, images)):
        number = len(expected["scores"])
        assert count[image] == number
        for name, values in expected.items():
            found = outputs[name][image, :number]
            assert torch.allclose(
                found.double(), values.double(), atol=TOLERANCES[name], rtol=0
            ), name
        for name, values in outputs.items():
            empty = -1 if name == "classes" else 0
            if name != "count":
                assert (values[image, number:] == empty).all()


def run_program(program, images):
    with torch.no_grad():
        return dict(zip(program.names, program(*padded(images)), strict=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_program_of_a_detector(name):
    kind, changes = VARIANTS[name]
    model = build_detector(kind, **changes)
    program = detector_program(model)
    found = 0
    for sizes in SIZES:
        images = noise(*sizes)
        check(run_program(program, images), model, images)
        found += sum(len(each["scores"]) for each in eager(model, images))
    assert found > 10


@pytest.mark.parametrize("detections", [1, 500])
def test_the_number_of_rows(detections):
    model = build_detector("mask", TEST__DETECTIONS_PER_IMAGE=-1)
    with pytest.raises(ExportError, match=r"TEST\.DETECTIONS_PER_IMAGE \(-1\)"):
        detector_program(model)
    model.roi_heads.box_predictor.test_topk_per_image = detections
    program, images = detector_program(model), noise((129, 160))
    outputs = run_program(program, images)
    assert outputs["masks"].shape == (1, detections, 28, 28)
    check(outputs, model, images)


class Exported:
    """An exported file, and how its user calls it."""

    def __init__(self, kind, file_format, folder):
        self.kind, self.model, self.folder = kind, build_detector(kind), folder
        with use_backend("reference"):
            self.report = export_detector(
                self.model, folder, file_format=file_format, sides=SIDES
            )
        self.path = folder / self.report["file"]
        self.call = self.load()

    def load(self, score_threshold=None):
        """Load the file, with another threshold inside it, if given."""
        if self.path.suffix == ".pt2":
            program = torch.export.load(self.path)
            if score_threshold is not None:
                program.state_dict["score_threshold"].fill_(score_threshold)
            return program.module()
        content = onnx.load(self.path)
        if score_threshold is not None:
            (stored,) = [
                each
                for each in content.graph.initializer
                if each.name == "score_threshold"
            ]
            stored.CopyFrom(
                onnx.numpy_helper.from_array(
                    np.float32(score_threshold), "score_threshold"
                )
            )
        session = onnxruntime.InferenceSession(
            content.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        return lambda images, sizes: [
            torch.from_numpy(each)
            for each in session.run(
                NAMES[self.kind], {"images": images.numpy(), "sizes": sizes.numpy()}
            )
        ]

    def __call__(self, images, sizes, call=None):
        with torch.no_grad():
            return dict(
                zip(NAMES[self.kind], (call or self.call)(images, sizes), strict=True)
            )


@pytest.fixture(
    params=[
        ("mask", "pt2"),
        ("mask", "onnx"),
        pytest.param(("retinanet", "pt2"), marks=pytest.mark.slow),
        pytest.param(("retinanet", "onnx"), marks=pytest.mark.slow),
    ],
    ids="-".join,
    scope="module",
)
def file(request, tmp_path_factory):
    return Exported(*request.param, tmp_path_factory.mktemp("detector") / "out")


@needs_export
def test_a_file_agrees_at_all_batch_and_image_sizes(file):
    for sizes in SIZES:
        images = noise(*sizes)
        check(file(*padded(images)), file.model, images)


@needs_export
def test_no_detection_and_one(file):
    inputs = padded(noise((140, 180)))
    scores = file(*inputs)["scores"][0]
    assert scores[1] < scores[0]
    middle = float(scores[:2].mean())
    for number, threshold in ((0, 1.0), (1, middle)):
        outputs = file(*inputs, file.load(threshold))
        assert outputs["count"].tolist() == [number]
        assert (outputs["classes"] >= 0).sum() == number
        assert torch.allclose(outputs["scores"][0, :number], scores[:number])


@needs_export
@pytest.mark.parametrize("size", [(141, 180), (0, 180), (140, -3)])
def test_impossible_sizes_are_refused(file, size):
    images, sizes = padded(noise((140, 180)) * 2)
    sizes[0] = torch.tensor(size)
    if file.path.suffix == ".pt2":
        with pytest.raises(
            RuntimeError, match=r"^sizes: not positive, or outside of images"
        ):
            file(images, sizes)
        return
    outputs = file(images, sizes)
    assert outputs["count"][0] == -1
    assert outputs["count"][1] > 0
    assert not outputs["boxes"][0].any()
    assert (outputs["classes"][0] == -1).all()


@needs_export
def test_sides_below_the_smallest(file):
    smallest = file.report["input"]["smallest_side"]
    assert open_exported(file.path).description["input"]["smallest_side"] == smallest
    if file.path.suffix == ".pt2":
        assert smallest == 17
        with pytest.raises(AssertionError, match="Guard failed"):
            file(*padded(noise((16, 160))))
    else:  # a graph of operations has no guards
        assert smallest == 1
        for images in (noise((16, 160)), noise((1, 33)), noise((1, 1))):
            check(file(*padded(images)), file.model, images)


@needs_export
def test_the_report_and_a_file_alone(file, run_alone):
    assert {path.name for path in file.folder.iterdir()} == {
        file.path.name,
        "parity.json",
    }
    report = json.loads((file.folder / "parity.json").read_text())
    assert report == json.loads(json.dumps(file.report))
    assert report["input"]["channels"] == "RGB"
    assert len(report["input"]["pixel_mean"]) == 3
    assert report["outputs"] == NAMES[file.kind]
    assert report["detections"] == 12
    assert [len(case["sizes"]) for case in report["cases"]] == [1, 1, 1, 2]
    assert report["detections_compared"] > 10
    assert report["unmatched"] <= 0.02 * report["detections_compared"]
    assert all(value < 0.01 for value in report["worst"].values())
    assert report["resized_in_evaluation"] == {"shorter": 96, "longer_at_most": 200}

    images = noise((160, 192))
    outputs = run_alone(file.path, *padded(images))
    check(dict(zip(NAMES[file.kind], outputs, strict=True)), file.model, images)


def shifted_if_large(boxes):
    """Shift by 0.06 pixels what stays the same detection by its IoU."""
    sides = boxes[..., 2:] - boxes[..., :2]
    is_large = sides.amin(-1, keepdim=True) > 8
    return boxes + 0.06 * is_large


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda outputs: outputs | {"boxes": shifted_if_large(outputs["boxes"])},
            "boxes differ",
        ),
        (
            lambda outputs: outputs | {"scores": outputs["scores"] * 1.01},
            "scores differ",
        ),
        (
            lambda outputs: outputs | {"masks": outputs["masks"] * float("nan")},
            "masks differ .* by nan",
        ),
        (
            lambda outputs: outputs | {"classes": outputs["classes"] + 1},
            "detections differ",
        ),
        (
            lambda outputs: outputs | {"count": outputs["count"] - 1},
            "detections differ",
        ),
    ],
)
def test_a_difference_stops_the_export(tmp_path, quick_file, change, message):
    quick_file(change)
    with pytest.raises(ExportError, match=message):
        export_detector(build_detector("mask"), tmp_path / "out", sides=SIDES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"file_format": "tflite"}, r"file_format \('tflite'\)"),
        ({"paste_masks": True}, r"paste_masks \(True\): .*--one-image"),
        ({"classes": {1: "disk"}}, r"classes \(1 given\): the model has 6 classes"),
    ],
)
def test_arguments_out_of_range(tmp_path, arguments, message):
    with pytest.raises(ExportError, match=message):
        options = {"sides": SIDES, **arguments}
        export_detector(build_detector("mask"), tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [{"sides": SIDES}, {"one_image": True, "sides": (0, 999)}],
    ids=["batch", "one image, not resized"],
)
def test_a_detector_of_gray_images(tmp_path, quick_file, options):
    model = build_detector(
        "mask", INPUT__FORMAT="L", MODEL__PIXEL_MEAN=[110.0], MODEL__PIXEL_STD=[58.0]
    )
    convolution = model.backbone.bottom_up.stem.conv1
    convolution.weight = nn.Parameter(convolution.weight.sum(1, keepdim=True))
    convolution.in_channels = 1
    report = export_detector(model, tmp_path / "gray", **options)
    assert report["input"]["shape"][-3:] == [1, "H", "W"]
    assert report["input"]["channels"] == "L"
    assert report["detections_compared"] > 20


def test_an_image_without_detections_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(detector, "write_program", None)  # which takes minutes
    model = build_detector("retinanet")
    model.test_score_thresh = 1.0
    with pytest.raises(ExportError, match=r"^image: the detector finds nothing in it"):
        export_detector(model, tmp_path / "out", sides=SIDES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "part",
    [
        "backbone",
        "proposal_generator.anchor_generator",
        "roi_heads",
        "roi_heads.mask_head",
    ],
)
def test_other_parts_are_refused(part):
    """A subclass of an exported part may compute something else; subclasses of FPN are called as they are."""
    model = build_detector("mask")
    if part == "backbone":
        model.backbone = nn.Identity()
    else:
        module = model.get_submodule(part)
        module.__class__ = type("Identity", (type(module),), {})
    with pytest.raises(ExportError, match=rf"^model\.{part} \('Identity'\)"):
        detector_program(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "MODEL__ROI_HEADS__NAME": "CascadeROIHeads",
                "MODEL__ROI_BOX_HEAD__CLS_AGNOSTIC_BBOX_REG": True,
            },
            "CascadeROIHeads",
        ),
        ({"MODEL__KEYPOINT_ON": True}, r"MODEL.KEYPOINT_ON \(True\)"),
        (
            {"MODEL__ROI_BOX_HEAD__POOLER_TYPE": "ROIPool"},
            r"model.roi_heads.box_pooler.level_poolers.0 \('RoIPool'\)",
        ),
        (
            {"MODEL__PROPOSAL_GENERATOR__NAME": "PrecomputedProposals"},
            r"proposal_generator \('NoneType'\)",
        ),
    ],
)
def test_other_detectors_are_refused(changes, message):
    with pytest.raises(ExportError, match=message):
        detector_program(build_model(detector_config("mask", **changes)))


def test_images_are_read_as_in_evaluation(tmp_path):
    path = tmp_path / "red.png"
    Image.new("RGB", (80, 40), (250, 20, 10)).save(path)
    cfg = detector_config("mask", INPUT__FORMAT="BGR")

    image = read_image_for(cfg, path)

    assert image.shape == (3, 128, 256)
    assert image[:, 0, 0].tolist() == [10, 20, 250]
