"""Every command and address refuses a weight file or yaml that holds code, and does not run the code."""

import contextlib
import io
import os
import pickle
import shutil
import sys

import numpy as np
import pytest
import torch

from gw_detectron.errors import UserError
from gw_detectron.weights import open_checkpoint
from gw_detectron.workbench.commands import main

from .tiny_run import CONFIG, OPTS

WORDS = [str(word) for pair in OPTS.items() for word in pair]
#: command and its arguments: {config}, {weights}, {folder} are replaced
COMMANDS = {
    "train": "train --config-file {config} MODEL.WEIGHTS {weights} OUTPUT_DIR {folder}/out",
    "evaluate": "train --config-file {config} --eval-only MODEL.WEIGHTS {weights} OUTPUT_DIR {folder}/out",
    "resume": "train --config-file {config} --resume OUTPUT_DIR {folder}",
    "export backbone": "export {weights} --backbone --config-file {config} --output {folder}/out",
    "export model": "export {weights} --config-file {config} --image no.png --output {folder}/out",
    "convert": "weights convert {weights} {folder}/converted.pkl",
}

pytestmark = pytest.mark.usefixtures("small_dataset")


def run_command(line, monkeypatch, **values):
    """Run a command in this process; return its exit status and error output."""
    words = [word.format(**values) for word in line.split()]
    if words[0] != "weights":
        words += WORDS
    monkeypatch.setattr(sys, "argv", ["gw-detectron", *words])
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, errors.getvalue()


class Harm:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def write_harm(kind, folder):
    """Write a malicious weight file, and name it as the last checkpoint of the folder."""
    content = {
        "model": {"conv1.weight": np.ones(1)},
        "trainer": Harm(folder / "harm"),
        "iteration": 3,
    }
    if kind == "pickle":
        path = folder / "harm.pkl"
        path.write_bytes(pickle.dumps(content))
    else:
        path = folder / "harm.pth"
        torch.save(content, path, _use_new_zipfile_serialization=kind == "archive")
    (folder / "last_checkpoint").write_text(path.name)
    return path


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        *((command, "pickle") for command in COMMANDS),
        ("train", "archive"),
        ("train", "legacy"),
    ],
)
def test_code_in_weights_is_not_run(command, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    weights = write_harm(kind, tmp_path)

    status, errors = run_command(
        COMMANDS[command], monkeypatch, weights=weights, config=CONFIG, folder=tmp_path
    )

    assert status == 1, errors
    assert str(weights) in errors
    assert "mkdir" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "line", [line for line in COMMANDS.values() if "{config}" in line]
)
def test_code_in_yaml_is_not_run(line, tmp_path, monkeypatch):
    config = tmp_path / "harm.yaml"
    marker = tmp_path / "harm"
    tag = f"!!python/object/apply:os.mkdir ['{marker}']"
    config.write_text(f"VERSION: 2\nMODEL:\n  DEVICE: {tag}\n")

    status, errors = run_command(
        line, monkeypatch, weights=config, config=config, folder=tmp_path
    )

    assert status == 1, errors
    assert str(config) in errors
    assert "os.mkdir" in errors
    assert not marker.exists()


@pytest.mark.parametrize(
    "address",
    [
        "gw://imagenet/R-50",
        "{path}?matching_heuristics=True",
        "detectron2://x/harm.pkl",
        "https://dl.fbaipublicfiles.com/detectron2/x/harm.pkl",
        "catalog://ImageNetPretrained/MSRA/R-50",
    ],
)
def test_code_behind_an_address_is_not_run(address, tmp_path, monkeypatch):
    path = write_harm("pickle", tmp_path)
    cache = tmp_path / "cache"
    monkeypatch.setenv("FVCORE_CACHE", str(cache))
    monkeypatch.setenv("GW_DETECTRON_WEIGHTS", str(tmp_path))
    # as if the files had been downloaded
    for name in ("detectron2/x/harm.pkl", "detectron/ImageNetPretrained/MSRA/R-50.pkl"):
        file = cache / name
        file.parent.mkdir(parents=True)
        shutil.copy(path, file)
    harm = {"model": Harm(tmp_path / "harm")}
    torch.save(harm, tmp_path / "R-50-GW-S1-B2.pth")

    with pytest.raises(UserError, match="names (posix|nt).mkdir"):
        open_checkpoint(address.format(path=path))

    assert not (tmp_path / "harm").exists()
