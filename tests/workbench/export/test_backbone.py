"""Exported backbones give the numbers of the model."""

import copy
import hashlib
import json
import math
from collections import Counter

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
    ratios = []
    for a, b in zip(found, expected, strict=True):
        difference = (a - b).abs().max()
        ratios.append(float(difference / b.abs().max()))
    return max(ratios)


def features_of(network, images):
    with torch.no_grad():
        return list(network.eval()(images).values())


def pixels_of(*shape):
    return 255 * torch.rand(*shape, generator=torch.Generator().manual_seed(7))


def normalized(pixels):
    mean = torch.tensor([123.675, 116.28, 103.53])[:, None, None]
    std = torch.tensor([58.395, 57.12, 57.375])[:, None, None]
    return (pixels - mean) / std


# format; norms of the ResNet, at its whitening positions, and of the FPN
@needs_export
@pytest.mark.parametrize(
    ("file_format", "norm", "whiten", "fpn"),
    [
        ("pt2", "FrozenBN", "GW:groups=4", "GN:groups=4"),
        ("onnx", "GN:groups=2", "GW:groups=4", "BN"),
        ("onnx", "MixBN", "MixGW:alpha=0.3,groups=4", "GN:groups=4"),
        ("pt2", "MixGW:alpha=0,mean=0.3", "MixGW:groups=4", "GN:groups=4"),
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
    network = tiny_backbone(norm, whiten, fpn, num_stages=2)
    folder = tmp_path / "out"
    tolerance = 1e-4 if file_format == "onnx" else 1e-5

    report = export_backbone(
        network,
        folder,
        preprocessing,
        file_format=file_format,
    )

    path = folder / report["file"]
    assert report["norm_layers"] == Counter(row.spec for row in norm_rows(network))
    file = open_exported(path)
    runs = (
        ((1, 3, 96, 160), file.run),
        ((4, 3, 192, 128), file.run),
        ((2, 3, 128, 96), lambda images: run_alone(path, images)),
    )
    for shape, run in runs:
        pixels = pixels_of(*shape)
        expected = features_of(network, normalized(pixels))
        assert relative(run(pixels), expected) < tolerance


@needs_export
def test_sizes_and_devices_of_pt2(tmp_path, preprocessing):
    network = tiny_backbone(fpn=None, num_stages=2)
    export_backbone(network, tmp_path / "out", preprocessing)
    program = torch.export.load(tmp_path / "out" / "backbone.pt2")

    pixels = pixels_of(1, 3, 37, 75)  # a ResNet without FPN takes any size
    expected = features_of(network, normalized(pixels))
    assert relative(program.module()(pixels), expected) < 1e-5
    with pytest.raises(AssertionError, match="Guard failed"):
        program.module()(pixels[:, :, :4])

    moved = move_to_device_pass(program, "meta").module()
    for feature in moved(torch.empty(2, 3, 96, 128, device="meta")):
        assert feature.is_meta


@needs_export
def test_onnx_has_no_eigendecomposition(tmp_path, preprocessing):
    network = tiny_backbone("BN", "GW:groups=4,solver=zca", None, num_stages=1)
    with pytest.raises(
        ExportError, match=r"ONNX cannot express.*linalg_eigh.*Fix: use pt2"
    ):
        export_backbone(network, tmp_path / "out", preprocessing, file_format="onnx")
    assert list(tmp_path.iterdir()) == []


def test_the_report(tmp_path, preprocessing, quick_file):
    network = tiny_backbone()
    source = {"weights": "model.pth"}
    report = export_backbone(network, tmp_path / "out", preprocessing, source=source)

    written = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert written == json.loads(json.dumps(report))
    assert list(report["outputs"]) == PYRAMID
    assert [case["batch"] for case in report["cases"]] == [1, 1, 3, 3]
    sizes = {(case["height"], case["width"]) for case in report["cases"]}
    assert len(sizes) == 2
    for case in report["cases"]:
        assert list(case["levels"]) == PYRAMID
        height, width = case["height"] // 8, case["width"] // 8
        assert case["levels"]["p3"]["shape"] == [case["batch"], 8, height, width]
        for level in case["levels"].values():
            assert level["relative"] <= TOLERANCE
    assert {"python", "torch", "detectron2", "onnxruntime"} <= set(report["versions"])
    assert report["source"] == source
    content = (tmp_path / "out" / "backbone.pt2").read_bytes()
    assert report["sha256"] == hashlib.sha256(content).hexdigest()


def test_the_model_stays_as_it_is(tmp_path, preprocessing, quick_file):
    network = tiny_backbone().train()
    before = copy.deepcopy(network.state_dict())

    export_backbone(network, tmp_path / "out", preprocessing)

    for name, value in network.state_dict().items():
        assert torch.equal(before[name], value)
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
    network = tiny_backbone()
    if refused:
        with pytest.raises(ExportError, match="p2 .*differs"):
            export_backbone(network, tmp_path / "out", preprocessing)
        assert list(tmp_path.iterdir()) == []
    else:
        report = export_backbone(network, tmp_path / "out", preprocessing)
        assert report["worst_relative"] == pytest.approx(5e-4, rel=0.01)


def test_another_shape_is_a_difference():
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
