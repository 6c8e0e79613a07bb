"""Random ImageNet weights in the authors' layout, from torchvision's ResNet."""

import argparse
import functools
from collections import Counter
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from gw_detectron import GroupWhitening2d

NETWORKS: dict[str, tuple[type, list[int], dict[str, int]]] = {
    "R-18": (BasicBlock, [2, 2, 2, 2], {}),
    "R-50": (Bottleneck, [3, 4, 6, 3], {}),
    "R-101": (Bottleneck, [3, 4, 23, 3], {}),
    "X-50-32x4d": (Bottleneck, [3, 4, 6, 3], {"groups": 32, "width_per_group": 4}),
    "X-101-32x8d": (Bottleneck, [3, 4, 23, 3], {"groups": 32, "width_per_group": 8}),
}
BLOCK_NORMS: dict[str, tuple[str, ...]] = {
    "S1": (),
    "S1-B1": ("bn1",),
    "S1-B2": ("bn2",),
    "S1-B3": ("bn3",),
    "S1-B12": ("bn1", "bn2"),
    "ALL": ("bn1", "bn2", "bn3", "downsample"),
}


def make_network(
    name: str,
    positions: str = "",
    *,
    norm: str = "BN",
    classes: int = 10,
    seed: int = 0,
) -> nn.Module:
    """Build torchvision's ResNet with GW at positions and random values, in evaluation mode."""
    block, blocks, options = NETWORKS[name]
    norm_layer = nn.BatchNorm2d if norm == "BN" else functools.partial(nn.GroupNorm, 32)
    with torch.device("meta"):
        model = torchvision.models.ResNet(
            block, blocks, num_classes=classes, norm_layer=norm_layer, **options
        )
        if positions:
            model.bn1 = GroupWhitening2d(64)
            for module in model.modules():
                if isinstance(module, (BasicBlock, Bottleneck)):
                    _whiten(module, BLOCK_NORMS[positions])
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for key, value in model.state_dict().items():
        _fill(key, value, generator)
    return model.eval()


def _whiten(block: nn.Module, norms: tuple[str, ...]) -> None:
    for norm in norms:
        if norm == "downsample":
            if block.downsample is not None:
                block.downsample[1] = GroupWhitening2d(block.downsample[0].out_channels)
        elif hasattr(block, norm):
            setattr(block, norm, GroupWhitening2d(getattr(block, norm).weight.numel()))


def _fill(key: str, value: Tensor, generator: torch.Generator) -> None:
    if key.endswith("num_batches_tracked"):
        value.fill_(500)
    elif value.dim() == 4:
        bound = (6 / value[0].numel()) ** 0.5  # keeps the variance through a ReLU
        value.uniform_(-bound, bound, generator=generator)
    elif key.endswith(("running_var", "weight")) and value.dim() == 1:
        value.uniform_(0.5, 1.5, generator=generator)
    else:
        value.uniform_(-0.2, 0.2, generator=generator)


def authors_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the authors' layer: scale and shift of GW are (1, C, 1, 1)."""
    whitened = {
        name
        for name, module in model.named_modules()
        if isinstance(module, GroupWhitening2d)
    }
    return {
        key: value.detach().reshape(1, -1, 1, 1)
        if key.rpartition(".")[0] in whitened
        else value.detach()
        for key, value in model.state_dict().items()
    }


def authors_norms(state: dict[str, Tensor]) -> dict[str, str]:
    """Return the norm of each layer of an authors' state dict."""
    layers = {
        key.removesuffix(".bias"): value
        for key, value in state.items()
        if key.endswith(".bias")
    }
    gw = "GW:groups=64,iters=5,eps=0"
    return {
        layer: gw if value.dim() == 4 else "BN"
        for layer, value in layers.items()
        if layer != "fc"
    }


def training_checkpoint(state: dict[str, Tensor]) -> dict[str, Any]:
    """Build a checkpoint of the authors' script: weights, flags, optimizer, schedule and scores."""
    return {
        "model": {f"module.{key}": value for key, value in state.items()},
        "cfg": argparse.Namespace(
            arch="resnet", norm="IGWItN", norm_cfg={"num_groups": 64, "T": 5}, lr=[0.1]
        ),
        "optimizer": {
            "state": {0: {"momentum_buffer": torch.ones(3)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "scheduler": {"milestones": Counter([30, 60, 90]), "last_epoch": 99},
        "best_prec1": np.float64(77.72),
        "mean": np.ones(3, dtype=np.float32),
        "epoch": 99,
    }
