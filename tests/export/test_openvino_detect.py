"""examples/openvino_detect.cpp compiles, and finds what ONNX Runtime finds."""

import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import openvino
import pytest
import torch
from PIL import Image

from gw_detectron.export import export_detector
from gw_detectron.installation import find_compiler

from .test_detector import needs_export
from .tiny_networks import build_detector

SOURCE = Path(__file__).parents[2] / "examples" / "openvino_detect.cpp"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The compiled program; OpenVINO's Python package brings headers and libraries."""
    package = Path(openvino.__file__).parent
    (library,) = (package / "libs").glob("libopenvino.so.*")
    program = tmp_path_factory.mktemp("program") / "detect"
    flags = ["-std=c++17", f"-I{package / 'include'}", f"-L{library.parent}", f"-l:{library.name}"]
    command = ["g++", str(SOURCE), *flags, f"-Wl,-rpath,{library.parent}", "-o", str(program)]
    subprocess.run(command, check=True)
    return program


@pytest.mark.slow
@needs_export
@pytest.mark.skipif("g++" not in (find_compiler() or ""), reason="no g++")
def test_the_program_finds_what_onnx_runtime_finds(program, tmp_path):
    report = export_detector(build_detector("mask"), tmp_path / "out", file_format="onnx")
    file = tmp_path / "out" / report["file"]
    pixels = np.random.default_rng(0).integers(0, 256, (140, 180, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.ppm")
    session, expected = onnxruntime.InferenceSession(file), {}
    for order, ordered in (("RGB", pixels), ("BGR", pixels[:, :, ::-1].copy())):
        images = torch.from_numpy(ordered).permute(2, 0, 1)[None].float().numpy()
        outputs = session.run(
            ["boxes", "scores", "classes", "count"], {"images": images, "sizes": np.array([pixels.shape[:2]])}
        )
        boxes, scores, classes, (count,) = (each[0] if each.ndim > 1 else each for each in outputs)
        assert count > 3
        expected[order] = np.column_stack([classes, scores, boxes])[:count]
        done = subprocess.run(
            [program, file, tmp_path / "image.ppm", order], capture_output=True, text=True, check=True
        )
        found = np.array([line.split() for line in done.stdout.splitlines()], float)
        assert np.allclose(found, expected[order], atol=2e-2)
    assert not np.array_equal(expected["RGB"], expected["BGR"])


@pytest.mark.slow
@pytest.mark.skipif("g++" not in (find_compiler() or ""), reason="no g++")
def test_what_is_no_image_is_refused(program, tmp_path):
    for content, message in (("P3 2 2 255", "no binary PPM"), ("P6 2 2 255\nabc", "shorter than its size")):
        (tmp_path / "image.ppm").write_text(content)
        done = subprocess.run([program, "model.onnx", tmp_path / "image.ppm", "RGB"], capture_output=True, text=True)
        assert done.returncode == 1 and message in done.stderr
    assert subprocess.run([program], capture_output=True).returncode == 2
