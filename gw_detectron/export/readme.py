"""The text beside an exported file: what it is, and code that loads it and runs as it stands."""

from collections.abc import Mapping, Sequence
from string import Template
from typing import Any

_PAGE = Template("""\
# $file

$what

- Input: `images`, float32, (N, 3, H, W), $channels, $taken,
  with mean $mean and std $std.
- Sizes: H and W $sizes; any N.
- Output: $outputs.
- Largest difference from the model it was made from, both in plain operations: $worst of a feature map's largest
  value. `parity.json` has all differences, the versions of the packages, and the SHA-256 of the file.

```python
$code```
""")

_WHAT = {
    "pt2": (
        "A program of torch.export. It needs torch alone, of the version in `parity.json` or a newer one. It runs on\n"
        "the CPU; `torch.export.passes.move_to_device_pass` moves the loaded program to another device."
    ),
    "onnx": "An ONNX model. It needs onnxruntime alone, or another runtime of ONNX.",
    "torchscript": (
        "A TorchScript trace, which torch marks as deprecated; prefer the format pt2. It needs torch alone, and runs\n"
        "on the CPU."
    ),
    "detectron2": "Weights. They need Detectron2, gw_detectron, and the config of the model they were exported from.",
    "torchvision": "Weights in torchvision's names. They need torchvision$and_gw.",
    "timm": "Weights in timm's names, which are torchvision's. They need timm$and_gw.",
}

_PIXELS_TORCH = """pixels = 255 * torch.rand($shape)  # your image"""
_PIXELS_NUMPY = """pixels = np.random.uniform(0, 255, ($shape)).astype("float32")  # your image"""
_IMAGES_TORCH = """
mean, std = (torch.tensor(values).reshape(1, 3, 1, 1) for values in ($mean, $std))
images = (pixels - mean) / std"""
_IMAGES_NUMPY = """
mean, std = (np.array(values, "float32").reshape(1, 3, 1, 1) for values in ($mean, $std))
images = (pixels - mean) / std"""

_TORCH = """\
import torch

$images
backbone = $load
with torch.no_grad():
    features = dict(zip($names, backbone(images)))
for name, feature in features.items():
    print(name, tuple(feature.shape))
"""

_ONNX = """\
import numpy as np
import onnxruntime

$images
session = onnxruntime.InferenceSession("$file", providers=["CPUExecutionProvider"])
features = dict(zip($names, session.run($names, {"images": images})))
for name, feature in features.items():
    print(name, feature.shape)
"""

_DETECTRON2 = """\
import sys

from detectron2.config import get_cfg
from detectron2.modeling import build_backbone
from gw_detectron import add_gw_config
from safetensors.torch import load_file

cfg = get_cfg()
add_gw_config(cfg)
cfg.merge_from_file(sys.argv[1])
cfg.merge_from_list(sys.argv[2:])
weights = load_file("$file")
backbone = build_backbone(cfg)
if "stem.conv1.weight" in weights:  # exported without the FPN of the config
    backbone = getattr(backbone, "bottom_up", backbone)
backbone.load_state_dict(weights)
backbone.eval()
print(len(weights), "tensors loaded")
"""

_RESNET = """\
import json

import torch
import $library
${import_gw}\
from safetensors import safe_open

with safe_open("$file", "pt") as file:
    weights = {name: file.get_tensor(name) for name in file.keys()}
    norms = json.loads(file.metadata()["norms"])  # those that are not batch normalisation

$build
kinds = {$kinds}
for name, arguments in norms.items():
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, kinds[arguments.pop("class")](**arguments))
model.load_state_dict(weights)
model.eval()
$images
with torch.no_grad():
    print(tuple(model(images).shape))  # the mean of the last feature map; there are no weights of a classifier
"""
_BUILD = {
    "torchvision": """\
resnet = torchvision.models.resnet
model = resnet.ResNet(resnet.$block, $blocks, groups=$groups, width_per_group=$width)
model.fc = torch.nn.Identity()""",
    "timm": """\
resnet = timm.models.resnet
model = resnet.ResNet(resnet.$block, $blocks, cardinality=$groups, base_width=$width, num_classes=0)""",
}
_KINDS = {"GroupNorm": "torch.nn.GroupNorm", "GroupWhitening2d": "GroupWhitening2d"}


