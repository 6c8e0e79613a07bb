import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from detectron2.modeling.backbone import Backbone
from torch import Tensor

from gw_detectron.export import Normalization
from gw_detectron.layers import use_backend

from . import tiny_networks

# makes the import of modules fail
FORBID = "import sys; sys.modules.update(dict.fromkeys({names}))\n"
SAVE = "    np.save('../' + name, output)\n"


@pytest.fixture(autouse=True)
def exported_backend():
    """Run the model on the exported backend, so that the export alone makes a difference."""
    with use_backend("reference"):
        yield


@pytest.fixture(scope="session")
def normalization() -> Normalization:
    return Normalization("RGB", (123.675, 116.28, 103.53), (58.395, 57.12, 57.375))


@pytest.fixture(scope="session")
def tiny_backbone() -> Callable[..., Backbone]:
    return tiny_networks.tiny_backbone


@pytest.fixture(scope="session")
def run_readme() -> Callable[..., str]:
    """Run the code of an exported README in its folder and return what it prints.

    With ``forbid``, it runs in a process that cannot import these modules. With ``pixels``, they replace the random
    images of the code, and the outputs are saved.
    """

    def run(folder: Path, *words: str, forbid: tuple[str, ...] = (), pixels: Tensor | None = None) -> str:
        (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)
        if pixels is not None:
            np.save(folder.parent / "pixels.npy", pixels.numpy())
            code, found = re.subn(r"= \S.*(?=  # your images)", "= np.load('../pixels.npy')", code)
            assert found == 1
            code += SAVE
        if not forbid:
            printed = io.StringIO()
            with (
                contextlib.chdir(folder),
                contextlib.redirect_stdout(printed),
                mock.patch.object(sys, "argv", ["readme.py", *words]),
            ):
                exec(code, {})
            return printed.getvalue()
        path = folder.parent / "readme.py"  # no name of the standard library
        path.write_text(FORBID.format(names=list(forbid)) + code)
        command = [sys.executable, "-W", "ignore", str(path)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
