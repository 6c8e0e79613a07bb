"""What works with torch alone, without Detectron2, and in stock scripts; versions; `gw-detectron doctor`."""

import argparse
import os
import re
import subprocess
import sys

import pytest
import torch

from gw_detectron.installation import git_commit, has_detectron2
from gw_detectron.workbench.commands import doctor

from .tiny_run import ROOT, environment, words

#: hides Detectron2; with ``torch_alone`` also every distribution that torch does not require
HIDE = """
import importlib.abc, importlib.metadata, re, sys

allowed = {"torch", "triton", "gw_detectron", "torchgen", "functorch", "mpmath", "markupsafe", *sys.stdlib_module_names}
for line in importlib.metadata.requires("torch"):
    allowed.add(re.match(r"[\\w.-]+", line)[0].lower().replace("-", "_"))

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top.lower() in allowed or top.startswith(("_", "nvidia", "cuda"))
        if top == "detectron2" or torch_alone and not known:
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)

sys.meta_path.insert(0, Hide())
"""


def run(code: str, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "ignore", "-c", code, *words]
    return subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_layers_and_norms_work_with_torch_alone():
    code = """
torch_alone = True
import torch
for name in ("detectron2", "fvcore", "torchvision", "matplotlib", "yaml", "PIL", "tabulate", "safetensors", "numpy"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name)

from gw_detectron import *
from gw_detectron.layers import batch_whiten, group_whiten

for layer in (GroupWhitening2d(16, 8), BatchWhitening2d(16, 8), GroupWhitening2d(16, 8, solver="zca")):
    x = torch.randn(2, 16, 9, 7, requires_grad=True)
    layer(x).square().mean().backward()
    assert x.grad.isfinite().all() and layer.bias.grad.abs().sum() > 0
assert torch.equal(group_whiten(x, 8), GroupWhitening2d(16, 8)(x))

model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.BatchNorm2d(16))
convert_norms(model, {"1": "GW:groups=8", "2": "GN:groups=4"})
assert model(torch.randn(2, 3, 9, 7)).isfinite().all() and norm_spec(model[1]).startswith("GW:groups=8,")
from gw_detectron import add_gw_config
"""
    done = run(HIDE + code)

    *_, error = done.stderr.splitlines()
    assert done.returncode == 1
    assert "MissingPackageError: gw_detectron.add_gw_config" in error
    assert "tools/install_detectron2.py" in error


@pytest.mark.parametrize(("command", "status"), [("doctor", 0), ("train", 1)])
def test_commands_without_detectron2(command, status):
    code = "from gw_detectron.workbench.commands import main; main()"

    done = run(f"torch_alone = False\n{HIDE}\n{code}", command)

    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert ("needs Detectron2" in done.stderr) == (status == 1)


def test_an_error_inside_detectron2_is_raised(tmp_path, monkeypatch):
    (tmp_path / "detectron2").mkdir()
    (tmp_path / "detectron2" / "__init__.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "detectron2")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        has_detectron2()


# a user's script for stock Detectron2: it neither imports nor names this package
STOCK = """
import os
from detectron2.config import get_cfg
from detectron2.data.datasets import register_coco_instances
from detectron2.engine import DefaultTrainer, default_argument_parser, default_setup

folder = os.environ["SHAPES"]
register_coco_instances("shapes", {}, folder + "/annotations/instances_train.json", folder + "/train")
args = default_argument_parser().parse_args()
cfg = get_cfg()
cfg.merge_from_file(args.config_file)
cfg.merge_from_list(args.opts)
cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("shapes",), ()
cfg.freeze()
default_setup(cfg, args)
trainer = DefaultTrainer(cfg)
trainer.resume_or_load(resume=False)
trainer.train()
print("trained", sum("GroupWhitening2d" in type(m).__name__ for m in trainer.model.modules()))
"""


def test_a_stock_script_trains_with_our_yaml_by_the_environment_module(
    shapes, tmp_path
):
    (tmp_path / "stock.py").write_text(STOCK)
    flags = words(tmp_path / "output", SOLVER__MAX_ITER=2, SOLVER__STEPS="(1,)")
    variables = environment(
        SHAPES=str(shapes), DETECTRON2_ENV_MODULE="gw_detectron.env"
    )

    ended = subprocess.run(
        [sys.executable, "stock.py", *flags],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )

    assert ended.returncode == 0, ended.stderr[-2000:]
    assert re.search(r"trained [1-9]", ended.stdout)


def test_git_commit(tmp_path, monkeypatch):
    def git(*words):
        identity = (
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "-c",
            "commit.gpgsign=false",
        )
        done = subprocess.run(
            ["git", *identity, *words],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    git("init")
    assert git_commit(tmp_path) == ""  # nothing committed

    file = tmp_path / "file"
    file.write_text("before")
    git("add", "file")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD")
    output = tmp_path / "output"  # not tracked
    output.mkdir()
    assert git_commit(tmp_path) == commit

    file.write_text("after")
    assert git_commit(tmp_path) == f"{commit}-dirty"
    assert git_commit(output) == ""  # as site-packages inside of a checkout

    monkeypatch.setenv("PATH", "")  # no git
    assert git_commit(tmp_path) == ""


def test_doctor_finds_a_healthy_installation(capsys):
    assert doctor.main(argparse.Namespace())

    printed = capsys.readouterr().out
    assert re.search(r"Detectron2 components +yes +registered", printed)
    assert re.search(r"whitening layers \(cpu\) +yes", printed)
    version, _, _ = torch.__version__.partition("+")
    assert re.search(rf"torch +{version}", printed)


@pytest.mark.parametrize("fault", ["wrong numbers", "no kernel image"])
def test_doctor_finds_broken_layers(capsys, monkeypatch, fault):
    compute = doctor._output_and_gradient
    errors = iter((0.0, 0.5))

    def broken(*args):
        if fault != "wrong numbers":
            raise RuntimeError(fault)
        y, _ = compute(*args)
        return [y + next(errors)]

    monkeypatch.setattr(doctor, "_output_and_gradient", broken)

    assert not doctor.main(argparse.Namespace())
    assert "BROKEN" in capsys.readouterr().out
