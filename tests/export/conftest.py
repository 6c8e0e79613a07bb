import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from gw_detectron.export import Normalization
from gw_detectron.layers import use_backend

# makes the import of modules fail
FORBID = "import sys; sys.modules.update(dict.fromkeys({names}))\n"
PACKAGES = ("gw_detectron", "detectron2", "fvcore")


@pytest.fixture(autouse=True)
def exported_backend():
    """Run the model on the exported backend, so that only the export makes a difference."""
    with use_backend("reference"):
        yield


@pytest.fixture(scope="session")
def normalization() -> Normalization:
    return Normalization("RGB", (123.675, 116.28, 103.53), (58.395, 57.12, 57.375))


@pytest.fixture
def run_readme(tmp_path) -> Callable[..., list[np.ndarray]]:
    """Run the code of an exported README on given pixels, where this package is missing; return its outputs."""

    def run(folder: Path, pixels: Tensor, *forbid: str) -> list[np.ndarray]:
        (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)
        np.save(tmp_path / "pixels.npy", pixels.numpy())
        code, found = re.subn(r"= \S.*(?=  # your images)", f"= np.load({str(tmp_path / 'pixels.npy')!r})", code)
        assert found == 1
        code += f"np.savez({str(tmp_path / 'outputs.npz')!r}, *map(np.asarray, outputs))\n"
        command = [sys.executable, "-W", "ignore", "-c", FORBID.format(names=[*PACKAGES, *forbid]) + code]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        with np.load(tmp_path / "outputs.npz") as outputs:
            return list(outputs.values())

    return run
