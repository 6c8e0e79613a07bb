"""Whole detectors as programs find what Detectron2's own inference finds."""

import contextlib
import copy
import io
import json

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from PIL import Image

from gw_detectron.errors import ExportError, RecordError, UserError
from gw_detectron.export import EvaluationImages, detector, export_detector, read_image_for
from gw_detectron.export.detection import accuracy, check_detections
from gw_detectron.export.detector import detector_program
from gw_detectron.export.exported_file import ExportedFile, open_exported
from gw_detectron.layers import use_backend

from .tiny_networks import build_detector, detector_config, eager, noise, padded

needs_export = pytest.mark.skipif(
    torch.__version__ < torch.torch_version.TorchVersion("2.13"), reason="torch.export excludes image sizes before 2.13"
)
NAMES = {"mask": ["boxes", "scores", "classes", "masks", "count"], "retinanet": ["boxes", "scores", "classes", "count"]}
SCENES = ("gw_synthetic_val", 3)
TOLERANCES = {"boxes": 1e-2, "scores": 1e-4, "classes": 0, "masks": 1e-3}
SIZES = [[(130, 161)], [(200, 140), (97, 222)], [(129, 129), (160, 160), (140, 288)]]
# config keys of detectors that are compared without an export
VARIANTS = {
    "faster": ("mask", {"MODEL__MASK_ON": False}),
    "class-agnostic": (
        "mask",
        {"MODEL__ROI_BOX_HEAD__CLS_AGNOSTIC_BBOX_REG": True, "MODEL__ROI_MASK_HEAD__CLS_AGNOSTIC_MASK": True},
    ),
    "ROIAlign": (
        "mask",
        {
            "MODEL__ROI_BOX_HEAD__POOLER_TYPE": "ROIAlign",
            "MODEL__ROI_BOX_HEAD__POOLER_SAMPLING_RATIO": 2,
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
    "whitened": ("mask", {"whiten": "GW:groups=4", "fpn": "BW:channels=8"}),
    "few proposals": ("mask", {"MODEL__RPN__POST_NMS_TOPK_TEST": 3, "MODEL__PROPOSAL_GENERATOR__MIN_SIZE": 8}),
    "many candidates": ("mask", {"MODEL__RPN__PRE_NMS_TOPK_TEST": 1000, "MODEL__RPN__POST_NMS_TOPK_TEST": 300}),
    "GWRetinaNet": ("retinanet", {"MODEL__META_ARCHITECTURE": "GWRetinaNet", "MODEL__RETINANET__NORM": "GW:groups=4"}),
    "RetinaNet of many candidates": ("retinanet", {"MODEL__RETINANET__TOPK_CANDIDATES_TEST": 2000}),
}


def check(outputs, model, images):
    """Compare the rows of each image with Detectron2's detections, and the rows behind them with zeros."""
    boxes, scores, classes, *_, count = outputs.values()
    assert classes.dtype == count.dtype == torch.int64
    for image, expected in enumerate(eager(model, images)):
        number = len(expected["scores"])
        assert count[image] == number
        for name, values in expected.items():
            found = outputs[name][image, :number]
            assert torch.allclose(found.double(), values.double(), atol=TOLERANCES[name], rtol=0), name
        assert not boxes[image, number:].any() and not scores[image, number:].any()
        assert (classes[image, number:] == -1).all()
        if "masks" in outputs:
            assert not outputs["masks"][image, number:].any()


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


@pytest.mark.parametrize("detections", [1, 5, 500])
def test_the_number_of_rows(detections):
    model = build_detector("mask")
    program, images = detector_program(model, detections), noise((129, 160))
    outputs = run_program(program, images)
    assert outputs["masks"].shape == (1, detections, 28, 28)
    assert check_detections(program, ExportedFile(program, program.describe()), images[0])["unmatched"] == 0
    model.roi_heads.box_predictor.test_topk_per_image = detections
    check(outputs, model, images)


def test_a_detector_that_finds_nothing_is_refused(tmp_path):
    model = build_detector("retinanet")
    model.test_score_thresh = 1.0
    with pytest.raises(ExportError, match=r"^image: the detector finds nothing in it.*Fix: give another image"):
        export_detector(model, tmp_path / "out", file_format="torchscript")
    assert list(tmp_path.iterdir()) == []


class Exported:
    """A file, and how its user calls it."""

    def __init__(self, kind, file_format, folder):
        self.kind, self.model, self.folder = kind, build_detector(kind), folder
        with use_backend("reference"):
            self.report = export_detector(self.model, folder, file_format=file_format, sides=(96, 200))
        self.path = folder / self.report["file"]
        if file_format == "onnx":
            self.load_onnx(str(self.path))
            return
        loaded = torch.export.load(self.path).module() if file_format == "pt2" else torch.jit.load(self.path)
        self.call = lambda images, sizes: loaded(images, sizes)
        self.threshold = loaded.state_dict()["score_threshold"]

    def in_openvino(self):
        """Return the same ONNX file, run by OpenVINO."""
        twin = copy.copy(self)
        twin.load_onnx = twin.load_openvino
        twin.load_onnx(str(self.path))
        return twin

    def load_openvino(self, file):
        core = openvino.Core()
        precision = {"INFERENCE_PRECISION_HINT": "f32"}  # else bf16 where the processor has it
        model = core.compile_model(
            core.read_model(io.BytesIO(file) if isinstance(file, bytes) else file), "CPU", precision
        )
        self.call = lambda images, sizes: [
            torch.from_numpy(model({"images": images.numpy(), "sizes": sizes.numpy()})[name].copy())
            for name in NAMES[self.kind]
        ]

    def load_onnx(self, file):
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        self.call = lambda images, sizes: [
            torch.from_numpy(each)
            for each in session.run(NAMES[self.kind], {"images": images.numpy(), "sizes": sizes.numpy()})
        ]

    def __call__(self, images, sizes):
        with torch.no_grad():
            return dict(zip(NAMES[self.kind], self.call(images, sizes), strict=True))

    @contextlib.contextmanager
    def score_threshold(self, value):
        """Change the threshold inside the file, so that it finds fewer objects."""
        call = self.call
        if self.path.suffix == ".onnx":
            content = onnx.load(self.path)
            (stored,) = [each for each in content.graph.initializer if each.name == "score_threshold"]
            stored.CopyFrom(onnx.numpy_helper.from_array(np.float32(value), "score_threshold"))
            self.load_onnx(content.SerializeToString())
        else:
            before = self.threshold.item()
            self.threshold.fill_(value)
        yield
        self.call = call
        if self.path.suffix != ".onnx":
            self.threshold.fill_(before)


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    files = {}

    def export(kind, file_format):
        if (kind, file_format) not in files:
            if file_format == "openvino":
                files[kind, file_format] = export(kind, "onnx").in_openvino()
            else:
                files[kind, file_format] = Exported(kind, file_format, tmp_path_factory.mktemp("detector") / "out")
        return files[kind, file_format]

    return export


@pytest.fixture(
    params=[
        pytest.param(("mask", "torchscript"), id="mask-torchscript"),
        pytest.param(("mask", "pt2"), id="mask-pt2", marks=needs_export),
        pytest.param(("mask", "onnx"), id="mask-onnx", marks=needs_export),
        pytest.param(("mask", "openvino"), id="mask-openvino", marks=needs_export),
        pytest.param(("retinanet", "torchscript"), id="retinanet-torchscript"),
        pytest.param(("retinanet", "pt2"), id="retinanet-pt2", marks=[needs_export, pytest.mark.slow]),
        pytest.param(("retinanet", "onnx"), id="retinanet-onnx", marks=[needs_export, pytest.mark.slow]),
        pytest.param(("retinanet", "openvino"), id="retinanet-openvino", marks=[needs_export, pytest.mark.slow]),
    ],
    scope="session",
)
def file(request, exported):
    return exported(*request.param)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_file_agrees_at_all_batch_and_image_sizes(file, sizes):
    images = noise(*sizes)
    check(file(*padded(images)), file.model, images)


def test_no_detection_and_one(file):
    inputs = padded(noise((140, 180)))
    scores = file(*inputs)["scores"][0]
    assert scores[1] < scores[0]
    for number, threshold in ((0, 1.0), (1, (scores[0] + scores[1]).item() / 2)):
        with file.score_threshold(threshold):
            outputs = file(*inputs)
        assert outputs["count"].tolist() == [number]
        assert (outputs["classes"][0] >= 0).sum() == number
        assert torch.allclose(outputs["scores"][0, :number], scores[:number])
    assert file(*inputs)["count"] > 1  # the file is as before


@pytest.mark.parametrize("size", [(141, 180), (140, 181), (0, 180), (140, -3)])
def test_impossible_sizes_are_refused(file, size):
    images, sizes = padded(noise((140, 180)) * 2)
    sizes[0] = torch.tensor(size)
    if file.path.suffix == ".pt2":
        with pytest.raises(RuntimeError, match=r"^sizes: not positive, or outside of images. Fix: "):
            file(images, sizes)
        return
    outputs = file(images, sizes)
    assert outputs["count"][0] == -1 and outputs["count"][1] > 0
    assert not outputs["boxes"][0].any() and (outputs["classes"][0] == -1).all()


@pytest.mark.parametrize("kind", [pytest.param("pt2", marks=needs_export), pytest.param("onnx", marks=needs_export)])
@pytest.mark.parametrize(
    ("shape", "dtype", "sizes"),
    [
        ((1, 4, 160, 160), torch.float32, [[160, 160]]),
        ((1, 3, 160, 160), torch.float64, [[160, 160]]),
        ((2, 3, 160, 160), torch.float32, [[160, 160]]),
        ((0, 3, 160, 160), torch.float32, []),
    ],
    ids=["channels", "dtype", "batch", "empty batch"],
)
def test_inputs_that_do_not_fit_are_errors(exported, kind, shape, dtype, sizes):
    file = exported("mask", kind)
    with pytest.raises(Exception, match=r"Guard failed|expected scalar type|out of range|ONNXRuntimeError"):
        file(torch.rand(shape, dtype=dtype), torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2))


def test_sides_below_the_smallest(file):
    images, smallest = noise((16, 160)), file.report["input"]["smallest_side"]
    assert open_exported(file.path).description["input"]["smallest_side"] == smallest
    if file.path.suffix == ".pt2":
        assert smallest == 17
        with pytest.raises(AssertionError, match="Guard failed"):
            file(*padded(images))
    else:  # a graph of operations has no guards
        assert smallest == 1
        for images in (noise((16, 160)), noise((1, 33)), noise((1, 1))):
            check(file(*padded(images)), file.model, images)


def test_the_report(file):
    assert sorted(path.name for path in file.folder.iterdir()) == sorted(["README.md", file.path.name, "parity.json"])
    report = json.loads((file.folder / "parity.json").read_text())
    assert report == json.loads(json.dumps(file.report))
    assert report["input"]["channels"] == "RGB" and len(report["input"]["pixel_mean"]) == 3
    assert report["outputs"] == NAMES[file.kind] and report["detections"] == 12
    assert [len(case["sizes"]) for case in report["cases"]] == [
        1,
        1,
        1,
        1,
        2,
    ]  # and no black image, where it finds objects
    assert len({tuple(case["sizes"][0]) for case in report["cases"]}) == 4
    assert report["detections_compared"] == sum(
        each["detections"] for case in report["cases"] for each in case["differences"]
    )
    assert report["detections_compared"] > 10
    assert report["unmatched"] <= 0.02 * report["detections_compared"]
    assert all(value < 0.01 for value in report["worst"].values())


def test_the_readme_runs_without_detectron2(file, run_readme):
    torch_too = ("torch", "torchvision") if file.path.suffix == ".onnx" else ()
    printed = run_readme(file.folder, forbid=("gw_detectron", "detectron2", "fvcore", *torch_too))
    assert "boxes (1, 12, 4)" in printed and "count (1,)" in printed
    assert "200 pixels: do the same." in (file.folder / "README.md").read_text()


def test_the_model_stays_as_it_is(tmp_path):
    model = build_detector("retinanet").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    export_detector(model, tmp_path / "out", file_format="torchscript")  # without sides, the README names none
    assert "do the same" not in (tmp_path / "out" / "README.md").read_text()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"file_format": "tflite"}, r"file_format \('tflite'\): unknown. Fix: use one of pt2, onnx, torchscript"),
        ({"detections": 0}, r"detections \(0\): expected at least 1"),
        ({"image": torch.zeros(1, 40, 40)}, r"image \(\(1, 40, 40\)\): expected the shape \(3, H, W\)"),
    ],
)
def test_arguments_out_of_range(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        export_detector(build_detector("mask"), tmp_path / "out", **arguments)
    assert isinstance(caught.value, UserError)


def test_unlimited_detections_need_a_number(tmp_path):
    model = build_detector("mask", TEST__DETECTIONS_PER_IMAGE=-1)
    with pytest.raises(ExportError, match=r"detections \(-1\): expected at least 1"):
        export_detector(model, tmp_path / "out")
    assert detector_program(model, 7).detections == 7


def test_the_ap_of_model_and_file(tmp_path, small_dataset, capsys):
    cfg, model = detector_config("mask"), build_detector("mask")
    evaluation = EvaluationImages.load(cfg, "gw_synthetic_val", 2)
    report = export_detector(model, tmp_path / "out", file_format="torchscript", evaluation=evaluation)
    assert capsys.readouterr().out == ""  # where `export --json` prints
    accuracy = json.loads((tmp_path / "out" / "parity.json").read_text())["accuracy"]
    assert accuracy == report["accuracy"]
    assert (accuracy["dataset"], accuracy["images"]) == ("gw_synthetic_val", 2)
    assert list(accuracy["model"]) == ["bbox", "segm"]
    assert accuracy["exported"] == pytest.approx(accuracy["model"], abs=1e-6)


def test_detections_are_compared_on_the_image_with_the_most(tmp_path, small_dataset, monkeypatch):
    model, evaluation = build_detector("retinanet"), EvaluationImages.load(detector_config("retinanet"), *SCENES)
    monkeypatch.setattr(detector, "synthetic_images", lambda _: [Image.new("RGB", (130, 130))])
    compared = []

    def check(program, _, image):
        compared.append(len(program.expected([image])[0]))
        raise ExportError("image: enough for this test. Fix: none.")

    monkeypatch.setattr(detector, "check_detections", check)
    with pytest.raises(ExportError, match="enough"):
        export_detector(model, tmp_path / "out", file_format="torchscript", evaluation=evaluation)
    program = detector_program(model)
    found = [len(program.expected([program.evaluation_image(item).float()])[0]) for item in evaluation.inputs]
    assert compared[0] >= max(found) > 0


def test_a_damaged_image_of_the_dataset_is_named(small_dataset, tmp_path):
    register_coco_instances("broken", {}, str(tmp_path / "broken.json"), str(tmp_path))
    image = {"id": 1, "file_name": "a.jpg", "width": 64, "height": 64}
    content = {"images": [image], "annotations": [], "categories": [{"id": 1, "name": "a"}]}
    (tmp_path / "broken.json").write_text(json.dumps(content))
    (tmp_path / "a.jpg").write_bytes(b"no image")
    try:
        with pytest.raises(RecordError, match=r"a.jpg': cannot be used: .* Fix: repair the image"):
            EvaluationImages.load(detector_config("retinanet"), "broken", 1)
    finally:
        DatasetCatalog.pop("broken")
        MetadataCatalog.pop("broken")


def test_another_ap_is_an_error(tmp_path, small_dataset, monkeypatch):
    results = iter([{"bbox": {"AP": 30.0}}, {"bbox": {"AP": 30.2}}])
    monkeypatch.setattr(accuracy.COCOEvaluator, "evaluate", lambda *args, **kwargs: next(results))
    evaluation = EvaluationImages.load(detector_config("retinanet"), "gw_synthetic_val", 1)
    with pytest.raises(ExportError, match=r"bbox AP 30.20 on 1 images of gw_synthetic_val, the model's is 30.00"):
        export_detector(build_detector("retinanet"), tmp_path / "out", file_format="torchscript", evaluation=evaluation)
    assert not (tmp_path / "out").exists()


@needs_export
@pytest.mark.slow
def test_images_below_the_smallest_side_are_padded_for_pt2(tmp_path, small_dataset):
    evaluation = EvaluationImages.load(detector_config("retinanet"), "gw_synthetic_val", 2)  # below 129 pixels
    assert min(evaluation.inputs[0]["image"].shape[1:]) < 129
    model = build_detector("retinanet")
    model.test_score_thresh = 0.4  # nearly nothing is found: AP stays the same
    report = export_detector(model, tmp_path / "out", evaluation=evaluation)
    assert report["accuracy"]["images"] == 2


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [
        ("gw_synthetic_vla", 3, r"dataset \('gw_synthetic_vla'\): not registered. Similar: gw_synthetic_val"),
        ("gw_synthetic_val", 0, r"images \(0\): expected at least 1"),
    ],
)
def test_a_dataset_that_cannot_be_used(name, count, message):
    with pytest.raises(ValueError, match=message):
        EvaluationImages.load(detector_config("mask"), name, count)


