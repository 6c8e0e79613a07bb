import dataclasses
import hashlib
import json
import math
import resource
import sys

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.export.passes import move_to_device_pass

from gw_detectron.errors import ExportError, FileAccessError, ParityError, UserError
from gw_detectron.export import TOLERANCE, Normalization, export_backbone
from gw_detectron.export.parity import compare
from gw_detectron.layers import GroupWhitening2d
from gw_detectron.norms.norm_listing import norm_rows

needs_export = pytest.mark.skipif(
    torch.__version__ < torch.torch_version.TorchVersion("2.13"), reason="torch.export excludes image sizes before 2.13"
)
PACKAGES = ("gw_detectron", "detectron2", "fvcore", "torchvision")
PYRAMID = ["p2", "p3", "p4", "p5", "p6"]
# norms of the ResNet, at its whitening positions, and of the FPN
MIXTURES = [
    ("BN", "GW:groups=4", "GW:groups=4"),
    ("FrozenBN", "GW:groups=8,iters=3", ""),
    ("GN:groups=2", "GN:groups=4", "GN:groups=8"),
    ("GW:groups=2", "FrozenBN", "BN"),
    ("SyncBN", "GW:groups=4,eps=0", None),
    ("BN", "GW:groups=4,solver=zca", "GW:groups=2,solver=zca"),
    ("BW:channels=5,rotation=cayley", "GW:groups=4,solver=pivoted_cholesky", "BW:channels=4,running=covariance"),
]


def relative(found, expected):
    return max((a - b).abs().max().item() / b.abs().max().item() for a, b in zip(found, expected, strict=True))


def features_of(backbone, images):
    was_training = backbone.training
    with torch.no_grad():
        features = list(backbone.eval()(images).values())
    backbone.train(was_training)
    return features


def pixels_of(*shape):
    return 255 * torch.rand(*shape, generator=torch.Generator().manual_seed(7))


def normalized(pixels):
    mean, std = torch.tensor([123.675, 116.28, 103.53]), torch.tensor([58.395, 57.12, 57.375])
    return ((pixels.permute(0, 2, 3, 1) - mean) / std).permute(0, 3, 1, 2).contiguous()


def images_of(*shape):
    return normalized(pixels_of(*shape))


def saved(folder, names=PYRAMID):
    return [torch.from_numpy(np.load(folder.parent / f"{name}.npy")) for name in names]


@pytest.mark.parametrize(("norm", "whiten", "fpn"), MIXTURES)
def test_torchscript(tmp_path, tiny_backbone, normalization, norm, whiten, fpn):
    backbone = tiny_backbone(norm, whiten, fpn, num_stages=2)
    report = export_backbone(backbone, tmp_path / "out", normalization, file_format="torchscript")
    loaded = torch.jit.load(tmp_path / "out" / "backbone.ts")
    for batch, height, width in ((1, 96, 160), (2, 192, 128)):
        images = images_of(batch, 3, height, width)
        assert relative(loaded(images), features_of(backbone, images)) < 1e-5
    assert "deprecated" in report["deprecated"]
    assert report["norm_layers"] == {
        spec: sum(row.spec == spec for row in norm_rows(backbone)) for spec in {row.spec for row in norm_rows(backbone)}
    }


@needs_export
def test_pt2(tmp_path, tiny_backbone, normalization, run_readme):
    backbone, folder = tiny_backbone("FrozenBN", "GW:groups=4", "GN:groups=4", num_stages=2), tmp_path / "out"
    export_backbone(backbone, folder, normalization, file_format="pt2")
    program = torch.export.load(folder / "backbone.pt2")
    loaded = program.module()
    for batch, height, width in ((1, 96, 160), (4, 192, 128)):
        images = images_of(batch, 3, height, width)
        assert relative(loaded(images), features_of(backbone, images)) < 1e-5
    for height, width in ((100, 96), (96, 16)):  # not a multiple of 8, and below the smallest side
        with pytest.raises(AssertionError, match="Guard failed"):
            loaded(images_of(1, 3, height, width))
    # the program moves to another device as its README says
    moved = move_to_device_pass(program, "meta").module()
    assert all(feature.is_meta for feature in moved(torch.empty(2, 3, 96, 128, device="meta")))
    # in a process that can import neither this package nor Detectron2
    check_readme(run_readme, folder, backbone, PYRAMID[:3], PACKAGES)


