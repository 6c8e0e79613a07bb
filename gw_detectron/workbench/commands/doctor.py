"""Check this installation: versions, devices, and what works.

The whitening layers are tried on the CPU and on the GPU, forward and backward. Nothing is downloaded or written. The
exit status is 1 if an installed part fails, and 0 if parts are only missing.
"""

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tabulate import tabulate

from ...installation import (
    __version__,
    has_compiled_operators,
    has_detectron2,
    package_versions,
)
from ...layers import GroupWhitening2d
from ...ops.group_whitening.op import use_backend
from ...ops.group_whitening.triton.compiler import triton
from ...ops.group_whitening.triton.support import compiles_for
from ..console import new_parser

_PACKAGES = (
    "torch",
    "torchvision",
    "triton",
    "detectron2",
    "fvcore",
    "pycocotools",
    "numpy",
    "Pillow",
    "safetensors",
)
_TOLERANCES = {"cpu": 1e-4, "cuda": 1e-2}  # a GPU may multiply in tf32; values are about 1
_BROKEN = "BROKEN"  # installed and failing

Row = tuple[str, str, str]


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    return new_parser(__doc__, "")


def main(args: argparse.Namespace) -> bool:
    """Print what is installed and what works; return False if a part is broken."""
    facts = {
        "gw_detectron": f"{__version__} in {Path(__file__).parents[1]}",
        "python": f"{platform.python_version()} in {sys.executable}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch, "
        f"{torch.backends.cpu.get_cpu_capability()}",
        "gpus": ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))
        or "none",
        **dict.fromkeys(_PACKAGES, "not installed"),
        **package_versions(_PACKAGES),
        "DETECTRON2_DATASETS": os.path.abspath(
            os.environ.get("DETECTRON2_DATASETS", "datasets")
        ),
    }
    rows = list(_checks())
    print(tabulate(facts.items(), tablefmt="plain"), end="\n\n")
    print(tabulate(rows, headers=["part", "works", "why"], maxcolwidths=[None, None, 80]))
    return all(works != _BROKEN for _, works, _ in rows)


def _checks() -> Iterator[Row]:
    """Yield each part, whether it works here, and why or how to get it."""
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        yield f"whitening layers ({device})", *_layers(device)
    yield "Triton kernels", *_triton()
    yield (
        "Detectron2 components",
        *(("yes", "registered") if has_detectron2() else ("no", "see docs/install.md")),
    )
    compiled = has_compiled_operators()
    yield "rotated boxes", "yes" if compiled else "no", "need Detectron2's compiled operators"
    if not compiled:
        yield "fast COCO evaluation", *_packages("tools", "faster_coco_eval")
    yield "export to ONNX", *_packages("export", "onnx", "onnxscript", "onnxruntime")
    yield "download of gw:// weights", *_packages("weights", "gdown", "requests")
    yield "pictures, report and video", *_packages("tools", "cv2")


def _layers(device: str) -> tuple[str, str]:
    """Compare the layer's backend with the reference, forward and backward."""
    x = torch.randn(2, 64, 24, 20, generator=torch.Generator().manual_seed(0)).to(device)
    layer = GroupWhitening2d(64, num_groups=16).to(device)
    try:
        found = _output_and_gradient(layer, x)
        with use_backend("reference"):
            expected = _output_and_gradient(layer, x)
    except (
        Exception
    ) as error:  # a compiler, driver or library that does not fit can raise anything
        return _BROKEN, f"{type(error).__name__}: {error}"
    worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    note = f"differ from the reference by {worst:.0e}, allowed {_TOLERANCES[device]:.0e}"
    return "yes" if worst <= _TOLERANCES[device] else _BROKEN, note


def _output_and_gradient(layer: GroupWhitening2d, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    loss = (y * torch.linspace(-1, 1, y.shape[-1], device=y.device)).sum()
    return [y.detach(), *torch.autograd.grad(loss, x)]


def _triton() -> tuple[str, str]:
    if not torch.cuda.is_available():
        return "no", "torch finds no NVIDIA GPU; the CPU backend is used"
    if triton is None:
        return (
            "no",
            "need triton 3.3 or newer. Fix: pip install -U triton; until then matmul is used",
        )
    name = torch.cuda.get_device_name()
    if compiles_for(torch.device("cuda")):
        return "yes", name
    return (
        "no",
        f"{name} is older than Ampere, or too new for triton {triton.__version__}; matmul is used",
    )


def _packages(extra: str, *modules: str) -> tuple[str, str]:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        return (
            "no",
            f"{', '.join(missing)} not installed. Fix: pip install '.[{extra}]' in the clone",
        )
    return "yes", ", ".join(modules)
