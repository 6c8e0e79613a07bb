import json
import os
import runpy
import sys

import numpy as np
import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import build_model
from PIL import Image

from gw_detectron.export import load_model
from gw_detectron.model_zoo import get_config

from ..tiny_run import CONFIG, ROOT

SMALL = ["MODEL.FPN.OUT_CHANNELS", 32, "MODEL.ROI_BOX_HEAD.FC_DIM", 16, "MODEL.ROI_BOX_HEAD.NUM_CONV", 1]


@pytest.fixture(scope="module")
def cfg():
    cfg = get_config("quick_schedules/mask_rcnn_R_18_FPN_GW_demo.yaml")
    cfg.merge_from_list(SMALL)
    return cfg


@pytest.fixture(scope="module")
def trained(cfg, tmp_path_factory):
    """A detector and its weights file."""
    torch.manual_seed(0)
    model = build_model(cfg).eval()
    folder = tmp_path_factory.mktemp("trained")
    DetectionCheckpointer(model, str(folder)).save("model")
    return model, folder / "model.pth"


def with_weights(cfg, weights):
    cfg = cfg.clone()
    cfg.MODEL.WEIGHTS = str(weights)
    return cfg


def test_all_weights_are_loaded(cfg, trained):
    model, path = trained
    loaded = load_model(with_weights(cfg, path))
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    assert not loaded.training


def test_weights_without_the_fpn_are_refused(cfg, trained, tmp_path):
    model, _ = trained
    path = tmp_path / "resnet.pth"
    torch.save(
        {"model": {f"backbone.bottom_up.{k}": v for k, v in model.backbone.bottom_up.state_dict().items()}}, path
    )
    with pytest.raises(ValueError, match=r"24 tensors are missing \(backbone.fpn_lateral2.weight, .*--no-fpn"):
        load_model(with_weights(cfg, path), needed="backbone.")
    alone = load_model(with_weights(cfg, path), needed="backbone.bottom_up.").backbone.bottom_up
    assert torch.equal(alone.res5[1].conv2.weight, model.backbone.bottom_up.res5[1].conv2.weight)


def test_weights_without_a_part_of_the_resnet_are_refused(cfg, trained, tmp_path):
    model, _ = trained
    state = {name: value for name, value in model.state_dict().items() if "res4.1" not in name}
    torch.save({"model": state}, tmp_path / "part.pth")
    with pytest.raises(ValueError, match="Missing: backbone.bottom_up.res4.1"):
        load_model(with_weights(cfg, tmp_path / "part.pth"))


@pytest.mark.parametrize("size", [0, 100, 100_000])
def test_a_damaged_file_is_named(cfg, trained, tmp_path, size):
    path = tmp_path / "cut.pth"
    path.write_bytes(trained[1].read_bytes()[:size])
    with pytest.raises(ValueError, match="cut.pth': cannot be read: it is (cut off|empty)"):
        load_model(with_weights(cfg, path))


@pytest.mark.parametrize(
    ("weights", "message"), [("", "no weights are given. Fix: give those of"), ("x.pth", "file not found: 'x.pth'")]
)
def test_no_weights(cfg, weights, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_model(with_weights(cfg, weights))


@pytest.fixture
def run_tool(monkeypatch, capsys):
    """Run a tool as a script and return its exit status, stdout and stderr."""

    def run(name, *words):
        words = ["--config-file", CONFIG, *words, *SMALL]
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        status = 0
        try:
            runpy.run_path(str(ROOT / "tools" / name), run_name="__main__")
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


def test_the_command_for_backbones(trained, tmp_path, run_tool):
    model, path = trained
    folder = tmp_path / "out"
    status, printed, complaint = run_tool(
        "export_backbone.py", "--weights", path, "--format", "torchscript", "--pixels", "--output", folder
    )
    assert status == 0, complaint
    assert "p6        32          64" in printed
    assert f"{folder}/backbone.ts agrees with the model" in printed
    report = json.loads((folder / "parity.json").read_text())
    assert report["source"] == {"config": str(CONFIG), "weights": str(path)}
    assert report["input"]["inside"]
    pixels = 255 * torch.rand(1, 3, 96, 128)
    with torch.no_grad():
        expected = model.backbone((pixels - model.pixel_mean) / model.pixel_std)
        found = torch.jit.load(folder / "backbone.ts")(pixels)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, expected.values(), strict=True))


def test_a_user_error_has_no_traceback(tmp_path, run_tool):
    status, _, complaint = run_tool(
        "export_backbone.py", "--weights", tmp_path / "none.pth", "--output", tmp_path / "out"
    )
    assert status == 1
    missing = tmp_path / "none.pth"
    assert complaint.startswith(f"\nError: MODEL.WEIGHTS: file not found: '{missing}' (cwd: {os.getcwd()})")
    assert list(tmp_path.iterdir()) == []


def test_the_command_for_detectors(trained, tmp_path, run_tool):
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    folder = tmp_path / "out"
    status, printed, complaint = run_tool(
        *("export_model.py", "--weights", trained[1], "--image", tmp_path / "image.png", "--output", folder),
        *("--format", "torchscript", "--detections", "7"),
    )
    assert status == 0, complaint
    assert f"{folder}/model.ts agrees with the model" in printed
    assert json.loads((folder / "parity.json").read_text())["detections"] == 7


def test_ap_on_the_datasets_of_a_run_folder(cfg, trained, tmp_path, run_tool, small_dataset):
    data = small_dataset / "gw_synthetic"
    entry = {"json": str(data / "annotations" / "instances_val.json"), "images": str(data / "val")}
    (tmp_path / "datasets.yaml").write_text(json.dumps({"val": {"export_test_val": entry}}))
    own = cfg.clone()
    own.DATASETS.TEST = ("export_test_val",)
    (tmp_path / "config.yaml").write_text(own.dump())
    status, printed, complaint = run_tool(
        *("export_model.py", "--config-file", tmp_path / "config.yaml", "--weights", trained[1]),
        *("--output", tmp_path / "out", "--format", "torchscript"),
        *("--dataset", "export_test_val", "--images", "2"),
    )
    assert status == 0, complaint
    assert "AP on 2 images of export_test_val" in printed
