"""On what a measurement was taken."""

import datetime
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import torch

from gw_detectron.version import __version__

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("torch", "torchvision", "triton", "detectron2")
#: environment variables that change what is measured
_VARIABLES = ("GW_DETECTRON_KERNELS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def pick_device(name: str | None) -> torch.device:
    """The device to measure on: ``cpu`` or ``cuda``; by default the GPU if there is one.

    Raises:
        ValueError: there is no such device.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r}: allowed are cpu and cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch finds no CUDA device here; use cpu")
    return torch.device(name)


def describe(device: torch.device, dtypes: Iterable[str], command: str) -> dict[str, str]:
    """The machine, the versions and the settings of torch that times depend on, as the header of a table.

    Names of machines and users are left out.
    """
    header = {
        "command": command,
        "dtypes": " ".join(dtypes),
        "date": datetime.date.today().isoformat(),
        "device": device.type,
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
        "gw_detectron": __version__,
        **({"commit": commit} if (commit := commit_of(_ROOT)) else {}),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            header[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # triton has no build for some systems
    if device.type == "cpu":
        header["peak memory"] = "not measured on a CPU"
    else:
        header["cuda"] = str(torch.version.cuda)
        header["tf32"] = f"matmul {torch.backends.cuda.matmul.allow_tf32}, cudnn {torch.backends.cudnn.allow_tf32}"
    return header | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def cpu_name() -> str:
    """The name of the processor as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def commit_of(root: Path) -> str:
    """The git commit of a checkout, with ``-dirty`` if a file of it is changed; nothing where there is none to find."""
    if not (root / ".git").exists():  # else git would answer for a checkout that an installed package happens to lie in
        return ""
    # without its locks git is in nobody's way
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        text = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # no git, or it refuses to read somebody else's files
        return ""
    about = dict(line[2:].split(" ", 1) for line in text.splitlines() if line.startswith("# "))
    changed = any(not line.startswith("# ") for line in text.splitlines())
    return about["branch.oid"] + "-dirty" * changed