_DETECTOR = Template("""\
# $file

A detector as a TorchScript trace, which torch marks as deprecated. It needs torch and torchvision, and runs on the
CPU.

- Input: `image`, float32, (3, H, W), $channels, pixels of 0 to 255; it is normalised inside.
- Sizes: any; nothing is resized inside.$resized
- Output: $names. Boxes are x0, y0, x1, y1 in the image's pixels; masks are those of the boxes, as probabilities.
- Largest difference from the model it was made from, both in plain operations: $worst of an output's largest value.
  `parity.json` has all differences, the versions of the packages, and the SHA-256 of the file.

```python
import torch
import torchvision  # has operators that the file uses

model = torch.jit.load("$file")
image = 255 * torch.rand(3, 480, 640)  # your image
with torch.no_grad():
    detections = dict(zip($names, model(image)))
for name, value in detections.items():
    print(name, tuple(value.shape))
```
""")


def backbone_readme(report: Mapping[str, Any]) -> str:
    """Writes the README of an exported backbone.

    Args:
        report: what ``parity.json`` holds.
    """
    given, side = report["input"], report["input"]["smallest_side"]
    sizes = f"at least {side}" if given["multiple_of"] == 1 else f"multiples of {given['multiple_of']}, at least {side}"
    values = {
        "file": report["file"],
        "channels": given["channels"],
        "mean": _list(given["pixel_mean"]),
        "std": _list(given["pixel_std"]),
        "sizes": sizes,
        "shape": f"1, 3, {side}, {side}",
        "names": list(report["outputs"]),
        "worst": f"{report['worst_relative']:.1e}",
        "taken": "pixels of 0 to 255, normalised inside" if given["inside"] else "pixels of 0 to 255 normalised",
        "outputs": ", ".join(
            f"`{name}` ({map_['channels']} channels, stride {map_['stride']})"
            for name, map_ in report["outputs"].items()
        ),
    }
    kind = report.get("layout", report["format"])
    if kind == "onnx":
        code, values["images"] = _ONNX, _images(_PIXELS_NUMPY, _IMAGES_NUMPY, values, given["inside"])
    else:
        values["images"] = _images(_PIXELS_TORCH, _IMAGES_TORCH, values, given["inside"])
        code = {"pt2": _TORCH, "torchscript": _TORCH, "detectron2": _DETECTRON2}.get(kind, _RESNET)
    if kind in ("pt2", "torchscript"):
        reader = "torch.export.load({!r}).module()" if kind == "pt2" else "torch.jit.load({!r})"
        values["load"] = reader.format(report["file"])
    values["and_gw"] = ""
    if code is _RESNET:
        used = sorted({norm["class"] for norm in report["norms"].values()})
        values["kinds"] = ", ".join(f'"{name}": {_KINDS[name]}' for name in used)
        values["build"] = Template(_BUILD[kind]).substitute(report["network"])
        values["library"] = kind
        whitened = "GroupWhitening2d" in used
        values["and_gw"] = " and gw_detectron, for the whitening layers" if whitened else ""
        values["import_gw"] = "from gw_detectron.layers import GroupWhitening2d\n" if whitened else ""
    return _PAGE.substitute(
        values, what=Template(_WHAT[kind]).substitute(values), code=Template(code).substitute(values)
    )


def _images(pixels: str, normalise: str, values: Mapping[str, Any], inside: bool) -> str:
    """Code that makes ``images`` as the file takes them."""
    text = pixels.replace("pixels", "images") if inside else pixels + normalise
    return Template(text).substitute(values)


def _list(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"


def detector_readme(report: Mapping[str, Any]) -> str:
    """Writes the README of an exported detector.

    Args:
        report: what ``parity.json`` holds.
    """
    sides = report["resized_in_evaluation"]
    resized = ""
    if sides is not None:
        resized = (
            f" In evaluation the shorter side of images is made {sides['shorter']} pixels,\n"
            f"  or less where the longer one would exceed {sides['longer_at_most']}: resize yours like that."
        )
    return _DETECTOR.substitute(
        resized=resized,
        file=report["file"],
        channels=report["channels"],
        names=report["outputs"],
        worst=f"{report['worst_relative']:.1e}",
    )
