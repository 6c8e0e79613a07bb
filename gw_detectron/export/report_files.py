"""Write the files beside an export: parity.json, and a README with loading code."""

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from ..installation import package_versions
from ..weights.reading import sha256_of
from ..weights.record import tool

#: the files beside the exported one
REPORT_FILES = ("parity.json", "README.md")

_PACKAGES = ("detectron2", "torch", "torchvision", "onnx", "onnxscript", "onnxruntime", "safetensors")
_README = Template("""\
# $file

$kind

- Input: `$name`, $type, $shape, $channels: pixels of 0 to 255, $scale (mean $pixel_mean, std $pixel_std).
  H and W are at least $smallest_side and multiples of $multiple_of.$resize
- Outputs: $outputs.$meaning
- Largest difference from the model, in plain operations: $worst.

`parity.json` describes inputs and outputs and has all differences, the package versions and the SHA-256 of the file.

```python
$code
```
""")
_KINDS = {
    "pt2": "A torch.export program. Needs torch, in the version of `parity.json` or newer. Runs on the CPU;\n"
    "`torch.export.passes.move_to_device_pass` moves the loaded program to another device.",
    "onnx": "An ONNX model. Needs onnxruntime or another ONNX runtime.",
    "safetensors": "Weights in Detectron2's names; the header's `norms` has the norm of each layer.\n"
    "In gw_detectron, `MODEL.WEIGHTS: gw://file/<path>` loads those of a ResNet.",
}


_MEANING = """
  An image has $detections rows: detections by descending score, then zeros of class -1; `count` is the number of
  detections. `boxes` are x0, y0, x1, y1 in pixels of the image, `scores` are above $score_threshold, `classes` index
  `class_names` of `parity.json`, or else the classes of the training data."""


def write_report_files(path: Path, entries: Mapping[str, Any], source: Mapping[str, str] | None) -> dict[str, Any]:
    """Write ``parity.json`` and ``README.md`` beside an exported file.

    Args:
        path: the exported file.
        entries: ``input``, ``outputs``, the results of the parity check and other entries of the report.
        source: origin of the weights.

    Returns:
        The content of ``parity.json``.
    """
    report = {
        "tool": tool(),
        "file": path.name,
        "format": path.suffix[1:],
        "sha256": sha256_of(path),
        "bytes": path.stat().st_size,
        "source": dict(source or {}),
        **entries,
        "versions": {"python": platform.python_version(), **package_versions(_PACKAGES)},
    }
    (path.parent / "parity.json").write_text(json.dumps(report, indent=2) + "\n")
    (path.parent / "README.md").write_text(_readme(report))
    return report


def _readme(report: Mapping[str, Any]) -> str:
    given, resized = report["input"], report.get("resized_in_evaluation")
    resize = ""
    if resized:
        does = "The file resizes" if given["name"] == "image" else "The file does not resize: do so"
        resize = (
            f"\n  {does} as evaluation does, to a shorter side of {resized['shorter']} and a longer side of at most "
            f"{resized['longer_at_most']} pixels."
        )
    meaning = Template(_MEANING).substitute(report) if "detections" in report else ""
    if "masks" in report["outputs"]:
        pasted = report.get("masks_pasted")
        meaning += f" `masks` are {'bool, pasted into the image' if pasted else 'probabilities inside the boxes'}."
    worst = report.get("worst", {"features": report.get("worst_relative")})
    return _README.substitute(
        given,
        file=report["file"],
        kind=_KINDS[report["format"]],
        shape=f"({', '.join(map(str, given['shape']))})",
        scale="normalized by the file" if given["inside"] else "normalized as (pixels - mean) / std",
        resize=resize,
        outputs=", ".join(f"`{name}`" for name in report["outputs"]),
        meaning=meaning,
        worst=", ".join(f"{name} {value:.1e}" for name, value in worst.items()),
        code="\n".join(_code(report)),
    )


def _code(report: Mapping[str, Any]) -> list[str]:
    """Return the lines of a program that calls the file on random pixels."""
    given, file, detector = report["input"], report["file"], "detections" in report
    if report["format"] == "safetensors":
        return ["from safetensors.torch import load_file", "", f'weights = load_file("{file}")']
    torch_too = report["format"] == "pt2"
    lines = ["import numpy as np", "import torch" if torch_too else "import onnxruntime"]
    if torch_too and detector:
        lines.append("import torchvision  # registers operators that the file uses")
    side = -(-max(224, given["smallest_side"]) // given["multiple_of"]) * given["multiple_of"]
    name, shape = given["name"], (3, 480, 640) if given["name"] == "image" else (1, 3, side, side)
    lines += ["", f'{name} = np.random.uniform(0, 255, {shape}).astype("float32")  # your images']
    inputs = [name]
    if not given["inside"]:
        lines += [
            f'mean, std = (np.array(values, "float32").reshape(3, 1, 1) for values in ({given["pixel_mean"]}, '
            f"{given['pixel_std']}))",
            "images = (images - mean) / std",
        ]
    if detector and name == "images":
        lines.append("sizes = np.array([images.shape[2:]])  # height and width of each image without padding")
        inputs.append("sizes")
    if torch_too:
        tensors = ", ".join(f"torch.from_numpy({name})" for name in inputs)
        lines += [f'program = torch.export.load("{file}").module()', "with torch.no_grad():"]
        lines.append(f"    outputs = program({tensors})")
    else:
        feed = ", ".join(f'"{name}": {name}' for name in inputs)
        lines.append(f'session = onnxruntime.InferenceSession("{file}", providers=["CPUExecutionProvider"])')
        lines.append(f"outputs = session.run(None, {{{feed}}})")
    return [*lines, f"for name, output in zip({list(report['outputs'])}, outputs):", "    print(name, output.shape)"]
