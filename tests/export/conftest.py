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
import torch
from detectron2.modeling import FPN, ResNet
from detectron2.modeling.backbone import Backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from detectron2.modeling.backbone.resnet import BasicStem
from torch import Tensor

from gw_detectron import resolve_norm
from gw_detectron.export import Normalization
from gw_detectron.layers import use_backend
from gw_detectron.modeling import GWBasicBlock

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
    return _tiny_backbone


def _tiny_backbone(
    norm: str = "BN", whiten: str = "GW:groups=4", fpn: str | None = "GW:groups=4", num_stages: int = 4
) -> Backbone:
    """Build a ResNet of one block per stage, whitened at S1-B2, with FPN unless ``fpn`` is None; no weight is zero."""
    generator = torch.Generator().manual_seed(0)
    stem = BasicStem(3, 8, norm=resolve_norm(whiten))
    stages, channels = [], 8
    for index, stride in enumerate((1, 2, 2, 2)[:num_stages]):
        block = {"norm": resolve_norm(norm), "whiten_norm": resolve_norm(whiten), "whiten_convs": ("conv2",)}
        stages.append(
            ResNet.make_stage(
                GWBasicBlock, 1, stride_per_block=[stride], in_channels=channels, out_channels=8 * (index + 1), **block
            )
        )
        channels = 8 * (index + 1)
    names = ["res2", "res3", "res4", "res5"][:num_stages]
    backbone = ResNet(stem, stages, out_features=names)
    if fpn is not None:
        top_block = LastLevelMaxPool()
        top_block.in_feature = f"p{num_stages + 1}"
        backbone = FPN(backbone, names, 8, norm=resolve_norm(fpn), top_block=top_block)
    with torch.no_grad():
        for name, value in backbone.state_dict().items():
            if (value.dim() == 1 or name.endswith("running_matrix")) and value.is_floating_point():
                low = 0.5 if name.endswith(("weight", "running_var")) else -0.5
                value.uniform_(low, 1.5, generator=generator)
    return backbone


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
