"""Describe the machine, the versions and the settings that times depend on."""

import datetime
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from gw_detectron.errors import ConfigError
from gw_detectron.installation import __version__, git_commit, package_versions
from gw_detectron.ops.group_whitening.triton.launch import tf32_allowed

from .validation import check_names

_PACKAGES = ("torch", "torchvision", "triton", "detectron2")
_VARIABLES = ("GW_DETECTRON_KERNELS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def select_device(name: str | None) -> torch.device:
    """Return the device ``cpu`` or ``cuda``; None selects the GPU if there is one.

    Raises:
        ConfigError: the device does not exist.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    check_names("--device", [name], ("cpu", "cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device ('cuda'): torch finds no CUDA device. Fix: use cpu.")
    return torch.device(name)


def describe(device: torch.device, dtypes: Iterable[str], command: str) -> dict[str, str]:
    """Return the header of a table. Host and user names are not included."""
    header = {
        "command": command,
        "dtypes": " ".join(dtypes),
        "date": datetime.date.today().isoformat(),
        "device": device.type,
        "machine": machine_name(device),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
        "gw_detectron": __version__,
        "commit": git_commit(),
        "python": platform.python_version(),
        **package_versions(_PACKAGES),
    }
    if device.type == "cpu":
        header["peak memory"] = "not measured on a CPU"
    if device.type == "cuda":
        header["cuda"] = str(torch.version.cuda)
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        convolution = getattr(cudnn, "conv", cudnn)  # cudnn in older torch
        header["tf32"] = f"matmul {tf32_allowed(matmul)}, convolution {tf32_allowed(convolution)}"
    header |= {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return {name: value for name, value in header.items() if value}


def machine_name(device: torch.device) -> str:
    """Return the name of the processor or GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else ()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