def test_an_image_is_read_as_in_evaluation(tmp_path):
    cfg = detector_config("mask")
    Image.fromarray(np.full((40, 80, 3), (250, 20, 10), np.uint8)).save(tmp_path / "red.png")
    image = read_image_for(cfg, tmp_path / "red.png")
    assert image.shape == (3, 128, 256)
    assert image[:, 0, 0].tolist() == [250, 20, 10]
    cfg = cfg.clone()
    cfg.INPUT.FORMAT = "BGR"
    assert read_image_for(cfg, tmp_path / "red.png")[:, 0, 0].tolist() == [10, 20, 250]


def test_what_is_no_image(tmp_path):
    cfg = detector_config("mask")
    with pytest.raises(FileNotFoundError, match="image .*red.png.*: file not found"):
        read_image_for(cfg, tmp_path / "red.png")
    (tmp_path / "red.png").write_text("red")
    with pytest.raises(ValueError, match="red.png.*cannot be read: "):
        read_image_for(cfg, tmp_path / "red.png")


@pytest.mark.parametrize("key", ["INPUT.MIN_SIZE_TEST", "INPUT.MAX_SIZE_TEST"])
def test_a_negative_size_is_refused(tmp_path, key):
    Image.fromarray(np.zeros((40, 80, 3), np.uint8)).save(tmp_path / "black.png")
    cfg = detector_config("mask").clone()
    cfg.merge_from_list([key, -5])
    with pytest.raises(ValueError, match=rf"^{key} \(-5\): expected at least \d. Fix: "):
        read_image_for(cfg, tmp_path / "black.png")
