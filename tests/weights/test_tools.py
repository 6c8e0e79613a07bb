"""The tools convert_weights and verify_weights: tables, exit status, errors without traceback."""

import json
import shutil

import pytest
import torch

from gw_detectron.cli import errors_reported
from gw_detectron.commands import convert_weights, verify_weights
from gw_detectron.data import synthetic_images


@pytest.fixture
def convert_tool():
    return lambda *words: convert_weights.main(convert_weights.get_parser().parse_args([str(word) for word in words]))


@pytest.fixture
def verify_tool(monkeypatch):
    monkeypatch.setattr(verify_weights, "synthetic_images", lambda: synthetic_images(1))
    return lambda *words: verify_weights.main(verify_weights.get_parser().parse_args([str(word) for word in words]))


def test_convert_prints_a_row_for_each_tensor(convert_tool, r18, r18_file, tmp_path, capsys):
    convert_tool(r18_file, tmp_path / "a.pkl", "--arch", "R-18", "--positions", "S1-B1")
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line for line in printed.splitlines() if line}
    assert r18.keys() <= lines.keys()
    assert lines["layer1.0.bn1.weight"].split(maxsplit=3)[1:] == [
        "res2.0.conv1.norm.weight",
        "64",
        "reshaped from (1, 64, 1, 1)",
    ]
    assert "(dropped)" in lines["fc.weight"]
    assert "82 tensors of R-18, BN, GW:groups=64,iters=5,eps=0,solver=newton at S1-B1" in printed


def test_convert_stores_the_stated_pool_norm(convert_tool, verify_tool, r18, tmp_path, capsys):
    layer = {"last_bn.weight": torch.ones(512), "last_bn.bias": torch.zeros(512)}
    torch.save(r18 | layer, tmp_path / "a.pth")
    norms = ("--norm", "GW", "--pool-norm", "GW:groups=16,solver=zca")
    convert_tool(tmp_path / "a.pth", tmp_path / "a.pkl", "--keep-fc", *norms)
    assert "before the classifier: GW:groups=16,solver=zca" in capsys.readouterr().out
    assert verify_tool(tmp_path / "a.pkl")
    capsys.readouterr()
    with pytest.raises(SystemExit), errors_reported():
        convert_tool(tmp_path / "a.pth", tmp_path / "b.pkl", *norms)
    assert "--keep-fc" in capsys.readouterr().err


def test_convert_reports_errors_and_writes_nothing(convert_tool, r18_file, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught, errors_reported():
        convert_tool(r18_file, tmp_path / "a.pkl", "--arch", "R-50")
    assert caught.value.code == 1
    assert "architecture ('R-50'): the weights are of R-18" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_verify_agrees_or_not(verify_tool, convert_tool, r18_file, tmp_path, capsys, monkeypatch):
    convert_tool(r18_file, tmp_path / "a.pkl", "--keep-fc")
    folder = tmp_path / "images" / "3"
    folder.mkdir(parents=True)
    synthetic_images(1)[0].save(folder / "0.png")
    assert verify_tool(tmp_path / "a.pkl", "--source", r18_file, "--images", tmp_path / "images")
    printed = capsys.readouterr().out
    assert "AGREES" in printed
    assert "of 1 images" in printed
    convert_tool(r18_file, tmp_path / "c.pkl")
    for words in ((), ("--json",)):
        assert verify_tool(tmp_path / "c.pkl", "--images", tmp_path / "images", *words)
        printed = capsys.readouterr().out
        assert "accuracy: not measured: weights" in printed and "have no classifier. Fix: convert" in printed
    assert json.loads(printed)["accuracy"] == []
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((tmp_path / "a.yaml").read_text().replace("FORMAT: RGB", "FORMAT: BGR"))
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    shutil.copy(tmp_path / "a.pkl", tmp_path / "b.pkl")
    assert not verify_tool(f"gw://file/{tmp_path / 'b.pkl'}", "--config-file", wrong)
    assert "signature of: BGR" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("weights", "images", "message"),
    [
        ("http://127.0.0.1:9/r18.pth", None, "cannot fetch"),
        ("no.pth", None, "file not found"),
        (".", None, "cannot be read"),
        (None, "images", "Fix: put images into each class folder"),
    ],
)
def test_verify_reports_unusable_paths(verify_tool, r18_file, tmp_path, monkeypatch, capsys, weights, images, message):
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("images/0", "images/1"):
        (tmp_path / name).mkdir(parents=True)
    synthetic_images(1)[0].save(tmp_path / "images" / "0" / "0.png")
    options = ("--images", images) if images else ()
    with pytest.raises(SystemExit) as caught, errors_reported():
        verify_tool(weights or r18_file, *options)
    assert caught.value.code == 1 and message in capsys.readouterr().err
