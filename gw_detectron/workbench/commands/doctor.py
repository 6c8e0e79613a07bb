"""Check this installation: versions, devices, and what works.

The whitening layers are tried on the CPU and on the GPU, forward and backward. Nothing is
downloaded or written. The exit status is 1 if an installed part fails, and 0 if parts are only
missing.
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
from .parsers import new_parser

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
# a GPU may multiply in tf32; values are about 1
_TOLERANCES = {
    "cpu": 1e-4,
    "cuda": 1e-2,
}
_BROKEN = "BROKEN"  # installed and failing

Row = tuple[str, str, str]


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    return new_parser(__doc__, "")


def main(args: argparse.Namespace) -> bool:
    """Print the installed versions and the parts that work; return False if one is broken."""
    rows = list(_checks())
    print(tabulate(_facts().items(), tablefmt="plain"), end="\n\n")
    print(
        tabulate(rows, headers=["part", "works", "why"], maxcolwidths=[None, None, 80])
    )
    return all(works != _BROKEN for _, works, _ in rows)


def _facts() -> dict[str, str]:
    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"
    gpus = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    versions = package_versions(_PACKAGES)
    return {
        "gw_detectron": f"{__version__} in {Path(__file__).parents[2]}",
        "python": f"{platform.python_version()} in {sys.executable}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": f"{threads}, {torch.backends.cpu.get_cpu_capability()}",
        "gpus": ", ".join(gpus) or "none",
        **{name: versions.get(name, "not installed") for name in _PACKAGES},
        "DETECTRON2_DATASETS": os.path.abspath(
            os.environ.get("DETECTRON2_DATASETS", "datasets")
        ),
    }


def _checks() -> Iterator[Row]:
    """Yield each part, whether it works here, and why or how to get it."""
    yield "whitening layers (cpu)", *_layers("cpu")
    if torch.cuda.is_available():
        yield "whitening layers (cuda)", *_layers("cuda")
    yield "Triton kernels", *_triton()
    if has_detectron2():
        yield "Detectron2 components", "yes", "registered"
    else:
        yield "Detectron2 components", "no", "see docs/install.md"

    compiled = has_compiled_operators()
    yield (
        "rotated boxes",
        "yes" if compiled else "no",
        "need Detectron2's compiled operators",
    )
    if not compiled:
        yield "fast COCO evaluation", *_packages("tools", "faster_coco_eval")
    yield "export to ONNX", *_packages("export", "onnx", "onnxscript", "onnxruntime")
    yield "download of gw:// weights", *_packages("weights", "gdown", "requests")
    yield "pictures, report and video", *_packages("tools", "cv2")


def _layers(device: str) -> tuple[str, str]:
    """Compare the layer's backend with the reference, forward and backward."""
    x = torch.randn(2, 64, 24, 20, generator=torch.Generator().manual_seed(0)).to(
        device
    )
    layer = GroupWhitening2d(64, num_groups=16).to(device)
    try:
        computed = _output_and_gradient(layer, x)
        with use_backend("reference"):
            expected = _output_and_gradient(layer, x)
        torch.testing.assert_close(
            computed, expected, rtol=0.0, atol=_TOLERANCES[device]
        )
    except Exception as error:  # of any kind: a compiler, driver or library may not fit
        return _BROKEN, f"{type(error).__name__}: {error}"
    return "yes", f"as the reference, to {_TOLERANCES[device]:.0e}"


def _output_and_gradient(
    layer: GroupWhitening2d, x: torch.Tensor
) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    loss = (y * torch.linspace(-1, 1, y.shape[-1], device=y.device)).sum()
    return [y.detach(), *torch.autograd.grad(loss, x)]


def _triton() -> tuple[str, str]:
    if not torch.cuda.is_available():
        return "no", "torch finds no NVIDIA GPU; the CPU backend is used"
    if triton is None:
        fix = "pip install -U triton; until then matmul is used"
        return "no", f"need triton 3.3 or newer. Fix: {fix}"

    name = torch.cuda.get_device_name()
    if compiles_for(torch.device("cuda")):
        return "yes", name
    reason = f"older than Ampere, or too new for triton {triton.__version__}"
    return "no", f"{name} is {reason}; matmul is used"


def _packages(extra: str, *modules: str) -> tuple[str, str]:
    """Return whether modules are installed, which an extra of this package brings."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if not missing:
        return "yes", ", ".join(modules)
    fix = f"pip install '.[{extra}]' in the clone"
    return "no", f"{', '.join(missing)} not installed. Fix: {fix}"
