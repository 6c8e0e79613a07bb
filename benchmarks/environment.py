"""Describe the machine, the versions and the settings that times depend on."""

import datetime
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from gw_detectron.errors import ConfigError
from gw_detectron.installation import __version__, git_commit, package_versions


def select_device(name: str | None) -> torch.device:
    """Return the device ``cpu`` or ``cuda``; None selects the GPU if there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device ('cuda'): torch finds no CUDA device. Fix: use cpu."
        )
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def describe(
    device: torch.device, dtypes: Iterable[str], command: str
) -> dict[str, str]:
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
        **package_versions(("torch", "torchvision", "triton", "detectron2")),
    }
    if device.type == "cuda":
        header["cuda"] = str(torch.version.cuda)
        header["float32 products"] = torch.get_float32_matmul_precision()
    header |= {
        name: os.environ[name]
        for name in ("GW_DETECTRON_KERNELS", "OMP_NUM_THREADS")
        if name in os.environ
    }
    return {name: value for name, value in header.items() if value}


def machine_name(device: torch.device) -> str:
    """Return the name of the processor or GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else ()
    names = (
        line.partition(":")[2].strip()
        for line in lines
        if line.startswith("model name")
    )
    return next(names, platform.processor() or "unknown")
