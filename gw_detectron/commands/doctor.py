"""Check this installation: versions, devices, and what works.

The whitening layers are tried on the CPU and on the GPU, forward and backward. Nothing is downloaded or written. The
exit status is 1 if an installed part fails, and 0 if parts are only missing.
"""

import argparse
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from tabulate import tabulate

from ..cli import new_parser
from ..installation import __version__, has_compiled_operators, has_detectron2, package_versions
from ..layers import GroupWhitening2d
from ..ops.group_whitening.op import use_backend
from ..ops.group_whitening.triton.compiler import triton
from ..ops.group_whitening.triton.launch import compiles_for

_PACKAGES = ("torch", "torchvision", "triton", "detectron2", "fvcore", "pycocotools", "numpy", "Pillow", "safetensors")
_TOLERANCES = {"cpu": 1e-4, "cuda": 1e-2}  # a GPU may multiply in tf32; values are about 1


class Check(NamedTuple):
    """A part of the package, whether it works here, and why or how to get it; broken if installed and failing."""

    part: str
    works: bool
    note: str
    broken: bool = False


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    parser = new_parser(__doc__, "", "--json")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def main(args: argparse.Namespace) -> bool:
    """Print what is installed and what works; return False if a part is broken."""
    facts = {
        "gw_detectron": f"{__version__} in {Path(__file__).parents[1]}",
        "python": f"{platform.python_version()} in {sys.executable}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch, "
        f"{torch.backends.cpu.get_cpu_capability()}",
        "gpus": ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))) or "none",
        **dict.fromkeys(_PACKAGES, "not installed"),
        **package_versions(_PACKAGES),
        "DETECTRON2_DATASETS": os.path.abspath(os.environ.get("DETECTRON2_DATASETS", "datasets")),
    }
    checks = _checks()
    if args.json:
        print(json.dumps({"installation": facts, "checks": [check._asdict() for check in checks]}, indent=2))
    else:
        print(tabulate(facts.items(), tablefmt="plain"), end="\n\n")
        rows = [(c.part, "BROKEN" if c.broken else "yes" if c.works else "no", c.note) for c in checks]
        print(tabulate(rows, headers=["part", "works", "why"], maxcolwidths=[None, None, 80]))
    return not any(check.broken for check in checks)


def _checks() -> list[Check]:
    compiled = has_compiled_operators()
    coco = Path(os.environ.get("DETECTRON2_DATASETS", "datasets"), "coco", "annotations")
    has_coco = (coco / "instances_val2017.json").is_file()
    return [
        _layers("cpu"),
        *([_layers("cuda")] if torch.cuda.is_available() else []),
        _triton(),
        Check("Detectron2 components", has_detectron2(), "registered" if has_detectron2() else "see docs/install.md"),
        Check("rotated boxes", compiled, "need Detectron2's compiled operators"),
        *([] if compiled else [_packages("fast COCO evaluation", "tools", "faster_coco_eval")]),
        _packages("export to ONNX", "export", "onnx", "onnxscript", "onnxruntime"),
        _packages("download of gw:// weights", "weights", "gdown", "requests"),
        _packages("pictures, report, demo and video", "tools", "cv2"),
        Check("COCO dataset", has_coco, str(coco) if has_coco else f"not in {coco}. Fix: set DETECTRON2_DATASETS"),
    ]


def _layers(device: str) -> Check:
    """Compare the layer's backend with the reference, forward and backward."""
    part, allowed = f"whitening layers ({device})", _TOLERANCES[device]
    x = torch.randn(2, 64, 24, 20, generator=torch.Generator().manual_seed(0)).to(device)
    layer = GroupWhitening2d(64, num_groups=16).to(device)
    try:
        found = _output_and_gradient(layer, x)
        with use_backend("reference"):
            expected = _output_and_gradient(layer, x)
    except Exception as error:  # a compiler, driver or library that does not fit can raise anything
        return Check(part, False, f"{type(error).__name__}: {error}", broken=True)
    worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    note = f"differ from the reference by {worst:.0e}, allowed {allowed:.0e}"
    return Check(part, worst <= allowed, note, broken=not worst <= allowed)


def _output_and_gradient(layer: GroupWhitening2d, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    loss = (y * torch.linspace(-1, 1, y.shape[-1], device=y.device)).sum()
    return [y.detach(), *torch.autograd.grad(loss, x)]


def _triton() -> Check:
    part = "Triton kernels"
    if not torch.cuda.is_available():
        return Check(part, False, "torch finds no NVIDIA GPU; the CPU backend is used")
    if triton is None:
        return Check(part, False, "need triton 3.3 or newer. Fix: pip install -U triton; until then matmul is used")
    works, name = compiles_for(torch.device("cuda")), torch.cuda.get_device_name()
    reason = f"{name} is no NVIDIA GPU from Ampere (8.0) on, or too new for triton {triton.__version__}; matmul is used"
    return Check(part, works, name if works else reason)


def _packages(part: str, extra: str, *modules: str) -> Check:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    fix = f"{', '.join(missing)} not installed. Fix: pip install '.[{extra}]' in the clone"
    return Check(part, not missing, fix if missing else ", ".join(modules))
