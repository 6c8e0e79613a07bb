"""The record of a run in its checkpoints, and the description of checkpoints and weight files."""

import hashlib
import re
import sys

import pytest
import torch
import yaml
from safetensors.torch import save_file

from gw_detectron.config import read_config
from gw_detectron.errors import ConfigError
from gw_detectron.weights.records import describe_checkpoint, format_config
from gw_detectron.workbench import commands
from gw_detectron.workbench.run import Trainer

from ..tiny_run import arguments, config_of


@pytest.fixture(scope="module")
def run(small_dataset, tmp_path_factory):
    """The output folder of a run that starts from a checkpoint and is resumed once."""
    folder = tmp_path_factory.mktemp("run")
    for name, weights, resume in (
        ("a", "", False),
        ("b", folder / "a" / "model.pth", False),
        ("b", "", True),
    ):
        cfg = config_of(arguments(folder / name, MODEL__WEIGHTS=weights))
        trainer = Trainer(cfg)
        trainer.resume_or_load(resume=resume)
        trainer.iter = 5
        trainer.checkpointer.save("model", iteration=5)
    return folder


def test_a_checkpoint_has_the_record_of_its_run(run):
    found = describe_checkpoint(run / "b" / "model.pth")
    record = found["record"]
    assert found["iteration"] == 5 and record["seed"] == 7
    software = {
        "gw_detectron",
        "detectron2",
        "torch",
        "torchvision",
        "numpy",
        "python",
        "platform",
    }
    assert software <= record["versions"].keys()
    assert all(type(value) is str for value in record["versions"].values())
    assert record["versions"]["torch"] == torch.__version__
    assert yaml.safe_load(record["config"])["SOLVER"]["IMS_PER_BATCH"] == 2
    weights = run / "a" / "model.pth"  # kept by the resumed run
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert record["start_weights"] == {"address": str(weights), "sha256": digest}
    assert found["norms"]["GW:groups=16,iters=5,eps=1e-05,solver=newton"] == 10
    assert found["tensors"] > 100 and found["values"] > 1e7
    assert torch.load(weights, weights_only=True)["record"]["start_weights"] == {}


def test_the_command_prints_text_and_a_config(run, capsys, monkeypatch, tmp_path):
    path, printed = str(run / "b" / "model.pth"), {}
    for flag in ("--config", ""):
        monkeypatch.setattr(
            sys, "argv", ["gw-detectron", "weights", "describe", path, *flag.split()]
        )
        commands.main()
        printed[flag] = capsys.readouterr().out
    description = describe_checkpoint(path)
    (tmp_path / "config.yaml").write_text(printed["--config"])
    recorded = yaml.safe_load(description["record"]["config"])
    assert yaml.safe_load(read_config(tmp_path / "config.yaml").dump()) == recorded
    for words in ("iteration: 5", "seed: 7", r"sha256: \w{64}", "GW:groups=16.*: 10\n"):
        assert re.search(words, printed[""]), words


def test_other_files(tmp_path):
    tensors = {"a": torch.zeros(2, 3), "b": torch.ones(2)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    torch.save(tensors, tmp_path / "bare.pth")
    torch.save(torch.ones(3), tmp_path / "tensor.pth")
    torch.save({"state_dict": tensors, "epoch": 1}, tmp_path / "wrapped.pth")
    for name in ("a.safetensors", "bare.pth", "wrapped.pth"):
        found = describe_checkpoint(tmp_path / name)
        assert (found["tensors"], found["values"]) == (2, 8) and not {
            "record",
            "norms",
            "iteration",
        } & found.keys()
    assert describe_checkpoint(tmp_path / "tensor.pth")["tensors"] == 0


@pytest.mark.parametrize(
    "record", [{}, {"record": 3}, {"record": {"seed": 1}}, {"record": {"config": 7}}]
)
def test_a_file_without_a_config_is_named(record):
    with pytest.raises(
        ConfigError,
        match=r"'a.pth': records no config. Fix: give a checkpoint of this package's",
    ):
        format_config({"file": "a.pth", **record})
