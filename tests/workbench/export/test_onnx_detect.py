"""examples/onnx_detect.py on small handmade ONNX files, in a process that cannot import torch."""

import json
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from ...tiny_run import ROOT
from .conftest import FORBID

SCRIPT = ROOT / "examples" / "onnx_detect.py"
FORBIDDEN = ["torch", "torchvision", "detectron2", "gw_detectron", "onnx"]
BOXES = np.array([[2, 3, 12, 13], [20, 5, 39, 29], [0, 0, 0, 0]], np.float32)
SCORES, CLASSES = np.array([0.9, 0.25, 0], np.float32), np.array([1, 0, -1])


def write_model(
    path,
    channels="RGB",
    pasted=True,
    names=("cat", "dog"),
    input_name="image",
    ids=None,
):
    """Write a model of two constant detections; their masks are where the first and second channel exceed 100."""
    constants = {
        "boxes": BOXES,
        "scores": SCORES,
        "classes": CLASSES,
        "count": np.array(2),
    }
    constants |= {
        "limit": np.array(100, np.float32),
        "zero": np.array([0]),
        "two": np.array([2]),
    }
    nodes = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))
        for name, value in constants.items()
    ]
    nodes.append(helper.make_node("Slice", [input_name, "zero", "two"], ["planes"]))
    nodes.append(helper.make_node("Greater", ["planes", "limit"], ["masks"]))
    kinds = {
        "boxes": (TensorProto.FLOAT, [3, 4]),
        "scores": (TensorProto.FLOAT, [3]),
        "classes": (TensorProto.INT64, [3]),
        "masks": (TensorProto.BOOL, [2, "H", "W"]),
        "count": (TensorProto.INT64, []),
    }
    outputs = [
        helper.make_tensor_value_info(name, *kind) for name, kind in kinds.items()
    ]
    image = helper.make_tensor_value_info(input_name, TensorProto.FLOAT, [3, "H", "W"])
    graph = helper.make_graph(nodes, "detector", [image], outputs)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
    description = {
        "input": {"name": input_name, "channels": channels, "smallest_side": 2},
        "outputs": list(kinds),
        "detections": 3,
        "score_threshold": 0.05,
        "class_names": names,
        "category_ids": ids,
        "masks_pasted": pasted,
    }
    helper.set_model_props(model, {"gw_detectron.json": json.dumps(description)})
    onnx.save(model, path)


@pytest.fixture
def photo(tmp_path):
    """A dark photo, red in its left and green in its right half."""
    pixels = np.full((30, 40, 3), 10, np.uint8)
    pixels[:, :20, 0] = pixels[:, 20:, 1] = 200
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return pixels


@pytest.fixture
def run(tmp_path):
    def run(*words):
        code = (
            FORBID.format(names=FORBIDDEN)
            + f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
        )
        command = [sys.executable, "-I", "-c", code, *map(str, words)]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )

    return run


@pytest.mark.parametrize("channels", ["RGB", "BGR"])
def test_a_picture_and_coco_results(tmp_path, run, photo, channels):
    write_model(tmp_path / "model.onnx", channels, ids=[5, 90])
    done = run("model.onnx", "photo.png", "--threshold", "0.2")
    assert done.returncode == 0, done.stderr
    first, second = json.loads((tmp_path / "detections.json").read_text())
    assert first == {
        "bbox": [2, 3, 10, 10],
        "score": pytest.approx(0.9),
        "category_id": 90,
        "category_name": "dog",
    }
    assert (second["bbox"], second["category_id"], second["category_name"]) == (
        [20, 5, 19, 24],
        5,
        "cat",
    )
    picture = np.asarray(Image.open(tmp_path / "detections.png"))
    assert picture.shape == photo.shape
    painted = (picture != photo).any(2)[20:29]  # below the first box and its label
    # the masks are red and green, or, of the channels B and G, green alone
    assert painted[:, 2:18].all() == (channels == "RGB") and painted[:, 22:38].all()


def test_a_file_without_names_and_masks(tmp_path, run, photo):
    write_model(tmp_path / "model.onnx", pasted=False, names=None)
    done = run("model.onnx", "photo.png", "--output", "a.jpg", "--json", "a.json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "a.json").read_text())
    assert result["category_id"] == 1 and "category_name" not in result
    assert (tmp_path / "a.jpg").is_file()
