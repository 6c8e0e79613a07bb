"""Write the files beside an export: parity.json, and a README with loading code."""

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from ..installation import package_versions
from ..weights.provenance import sha256_of, tool
from .model_card import card_text

#: the files beside the exported one
REPORT_FILES = ("parity.json", "README.md")

_PACKAGES = ("detectron2", "torch", "torchvision", "onnx", "onnxscript", "onnxruntime", "safetensors")
_README = Template("""\
# $file

$kind

- Input: `$name`, $type, ($dimensions), $channels: pixels of 0 to 255, $scale.
  Mean: $pixel_mean, std: $pixel_std.
- H and W: at least $smallest_side$multiples.$resize
$details

`parity.json` holds all differences, the package versions and the SHA-256 of the file.

```python
$code```
""")
_KINDS = {
    "pt2": (
        "A torch.export program. Needs torch, in the version of `parity.json` or newer. Runs on the CPU;\n"
        "`torch.export.passes.move_to_device_pass` moves the loaded program to another device."
    ),
    "onnx": "An ONNX model. Needs onnxruntime or another ONNX runtime.",
    "torchscript": "A TorchScript trace (deprecated in torch; prefer pt2). Needs torch. Runs on the CPU.",
    "detectron2": "Weights. Need Detectron2, gw_detectron and the config of the exported model.",
    "torchvision": "Weights in torchvision's names. Need torchvision, and gw_detectron for whitening layers.",
    "timm": "Weights in timm's names, which are torchvision's. Need timm, and gw_detectron for whitening layers.",
}
_FEATURES = """\
- Outputs: $outputs
- Largest difference from the model (reference backend): $worst of an output's largest value."""
_DETECTIONS = """\
$sizes- Outputs: $detections rows for each image, detections first, by descending score; the other rows are zeros of
  class -1.
  - `boxes`: x0, y0, x1, y1 in pixels of the image, (${batch}$detections, 4)
  - `scores`: above $score_threshold, (${batch}$detections)
  - `classes`: 0 is the first of $classes, int64, (${batch}$detections)$masks
  - `count`: detections of each image, int64, ($n)$refusal
- Largest differences from the model (reference backend): $worst."""
_REFUSAL = "; -1 for an image whose size is not inside the tensor"
_CLASS_NAMES = "`class_names` in `parity.json` and in the file's metadata `gw_detectron.json`"
_SIZES_INPUT = """\
- Input: `sizes`, int64, (N, 2): height and width of each image inside the padded tensor. The file replaces the padding.
"""
_MASKS = """
  - `masks`: probabilities inside the box, not pasted into the image, (${batch}$detections, S, S)"""
_PASTED = """
  - `masks`: bool, pasted into the image, for the detections alone, (`count`, H, W)"""
_RESIZED = """
  The file resizes as evaluation does: to a shorter side of $shorter and a longer one of at most $longer_at_most pixels.
  `examples/onnx_detect.py` of gw_detectron draws the detections of an ONNX file."""
_RESIZE = """
  The file does not resize. Evaluation resizes images to a shorter side of $shorter and a longer side of at most
  $longer_at_most pixels: do the same."""
_IMAGES = """\
images = np.random.uniform(0, 255, (1, 3, $side, $side)).astype("float32")  # your images
"""
_ONE_IMAGE = """\
image = np.random.randint(0, 256, (3, 480, 640)).astype("float32")  # your image
"""
_SIDE = 224  # of the image in the code, if the file takes it
_NORMALIZE = """\
mean, std = (np.array(values, "float32").reshape(3, 1, 1) for values in ($pixel_mean, $pixel_std))
images = (images - mean) / std
"""
_SIZES = """\
sizes = np.array([images.shape[2:]])  # height and width of each image without padding
"""
_TORCHVISION = "import torchvision  # registers operators that the file uses\n"
_TORCH = """\
import numpy as np
import torch
$imports
$images
with torch.no_grad():
    outputs = $load($tensors)
"""
_RESNET = """\
import importlib
import json

import numpy as np
import torch
from safetensors import safe_open
from $library.models import resnet

$images
with safe_open("$file", "pt") as file:
    weights = {name: file.get_tensor(name) for name in file.keys()}
    norms = json.loads(file.metadata()["norms"])  # the norm layers that are not batch normalization
model = resnet.ResNet(resnet.$block, $blocks, $width)
model.fc = torch.nn.Identity()  # the file has no classifier
for name, arguments in norms.items():
    kind = arguments.pop("class")
    norm = getattr(torch.nn, kind, None) or getattr(importlib.import_module("gw_detectron.layers"), kind)
    model.set_submodule(name, norm(**arguments))
model.load_state_dict(weights)
with torch.no_grad():
    outputs = [model.eval()(torch.from_numpy(images))]
"""
_PRINT = """\
for name, output in zip($names, outputs):
    print(name, tuple(output.shape))
"""
_CODE = {
    "pt2": _TORCH.replace("$load", 'torch.export.load("$file").module()'),
    "torchscript": _TORCH.replace("$load", 'torch.jit.load("$file")'),
    "onnx": """\
import numpy as np
import onnxruntime

$images
session = onnxruntime.InferenceSession("$file", providers=["CPUExecutionProvider"])
outputs = session.run($names, $feed)
""",
    "torchvision": _RESNET.replace("$width", "groups=$groups, width_per_group=$width"),
    "timm": _RESNET.replace("$width", "cardinality=$groups, base_width=$width"),
    "detectron2": """\
import sys

from detectron2.modeling import build_backbone
from gw_detectron.config import read_config
from safetensors.torch import load_file

backbone = build_backbone(read_config(sys.argv[1], sys.argv[2:]))  # FILE KEY VALUE ...
weights = load_file("$file")
if "stem.conv1.weight" in weights:  # a ResNet without the FPN of the config
    backbone = getattr(backbone, "bottom_up", backbone)
print(backbone.load_state_dict(weights))
""",
}


