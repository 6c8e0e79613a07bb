"""timm models with whitening: names, positions, weights in both directions, timm's scripts."""

import argparse
import subprocess
import sys

import pytest
import timm
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import build_backbone
from safetensors.torch import save_file
from timm.utils import CheckpointSaver
from torch import nn

from examples import timm_models
from gw_detectron.config import read_config
from gw_detectron.errors import UnknownNormError, UserError
from gw_detectron.layers import GroupWhitening2d
from gw_detectron.weights import convert_file, to_torchvision


def whitened(model: nn.Module) -> int:
    return sum(isinstance(module, GroupWhitening2d) for module in model.modules())


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
    model = timm.create_model(name, num_classes=3)
    assert whitened(model) == count
    assert model.pretrained_cfg["architecture"] == name.partition(".")[0]
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 3)


def test_another_norm_other_positions_and_unknown_ones():
    model = timm.create_model(
        "gw_resnet18", positions="S1", norm="GW:groups=16", features_only=True
    )
    assert [len(level[0]) for level in model(torch.randn(1, 3, 64, 64))] == [
        64,
        64,
        128,
        256,
        512,
    ]
    assert whitened(model) == 1 and model.bn1.num_groups == 16
    assert whitened(timm.create_model("gw_resnet18", positions="")) == 0
    with pytest.raises(RuntimeError, match="s1_b3"):
        timm.create_model("gw_resnet18.s1_b3")
    with pytest.raises(UserError, match="GX"):
        timm.create_model("gw_resnet18", norm="GX")


def test_weights_go_to_detectron2_and_back(tmp_path):
    model = timm.create_model("gw_resnet18.s1_b2", norm="GW:groups=16", num_classes=3).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "bn" in name and tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape) + 0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    args = argparse.Namespace(model="gw_resnet18.s1_b2", model_kwargs={"norm": "GW:groups=16"})
    saver = CheckpointSaver(
        model, optimizer, args, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path)
    )
    saver.save_checkpoint(0, 1)  # as timm's training script does
    with pytest.raises(UnknownNormError, match="--norm GW"):
        convert_file(tmp_path / "last.pth.tar", tmp_path / "weights.pkl")
    convert_file(tmp_path / "last.pth.tar", tmp_path / "weights.pkl", norm="GW:groups=16")
    cfg = read_config(
        str(tmp_path / "weights.yaml"), ["MODEL.RESNETS.OUT_FEATURES", "['res5']"]
    )
    cfg.MODEL.BACKBONE.NAME = "build_gw_resnet_backbone"
    backbone = build_backbone(cfg).eval()
    DetectionCheckpointer(backbone).load(cfg.MODEL.WEIGHTS)
    x = torch.randn(1, 3, 64, 64)
    assert torch.allclose(backbone(x)["res5"], model.forward_features(x), atol=1e-4)

    file = tmp_path / "timm.safetensors"
    save_file(to_torchvision(backbone.state_dict()), file)
    overlay = {"file": str(file)}
    back = timm.create_model(
        "gw_resnet18",
        norm="GW:groups=16",
        num_classes=0,
        pretrained=True,
        pretrained_cfg_overlay=overlay,
    ).eval()
    assert torch.allclose(back.forward_features(x), model.forward_features(x), atol=1e-4)


@pytest.mark.slow
def test_a_script_of_timm_finds_the_models(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, timm\nprint(timm.is_model('gw_resnet50'), __name__, sys.argv[1:])\n"
    )
    command = [sys.executable, timm_models.__file__, str(script), "--lr", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "True __main__ ['--lr', '1']\n"
