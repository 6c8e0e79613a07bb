"""timm models with whitening: names, positions, weights in both directions, timm's scripts."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.layers import ShapeSpec
from safetensors.torch import save_file
from timm.utils import CheckpointSaver
from torch import nn

from examples import timm_models
from gw_detectron.config import changed_config, read_config
from gw_detectron.errors import UnknownNormError, UserError
from gw_detectron.layers import GroupWhitening2d
from gw_detectron.modeling import build_gw_resnet_backbone
from gw_detectron.weights import convert_file, to_torchvision


def whitened(model: nn.Module) -> int:
    kinds = [type(module) for module in model.modules()]
    return kinds.count(GroupWhitening2d)


IMAGE = torch.randn(1, 3, 64, 64)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gw_resnet18.s1_b2", 9),
        ("gw_resnet50", 17),
        ("gw_resnet50.s1_b12", 33),
        ("gw_resnext50_32x4d.s1_b3", 17),
    ],
)
def test_the_tag_names_the_positions(name, count):
    architecture, _, _ = name.partition(".")

    model = timm.create_model(name, num_classes=3)

    assert whitened(model) == count
    assert model.pretrained_cfg["architecture"] == architecture
    assert model(IMAGE).shape == (1, 3)


def test_another_norm_and_other_positions():
    model = timm.create_model(
        "gw_resnet18", positions="S1", norm="GW:groups=16", features_only=True
    )

    levels = model(IMAGE)

    assert [level.shape[1] for level in levels] == [64, 64, 128, 256, 512]
    assert whitened(model) == 1
    assert model.bn1.num_groups == 16


def test_unknown_norms_and_positions():
    with pytest.raises(RuntimeError, match="s1_b3"):
        timm.create_model("gw_resnet18.s1_b3")
    with pytest.raises(UserError, match="GX"):
        timm.create_model("gw_resnet18", norm="GX")


def test_weights_go_to_detectron2_and_back(tmp_path):
    norm = "GW:groups=16"
    model = timm.create_model("gw_resnet18.s1_b2", norm=norm, num_classes=3).eval()
    for name, tensor in model.state_dict().items():
        if "bn" in name and tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape) + 0.5)
    expected = model.forward_features(IMAGE)
    checkpoint = save_as_timm(model, norm, tmp_path)

    with pytest.raises(UnknownNormError, match="--norm GW"):
        convert_file(checkpoint, tmp_path / "weights.pkl")
    convert_file(checkpoint, tmp_path / "weights.pkl", norm=norm)

    features = {"MODEL.RESNETS.OUT_FEATURES": ["res5"]}
    cfg = changed_config(read_config(tmp_path / "weights.yaml"), features)
    backbone = build_gw_resnet_backbone(cfg, ShapeSpec(channels=3)).eval()
    DetectionCheckpointer(backbone).load(cfg.MODEL.WEIGHTS)
    output = backbone(IMAGE)["res5"]
    assert torch.allclose(output, expected, atol=1e-4)

    file = tmp_path / "timm.safetensors"
    save_file(to_torchvision(backbone.state_dict()), file)
    back = timm.create_model(
        "gw_resnet18",
        norm=norm,
        num_classes=0,
        pretrained=True,
        pretrained_cfg_overlay={"file": str(file)},
    )
    output = back.eval().forward_features(IMAGE)
    assert torch.allclose(output, expected, atol=1e-4)


def save_as_timm(model: nn.Module, norm: str, folder: Path) -> Path:
    """Save a checkpoint as timm's training script does."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    args = argparse.Namespace(model="gw_resnet18.s1_b2", model_kwargs={"norm": norm})
    saver = CheckpointSaver(
        model, optimizer, args, checkpoint_dir=str(folder), recovery_dir=str(folder)
    )
    saver.save_checkpoint(0, 1)
    return folder / "last.pth.tar"


@pytest.mark.slow
def test_a_script_of_timm_finds_the_models(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, timm\nprint(timm.is_model('gw_resnet50'), __name__, sys.argv[1:])\n"
    )
    command = [sys.executable, timm_models.__file__, str(script), "--lr", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "True __main__ ['--lr', '1']\n"
