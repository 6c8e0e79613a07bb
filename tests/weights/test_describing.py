"""The record of a run in its checkpoints, and the description of checkpoints and weight files."""

import hashlib
import re
import sys

import pytest
import torch
import yaml
from safetensors.torch import save_file

from gw_detectron.config import read_config
from gw_detectron.errors import ConfigError, WeightsFileError
from gw_detectron.weights import Checkpoint, trained_classes, trained_scale
from gw_detectron.weights.describing import describe_checkpoint, format_config
from gw_detectron.weights.recording import config_differences
from gw_detectron.workbench import commands
from gw_detectron.workbench.run import Trainer

from ..tiny_run import arguments, config_of


@pytest.fixture(scope="module")
def run(small_dataset, tmp_path_factory):
    """The output folder of a run that starts from a checkpoint and is resumed once."""
    folder = tmp_path_factory.mktemp("run")
    starts = (
        ("a", "", False),
        ("b", folder / "a" / "model.pth", False),
        ("b", "", True),
    )
    for name, weights, resume in starts:
        trainer = Trainer(config_of(arguments(folder / name, MODEL__WEIGHTS=weights)))
        trainer.resume_or_load(resume=resume)
        trainer.iter = 5
        trainer.checkpointer.save("model", iteration=5)
    return folder


def test_a_checkpoint_has_the_record_of_its_run(run):
    description = describe_checkpoint(run / "b" / "model.pth")
    record = description["record"]
    versions = record["versions"]

    assert description["iteration"] == 5
    assert description["norms"]["GW:groups=16,iters=5,eps=1e-05,solver=newton"] == 10
    assert description["tensors"] > 100
    assert description["values"] > 1e7
    assert record["seed"] == 7
    assert yaml.safe_load(record["config"])["SOLVER"]["IMS_PER_BATCH"] == 2
    assert {"gw_detectron", "detectron2", "numpy", "python"} <= versions.keys()
    assert versions["torch"] == torch.__version__

    weights = run / "a" / "model.pth"  # kept by the resumed run
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert record["start_weights"] == {"address": str(weights), "sha256": digest}
    assert torch.load(weights, weights_only=True)["record"]["start_weights"] == {}


def test_the_command_prints_text_and_a_config(run, capsys, monkeypatch, tmp_path):
    path = str(run / "b" / "model.pth")

    def printed(*flags):
        monkeypatch.setattr(
            sys, "argv", ["gw-detectron", "weights", "describe", path, *flags]
        )
        commands.main()
        return capsys.readouterr().out

    (tmp_path / "config.yaml").write_text(printed("--config"))
    recorded = yaml.safe_load(describe_checkpoint(path)["record"]["config"])
    assert yaml.safe_load(read_config(tmp_path / "config.yaml").dump()) == recorded
    text = printed()
    for words in ("iteration: 5", "seed: 7", r"sha256: \w{64}", "GW:groups=16.*: 10\n"):
        assert re.search(words, text), words


def test_other_files(tmp_path):
    tensors = {"a": torch.zeros(2, 3), "b": torch.ones(2)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    torch.save({"state_dict": tensors, "epoch": 1}, tmp_path / "wrapped.pth")
    torch.save(torch.ones(3), tmp_path / "tensor.pth")

    for name, count in (("a.safetensors", 2), ("wrapped.pth", 2), ("tensor.pth", 0)):
        description = describe_checkpoint(tmp_path / name)
        assert description.keys() == {"file", "format", "tensors", "values"}
        assert (description["tensors"], description["values"]) == (count, count * 4)


@pytest.mark.parametrize(
    "record", [{}, {"record": 3}, {"record": {"seed": 1}}, {"record": {"config": 7}}]
)
def test_a_file_without_a_config_is_named(record):
    with pytest.raises(ConfigError, match="'a.pth'"):
        format_config({"file": "a.pth", **record})


# --- records whose repr would not end ---


def doubled(kind, levels=60):
    """Containers that each hold the one before twice."""
    value = kind()
    for _ in range(levels):
        value = [value, value] if kind is list else {"a": value, "b": value}
    return value


@pytest.mark.parametrize("kind", [list, dict])
def test_shared_containers_are_refused(tmp_path, kind):
    torch.save({"model": {}, "record": {"config": doubled(kind)}}, tmp_path / "a.pth")
    with pytest.raises(WeightsFileError, match="record of the file"):
        describe_checkpoint(tmp_path / "a.pth")


def test_containers_that_hold_themselves_are_refused(tmp_path):
    record: dict = {}
    record["itself"] = record
    torch.save({"model": {}, "record": record}, tmp_path / "a.pth")
    with pytest.raises(WeightsFileError, match="record of the file"):
        describe_checkpoint(tmp_path / "a.pth")


def test_names_of_classes_are_text():
    record = {"classes": [{"id": 1, "name": doubled(list)}]}
    assert trained_classes(Checkpoint("", "", {}, {"record": record})) == {}


@pytest.mark.parametrize(
    "record", [None, [], {}, {"image_scale": "1"}, {"image_scale": -1.0}]
)
def test_a_scale_of_images_that_is_not_recorded_is_unknown(record):
    metadata = {} if record is None else {"record": record}
    assert trained_scale(Checkpoint("", "", {}, metadata)) == 0
    assert trained_scale(None) == 0


@pytest.mark.parametrize("start, step", [("[]", "[*a, *a]"), ("{}", "{x: *a, y: *a}")])
def test_configs_of_shared_containers_are_not_compared(start, step):
    lines = [f"k0: &a {start}", *(f"k{level}: &a {step}" for level in range(1, 60))]
    differences = config_differences({"config": "\n".join(lines)}, "k59: 1")
    assert differences.keys() == {"config"}
