"""Exported backbones give the numbers of the model."""

import hashlib
import json
import math

import pytest
import torch
from torch.export.passes import move_to_device_pass

from gw_detectron.errors import ConfigError, ExportError, FileAccessError
from gw_detectron.norms.listing import norm_rows
from gw_detectron.weights import Preprocessing
from gw_detectron.workbench.export import FeatureExtractor, export_backbone
from gw_detectron.workbench.export.backbone import TOLERANCE, compare_features

from .tiny_networks import needs_export, open_exported, tiny_backbone

PYRAMID = ["p2", "p3", "p4", "p5", "p6"]


def relative(found, expected):
    return max(
        (a - b).abs().max().item() / b.abs().max().item()
        for a, b in zip(found, expected, strict=True)
    )


def features_of(network, images):
    with torch.no_grad():
        return list(network.eval()(images).values())


def pixels_of(*shape):
    return 255 * torch.rand(*shape, generator=torch.Generator().manual_seed(7))


def normalized(pixels):
    mean, std = (
        torch.tensor([123.675, 116.28, 103.53]),
        torch.tensor([58.395, 57.12, 57.375]),
    )
    return ((pixels.permute(0, 2, 3, 1) - mean) / std).permute(0, 3, 1, 2).contiguous()


# format; norms of the ResNet, at its whitening positions, and of the FPN
@needs_export
@pytest.mark.parametrize(
    ("file_format", "norm", "whiten", "fpn"),
    [
        ("pt2", "FrozenBN", "GW:groups=4", "GN:groups=4"),
        ("onnx", "GN:groups=2", "GW:groups=4", "BN"),
        pytest.param(
            "pt2",
            "BN",
            "GW:groups=4,solver=zca",
            "GW:groups=2,solver=zca",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pt2",
            "GW:groups=2,eps=0",
            "BW:channels=5,rotation=cayley",
            "SyncBN",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "onnx",
            "BW:channels=5,solver=zca",
            "GW:groups=4,solver=pivoted_cholesky",
            "",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_program_agrees_at_all_sizes(
    tmp_path, preprocessing, run_alone, file_format, norm, whiten, fpn
):
    network, folder = tiny_backbone(norm, whiten, fpn, num_stages=2), tmp_path / "out"
    takes_pixels, tolerance = (
        file_format == "onnx",
        1e-5 if file_format == "pt2" else 1e-4,
    )
    report = export_backbone(
        network,
        folder,
        preprocessing,
        pixels=takes_pixels,
        file_format=file_format,
    )
    rows = norm_rows(network)
    assert report["norm_layers"] == {
        row.spec: sum(row.spec == each.spec for each in rows) for row in rows
    }
    file = open_exported(folder / report["file"])
    for batch, height, width in ((1, 96, 160), (4, 192, 128)):
        pixels = pixels_of(batch, 3, height, width)
        found = file.run(pixels if takes_pixels else normalized(pixels))
        assert relative(found, features_of(network, normalized(pixels))) < tolerance
    pixels = pixels_of(2, 3, 128, 96)
    outputs = run_alone(
        folder / report["file"], pixels if takes_pixels else normalized(pixels)
    )
    assert relative(outputs, features_of(network, normalized(pixels))) < tolerance


@needs_export
def test_sizes_and_devices_of_pt2(tmp_path, preprocessing):
    network = tiny_backbone(fpn=None, num_stages=2)
    export_backbone(network, tmp_path / "out", preprocessing)
    program = torch.export.load(tmp_path / "out" / "backbone.pt2")
    images = normalized(pixels_of(1, 3, 37, 75))  # a ResNet without FPN takes any size
    assert relative(program.module()(images), features_of(network, images)) < 1e-5
    with pytest.raises(AssertionError, match="Guard failed"):
        program.module()(images[:, :, :4])
    moved = move_to_device_pass(program, "meta").module()
    assert all(
        feature.is_meta for feature in moved(torch.empty(2, 3, 96, 128, device="meta"))
    )


@needs_export
def test_onnx_has_no_eigendecomposition(tmp_path, preprocessing):
    network = tiny_backbone("BN", "GW:groups=4,solver=zca", None, num_stages=1)
    with pytest.raises(
        ExportError, match=r"ONNX cannot express.*linalg_eigh.*Fix: use pt2"
    ):
        export_backbone(network, tmp_path / "out", preprocessing, file_format="onnx")
    assert list(tmp_path.iterdir()) == []


def test_the_report(tmp_path, preprocessing, quick_file):
    quick_file()
    network = tiny_backbone()
    before = {
        name: value.clone() for name, value in network.train().state_dict().items()
    }
    source = {"weights": "model.pth"}
    report = export_backbone(network, tmp_path / "out", preprocessing, source=source)
    assert json.loads((tmp_path / "out" / "parity.json").read_text()) == json.loads(
        json.dumps(report)
    )
    assert len({(case["height"], case["width"]) for case in report["cases"]}) == 2
    assert [case["batch"] for case in report["cases"]] == [1, 1, 3, 3]
    for case in report["cases"]:
        assert list(case["levels"]) == list(report["outputs"]) == PYRAMID
        assert case["levels"]["p3"]["shape"] == [
            case["batch"],
            8,
            case["height"] // 8,
            case["width"] // 8,
        ]
        assert all(level["relative"] <= TOLERANCE for level in case["levels"].values())
    assert {"python", "torch", "detectron2", "onnxruntime"} <= set(report["versions"])
    assert report["source"] == source
    assert (
        report["sha256"]
        == hashlib.sha256((tmp_path / "out" / "backbone.pt2").read_bytes()).hexdigest()
    )
    # the model stays as it is
    assert all(
        torch.equal(before[name], value) for name, value in network.state_dict().items()
    )
    assert all(module.training for module in network.modules())
    assert all(parameter.requires_grad for parameter in network.parameters())


@pytest.mark.parametrize(
    ("error", "refused"), [(2e-3, True), (math.nan, True), (5e-4, False)]
)
def test_a_difference_stops_the_export(
    tmp_path, preprocessing, quick_file, error, refused
):
    quick_file(
        lambda outputs: {name: values * (1 + error) for name, values in outputs.items()}
    )
    if refused:
        with pytest.raises(ExportError, match="p2 .*differs"):
            export_backbone(tiny_backbone(), tmp_path / "out", preprocessing)
        assert list(tmp_path.iterdir()) == []
    else:
        report = export_backbone(tiny_backbone(), tmp_path / "out", preprocessing)
        assert report["worst_relative"] == pytest.approx(5e-4, rel=0.01)
    with pytest.raises(ExportError, match="p2"):
        compare_features("p2", torch.ones(2, 1), torch.ones(1, 2))


@pytest.mark.parametrize(
    "values",
    [
        ("L", (0.0,) * 3, (1.0,) * 3),
        ("RGB", (0.0,), (1.0,) * 3),
        ("YUV-BT.601", (), ()),
    ],
)
def test_a_preprocessing_of_another_number_of_channels(values):
    with pytest.raises(ConfigError, match="INPUT.FORMAT"):
        FeatureExtractor(tiny_backbone(fpn=None), Preprocessing(*values, False))


def test_an_unknown_format_and_a_folder_of_the_user_are_refused(
    tmp_path, preprocessing
):
    with pytest.raises(ExportError, match=r"file_format \('tflite'\)"):
        export_backbone(
            tiny_backbone(fpn=None),
            tmp_path / "out",
            preprocessing,
            file_format="tflite",
        )
    (tmp_path / "backbone.pt2").touch()  # the user's
    with pytest.raises(FileAccessError, match=r"but no parity\.json"):
        export_backbone(tiny_backbone(fpn=None), tmp_path, preprocessing)
