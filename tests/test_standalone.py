"""The layers with torch alone, and what the package says about a missing or broken Detectron2."""

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import gw_detectron
from gw_detectron.requirements import MODULES

ROOT = Path(__file__).parents[1]

#: hides every distribution except torch, triton and the requirements of torch, so numpy too
TORCH_ALONE = """
import importlib.metadata, re, sys
from importlib.abc import MetaPathFinder

allowed = {"torch", "triton", "gw_detectron", "torchgen", "functorch", "mpmath", "markupsafe"}
for line in importlib.metadata.requires("torch"):
    allowed.add(re.match(r"[\\w.-]+", line)[0].lower().replace("-", "_"))
allowed |= sys.stdlib_module_names
hidden = set()

class Hide(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top.lower() not in allowed and not top.startswith(("_", "nvidia", "cuda")):
            hidden.add(top)
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)

sys.meta_path.insert(0, Hide())
"""


def run(code: str, *folders: Path) -> subprocess.CompletedProcess:
    path = os.pathsep.join(str(folder) for folder in (*folders, ROOT))
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def test_layers_and_functions_work_with_torch_alone():
    code = """
import torch
for name in ("detectron2", "fvcore", "iopath", "pycocotools", "torchvision", "matplotlib", "yaml", "PIL", "tabulate",
             "safetensors", "requests", "tqdm", "scipy", "numpy"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name)

from gw_detectron import BatchWhitening2d, GroupWhitening2d
from gw_detectron import *
from gw_detectron.layers import Solver, batch_whiten, group_whiten
import gw_detectron.layers, gw_detectron.ops, gw_detectron.errors, gw_detectron.version, gw_detectron.atomic

for layer in (GroupWhitening2d(16, 8), BatchWhitening2d(16, 8), GroupWhitening2d(16, 8, solver="zca")):
    x = torch.randn(2, 16, 9, 7, requires_grad=True)
    y = layer(x)
    y.square().mean().backward()
    for tensor in (y, x.grad, layer.weight.grad, layer.bias.grad):
        assert tensor.isfinite().all()
    assert tensor.abs().sum() > 0
x = torch.randn(2, 16, 9, 7)
assert torch.equal(group_whiten(x, 8), GroupWhitening2d(16, 8)(x))
assert torch.equal(group_whiten(x, 8, relu=True), GroupWhitening2d(16, 8)(x, relu=True))
assert torch.equal(batch_whiten(x, 8, solver=Solver("zca")), BatchWhitening2d(16, 8, "zca")(x))

from gw_detectron import convert_norms, norm_spec, resolve_norm
model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.BatchNorm2d(16))
assert "2 of 2 norm layers converted" in str(convert_norms(model, {"1": "GW:groups=8", "2": "GN:groups=4"}))
assert model(torch.randn(2, 3, 9, 7)).isfinite().all()
assert norm_spec(model[1]) == "GW:groups=8,iters=5,eps=1e-05,solver=newton" and resolve_norm("BN") == "BN"
try:
    resolve_norm("FrozenBN")
except ValueError as error:
    known = ["BN", "BRN", "BW", "EvoNormS0", "FRN", "FrozenBW", "GN", "GW", "SyncBN"]
    assert f"Fix: use one of {known}" in str(error), error

import gw_detectron
for name in ("no_such_name", "add_gw_config", "model_zoo"):
    assert not hasattr(gw_detectron, name) and getattr(gw_detectron, name, 3) == 3
statements = ("from gw_detectron import add_gw_config", "gw_detectron.add_gw_config", "import gw_detectron.modeling",
              "from gw_detectron import model_zoo", "import gw_detectron.engine.trainer", "gw_detectron.engine")
for statement in statements:
    try:
        exec(statement)
    except (ImportError, AttributeError) as error:
        assert isinstance(error, ImportError) == ("import" in statement)
        assert isinstance(error, gw_detectron.errors.UserError) and error.__context__ is None
        print(error)
assert {"detectron2", "torchvision"} <= hidden
"""
    done = run(TORCH_ALONE + code)
    assert done.returncode == 0, done.stderr
    names = ("add_gw_config", "add_gw_config", "modeling", "model_zoo", "engine", "engine")
    lines = done.stdout.splitlines()
    assert len(lines) == len(names)
    for name, line in zip(names, lines, strict=True):
        assert line.startswith(
            f"gw_detectron.{name}: needs Detectron2, which is not installed. Fix: run `python tools/"
        )
        assert "https://detectron2.readthedocs.io" in line


def test_an_error_inside_detectron2_is_raised(tmp_path):
    (tmp_path / "detectron2").mkdir()
    (tmp_path / "detectron2" / "__init__.py").write_text("import no_such_dependency")
    done = run("import gw_detectron", tmp_path)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == "ModuleNotFoundError: No module named 'no_such_dependency'"


def test_every_module_is_either_standalone_or_asks_for_detectron2():
    standalone = {"atomic", "cli", "errors", "layers", "needs_detectron2", "norms", "ops", "requirements", "version"}
    standalone |= {"__main__", "commands", "installation", "progress", "shipped_configs", "timm_models"}
    modules = {module.name for module in pkgutil.iter_modules(gw_detectron.__path__)}
    needing = {module for module in MODULES if "." not in module}
    assert modules == standalone | needing and not standalone & needing


def test_the_command_line_works_without_detectron2():
    code = """
import importlib.abc, sys

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "detectron2":
            raise ModuleNotFoundError(f"No module named {name!r}", name="detectron2")

sys.meta_path.insert(0, Hide())
from gw_detectron.commands import main
if len(sys.argv) > 1 and sys.argv[1] == "import":
    from benchmarks import compiled_kernels, kernel_benchmark, layer_benchmark, memory
    sys.exit()
main()
"""
    doctor, train, overview, imported = (
        run(f"import sys; sys.argv[1:] = {words}\n{code}") for words in (["doctor"], ["train"], [], ["import"])
    )
    assert doctor.returncode == 0, doctor.stderr
    assert "Detectron2 components" in doctor.stdout and "Traceback" not in doctor.stderr
    assert overview.returncode == 0 and "gw-detectron COMMAND" in overview.stdout
    assert imported.returncode == 0, imported.stderr
    assert train.returncode == 1 and train.stderr.startswith("Error: gw-detectron train: needs Detectron2")
