"""examples/openvino_detect.cpp compiles, and finds what ONNX Runtime finds."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import openvino
import pytest
import torch
from PIL import Image

from gw_detectron.workbench.export import export_detector
from gw_detectron.workbench.export.detector import detect
from gw_detectron.workbench.export.formats import open_onnx

from ...tiny_run import ROOT
from .tiny_networks import build_detector, needs_export

SOURCE = ROOT / "examples" / "openvino_detect.cpp"


@pytest.mark.slow
@needs_export
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_program_finds_what_onnx_runtime_finds(tmp_path):
    package, program = Path(openvino.__file__).parent, tmp_path / "detect"
    # the Python package brings headers and libraries
    (library,) = (package / "libs").glob("libopenvino.so.*")
    flags = [
        "-std=c++17",
        f"-I{package / 'include'}",
        f"-L{library.parent}",
        f"-l:{library.name}",
    ]
    subprocess.run(
        ["g++", SOURCE, *flags, f"-Wl,-rpath,{library.parent}", "-o", program],
        check=True,
    )
    model = build_detector("mask")
    export_detector(model, tmp_path / "out", sides=(96, 200), file_format="onnx")
    path, image = tmp_path / "out" / "model.onnx", tmp_path / "image.ppm"
    pixels = np.random.default_rng(0).integers(0, 256, (140, 180, 3), np.uint8)
    Image.fromarray(pixels).save(image)
    expected = {}
    for order, ordered in (("RGB", pixels), ("BGR", pixels[:, :, ::-1].copy())):
        (result,) = detect(
            open_onnx(path), [torch.from_numpy(ordered).permute(2, 0, 1).float()]
        )
        assert len(result) > 3
        expected[order] = np.column_stack(
            [result.pred_classes, result.scores, result.pred_boxes.tensor]
        )
        done = subprocess.run(
            [program, path, image, order], capture_output=True, text=True, check=True
        )
        found = np.array([line.split() for line in done.stdout.splitlines()], float)
        assert np.allclose(found, expected[order], atol=2e-2)
    assert not np.array_equal(expected["RGB"], expected["BGR"])
    image.write_text("P6 2 2 255\nabc")
    done = subprocess.run([program, path, image, "RGB"], capture_output=True, text=True)
    assert done.returncode == 1 and "shorter than its size" in done.stderr