@needs_export
@pytest.mark.slow
def test_pt2_holds_an_eigendecomposition(tmp_path, tiny_backbone, normalization):
    backbone = tiny_backbone("BN", "GW:groups=4,solver=zca", None)
    export_backbone(backbone, tmp_path / "out", normalization, file_format="pt2")
    loaded = torch.export.load(tmp_path / "out" / "backbone.pt2").module()
    for batch, height, width in ((1, 37, 75), (3, 64, 130)):  # a ResNet without FPN takes any size
        images = images_of(batch, 3, height, width)
        assert relative(loaded(images), features_of(backbone, images)) < 1e-5


@needs_export
@pytest.mark.slow
def test_onnx_holds_batch_whitening_and_cholesky(tmp_path, tiny_backbone, normalization):
    """Running matrices are constants, and elimination is arithmetic."""
    backbone = tiny_backbone("BW:channels=5,solver=zca", "GW:groups=4,solver=pivoted_cholesky", None)
    report = export_backbone(backbone, tmp_path / "out", normalization, file_format="onnx")
    assert report["worst_relative"] < 1e-5
    assert {spec.partition(":")[0] for spec in report["norm_layers"]} == {"BW", "GW"}


def check_readme(run_readme, folder, backbone, names=PYRAMID, forbid=()):
    """Compare the outputs of the README's code with the model's."""
    pixels = pixels_of(2, 3, 128, 96)
    run_readme(folder, forbid=forbid, pixels=pixels)
    assert relative(saved(folder, names), features_of(backbone, normalized(pixels))) < 1e-5


def test_a_resnet_without_its_fpn(tmp_path, tiny_backbone, normalization):
    backbone = tiny_backbone()
    report = export_backbone(backbone, tmp_path / "out", normalization, file_format="torchscript", fpn=False)
    assert (report["input"]["multiple_of"], report["input"]["smallest_side"]) == (1, 1)
    assert list(report["outputs"]) == ["res2", "res3", "res4", "res5"]
    loaded = torch.jit.load(tmp_path / "out" / "backbone.ts")
    for size in ((37, 75), (1, 33), (1, 1)):
        images = images_of(1, 3, *size)
        assert relative(loaded(images), features_of(backbone.bottom_up, images)) < 1e-5