def write_parity_files(
    path: Path,
    file_format: str,
    entries: Mapping[str, Any],
    source: Mapping[str, str] | None,
    card: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Write ``parity.json`` and ``README.md`` beside an exported file.

    Args:
        path: the exported file.
        file_format: its format.
        entries: ``input``, ``outputs``, the results of the parity check and other entries of the report.
        source: origin of the weights.
        card: the result of :func:`.card_facts`, to make ``README.md`` a model card.

    Returns:
        The content of ``parity.json``.
    """
    report = {
        "tool": tool(),
        "file": path.name,
        "format": file_format,
        "sha256": sha256_of(path),
        "bytes": path.stat().st_size,
        "source": dict(source or {}),
        **entries,
        "versions": {"python": platform.python_version(), **package_versions(_PACKAGES)},
        **({"card": dict(card)} if card else {}),
    }
    kind = report.get("layout", file_format)  # of weights, their layout
    readme = _readme(report, kind)
    (path.parent / "parity.json").write_text(json.dumps(report, indent=2) + "\n")
    (path.parent / "README.md").write_text(card_text(report, kind, readme) if card else readme)
    return report


def _readme(report: Mapping[str, Any], kind: str) -> str:
    given, resize, detector = report["input"], report.get("resized_in_evaluation"), "detections" in report
    batch, pasted = given["name"] == "images", report.get("masks_pasted")
    names = ["mean of the last map"] if "network" in report else list(report["outputs"])
    inputs = [given["name"], *["sizes"] * (detector and batch)]
    values = {
        **report,
        **report.get("network", {}),
        **given,
        "library": kind,
        "side": -(-max(_SIDE, given["smallest_side"]) // given["multiple_of"]) * given["multiple_of"],
        "names": names,
        "outputs": json.dumps(report["outputs"]),
        "refusal": _REFUSAL * (batch and report["format"] != "pt2"),
        "masks": _PASTED if pasted else _MASKS if "masks" in names else "",
        "sizes": _SIZES_INPUT * batch,
        "classes": _CLASS_NAMES if report.get("class_names") else "the training data's classes",
        "batch": "N, " * batch,
        "n": "N" * batch,
        "worst": _largest(report),
        "imports": _TORCHVISION if detector else "",
        "tensors": ", ".join(f"torch.from_numpy({name})" for name in inputs),
        "feed": "{" + ", ".join(f'"{name}": {name}' for name in inputs) + "}",
    }
    prepared = _IMAGES + _NORMALIZE * (not given["inside"]) + _SIZES * detector if batch else _ONE_IMAGE
    code = _CODE[kind].replace("$images\n", prepared) + _PRINT * (kind != "detectron2")
    return _README.substitute(
        values,
        kind=_KINDS[kind],
        code=_fill(code, values),
        dimensions=", ".join(map(str, given["shape"])),
        multiples=f", multiples of {given['multiple_of']}" if given["multiple_of"] > 1 else "",
        scale="normalized by the file" if given["inside"] else "normalized as (pixels - mean) / std",
        resize=_fill(_RESIZE if batch else _RESIZED, resize) if resize else "",
        details=_fill(_DETECTIONS if detector else _FEATURES, values | {"masks": _fill(values["masks"], values)}),
    )


def _fill(text: str, values: Mapping[str, Any]) -> str:
    return Template(text).substitute(values)


def _largest(report: Mapping[str, Any]) -> str:
    if "worst" not in report:
        return f"{report['worst_relative']:.1e}"
    return ", ".join(f"{name} {value:.1e}{' px' * (name == 'boxes')}" for name, value in report["worst"].items())
