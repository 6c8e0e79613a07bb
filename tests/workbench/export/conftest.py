import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gw_detectron.layers import use_backend
from gw_detectron.weights import Preprocessing
from gw_detectron.workbench.export import backbone, detector
from gw_detectron.workbench.export.formats import ExportedFile

# makes the import of modules fail
FORBID = "import sys; sys.modules.update(dict.fromkeys({names}))\n"
CODE = """
import numpy as np
inputs = list(np.load("inputs.npz").values())
if sys.argv[1].endswith("pt2"):
    import torch, torchvision
    with torch.no_grad():
        outputs = torch.export.load(sys.argv[1]).module()(*map(torch.from_numpy, inputs))
else:
    import onnxruntime
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    outputs = session.run(None, {given.name: value for given, value in zip(session.get_inputs(), inputs)})
np.savez("outputs.npz", *map(np.asarray, outputs))
"""
PACKAGES = ("gw_detectron", "detectron2", "fvcore")


@pytest.fixture(autouse=True)
def exported_backend():
    """Run the model on the exported backend, so that only the export makes a difference."""
    with use_backend("reference"):
        yield


@pytest.fixture(scope="session")
def preprocessing() -> Preprocessing:
    return Preprocessing(
        "RGB", (123.675, 116.28, 103.53), (58.395, 57.12, 57.375), False
    )


@pytest.fixture
def quick_file(monkeypatch):
    """Replace the written file by the program, whose outputs a function may change."""

    def replace(change=lambda outputs: outputs):
        def write(program, path):
            path.write_text("no program")

            def run(*inputs):
                outputs = dict(zip(program.names, program(*inputs), strict=True))
                return list(change(outputs).values())

            return ExportedFile(run, program.describe())

        for module in (backbone, detector):
            monkeypatch.setattr(module, "write_program", write)

    replace()
    return replace


@pytest.fixture
def run_alone(tmp_path) -> Callable[..., list[Tensor]]:
    """Run an exported file where this package is missing; return its outputs."""

    def run(path: Path, *inputs: Tensor) -> list[Tensor]:
        np.savez(tmp_path / "inputs.npz", *[each.numpy() for each in inputs])
        forbidden = [
            *PACKAGES,
            *(["torch", "torchvision"] if path.suffix == ".onnx" else []),
        ]
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            FORBID.format(names=forbidden) + CODE,
            str(path),
        ]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        with np.load(tmp_path / "outputs.npz") as outputs:
            return list(map(torch.from_numpy, outputs.values()))

    return run