@needs_export
def test_onnx(tmp_path, tiny_backbone, normalization, run_readme):
    backbone, folder = tiny_backbone("GN:groups=2", "GW:groups=4", "BN", num_stages=2), tmp_path / "out"
    names = PYRAMID[:3]
    takes_pixels = dataclasses.replace(normalization, inside=True)
    report = export_backbone(backbone, folder, takes_pixels, file_format="onnx")
    session = onnxruntime.InferenceSession(folder / "backbone.onnx", providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == names
    assert session.get_inputs()[0].shape == ["N", 3, "H", "W"]
    assert report["opset"] >= 18
    for batch, height, width in ((1, 96, 160), (1, 192, 128), (4, 96, 160), (4, 192, 128)):
        pixels = pixels_of(batch, 3, height, width)
        found = [torch.from_numpy(feature) for feature in session.run(names, {"images": pixels.numpy()})]
        assert relative(found, features_of(backbone, normalized(pixels))) < 1e-4
    # in a process that cannot import torch
    pixels = pixels_of(2, 3, 128, 96)
    printed = run_readme(folder, forbid=("torch", *PACKAGES), pixels=pixels)
    assert "p2 (2, 8, 32, 24)" in printed
    assert relative(saved(folder, names), features_of(backbone, normalized(pixels))) < 1e-4


@needs_export
def test_onnx_has_no_eigendecomposition(tmp_path, tiny_backbone, normalization):
    backbone = tiny_backbone("BN", "GW:groups=4,solver=zca", None)
    with pytest.raises(
        ExportError, match=r"no operator for linalg_eigh, used by 5 layers \(stem.conv1.norm, .*zca.*Fix: use pt2"
    ):
        export_backbone(backbone, tmp_path / "out", normalization, file_format="onnx")
    assert list(tmp_path.iterdir()) == []


def test_the_report(tmp_path, tiny_backbone, normalization):
    report = export_backbone(
        tiny_backbone(), tmp_path / "out", normalization, file_format="torchscript", source={"weights": "model.pth"}
    )
    assert json.loads((tmp_path / "out" / "parity.json").read_text()) == json.loads(json.dumps(report))
    sizes = {(case["height"], case["width"]) for case in report["cases"]}
    assert {(case["batch"], case["height"], case["width"]) for case in report["cases"]} == {
        (batch, *size) for batch in (1, 3) for size in sizes
    }
    assert len(sizes) == 2
    for case in report["cases"]:
        assert list(case["levels"]) == PYRAMID
        assert case["levels"]["p3"]["shape"] == [case["batch"], 8, case["height"] // 8, case["width"] // 8]
        assert all(level["relative"] <= TOLERANCE for level in case["levels"].values())
    assert {"python", "torch", "detectron2", "onnxruntime"} <= set(report["versions"])
    assert report["source"] == {"weights": "model.pth"}
    path = tmp_path / "out" / "backbone.ts"
    assert report["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    extra = {"gw_detectron.json": ""}
    torch.jit.load(path, _extra_files=extra)
    assert json.loads(extra["gw_detectron.json"])["outputs"] == report["outputs"]


class OneSizeOnly(nn.Module):
    """A backbone whose trace is wrong: it scales p4 at the size used for tracing only."""

    def __init__(self, backbone, error):
        super().__init__()
        self.backbone, self.error = backbone, error
        self.size_divisibility = backbone.size_divisibility
        self.output_shape = backbone.output_shape

    def forward(self, images):
        features = self.backbone(images)
        if images.shape[-2] == 128:
            features["p4"] = features["p4"] * (1 + self.error)
        return features


def test_a_difference_stops_the_export(tmp_path, tiny_backbone, normalization):
    with pytest.raises(ParityError, match=r"exported file: p4 differs .* by 2.0e-03 .* 0.001; nothing was"):
        export_backbone(OneSizeOnly(tiny_backbone(), 2e-3), tmp_path / "out", normalization, file_format="torchscript")
    assert list(tmp_path.iterdir()) == []
    report = export_backbone(
        OneSizeOnly(tiny_backbone(), 5e-4), tmp_path / "out", normalization, file_format="torchscript"
    )
    assert report["worst_relative"] == pytest.approx(5e-4, rel=0.01)


def test_features_that_are_nan_in_the_file_alone_are_a_difference():
    with pytest.raises(ParityError, match="p2 differs from the model's by nan"):
        compare("p2", torch.full((2,), torch.nan), torch.ones(2))


def test_weights_that_are_nan_are_not_exported(tmp_path, tiny_backbone, normalization):
    backbone = tiny_backbone()
    nn.init.constant_(backbone.fpn_output4.norm.bias, float("nan"))
    with pytest.raises(ExportError, match="p4 holds NaN or infinity"):
        export_backbone(backbone, tmp_path / "out", normalization, file_format="torchscript")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file_format", ["torchscript", "safetensors", pytest.param("pt2", marks=pytest.mark.slow)])
def test_a_full_disk_leaves_the_earlier_export(tmp_path, tiny_backbone, normalization, file_format):
    """The size limit of files fails a write as a full disk does, at which torch may abort the process."""
    backbone = tiny_backbone(fpn=None, num_stages=1)
    earlier = export_backbone(backbone, tmp_path / "out", normalization, file_format=file_format)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(FileAccessError, match=r"out'\): was not written: File too large.* Fix: free disk space"):
            export_backbone(backbone, tmp_path / "out", normalization, file_format=file_format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert json.loads((tmp_path / "out" / "parity.json").read_text()) == json.loads(json.dumps(earlier))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("L", (0.0,), (1.0,)), r"INPUT.FORMAT \('L'\)"),
        (("RGB", (0.0,), (1.0,)), r"MODEL.PIXEL_MEAN \(\(0.0,\)\): expected three finite numbers"),
        (("RGB", (0.0, 0.0, math.nan), (1.0, 1.0, 1.0)), "MODEL.PIXEL_MEAN"),
        (("BGR", (0.0, 0.0, 0.0), (1.0, 0.0, 1.0)), "MODEL.PIXEL_STD .*not 0 for a std. Fix: "),
    ],
)
def test_a_normalization_that_gives_no_numbers_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Normalization(*values)


def test_the_model_stays_as_it_is(tmp_path, tiny_backbone, normalization):
    backbone = tiny_backbone().train()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    export_backbone(backbone, tmp_path / "out", normalization, file_format="torchscript")
    assert all(torch.equal(before[name], value) for name, value in backbone.state_dict().items())
    assert all(module.training for module in backbone.modules())
    assert all(parameter.requires_grad for parameter in backbone.parameters())
    assert any(isinstance(module, GroupWhitening2d) for module in backbone.modules())


def test_images_without_variance(tmp_path, tiny_backbone, normalization, run_readme):
    backbone, folder = tiny_backbone(whiten="GW:groups=4,eps=0", fpn="GW:groups=4,eps=0"), tmp_path / "out"
    export_backbone(backbone, folder, normalization, file_format="torchscript")
    images = torch.zeros(1, 3, 96, 96)
    found = torch.jit.load(folder / "backbone.ts")(images)
    assert relative(found, features_of(backbone, images)) < 1e-5
    check_readme(run_readme, folder, backbone)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"file_format": "tflite"}, r"file_format \('tflite'\): unknown. Fix: use one of pt2, onnx, torchscript, safe"),
        ({"layout": "mmdet"}, r"layout \('mmdet'\): unknown. Fix: use one of detectron2, torchvision, timm"),
        ({"layout": "timm"}, "pt2 has no layouts"),
        ({"fpn": True}, "a ResNet without FPN"),
    ],
)
def test_arguments_out_of_range(tmp_path, tiny_backbone, normalization, arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        export_backbone(tiny_backbone(fpn=None), tmp_path / "out", normalization, **arguments)
    assert isinstance(caught.value, UserError)


def test_a_missing_package_is_named(tmp_path, tiny_backbone, normalization, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"not installed: onnxscript. Fix: pip install onnxscript$"):
        export_backbone(tiny_backbone(), tmp_path / "out", normalization, file_format="onnx")


def test_an_earlier_export_is_replaced(tmp_path, tiny_backbone, normalization):
    folder = tmp_path / "out"
    first = export_backbone(tiny_backbone(), folder, normalization, file_format="torchscript")
    with pytest.raises(ParityError):
        export_backbone(OneSizeOnly(tiny_backbone(), 1), folder, normalization, file_format="torchscript")
    assert json.loads((folder / "parity.json").read_text())["sha256"] == first["sha256"]
    second = export_backbone(tiny_backbone(fpn=""), folder, normalization, file_format="torchscript")
    assert json.loads((folder / "parity.json").read_text())["sha256"] == second["sha256"] != first["sha256"]
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "backbone.ts", "parity.json"]
    with pytest.raises(
        FileExistsError, match=r"holds backbone.ts, which is not part of an earlier result \(backbone.safe"
    ):
        export_backbone(tiny_backbone(), folder, normalization, file_format="safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
