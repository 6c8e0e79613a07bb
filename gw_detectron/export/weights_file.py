"""Writer of weights without a program: safetensors in the names of Detectron2, or of torchvision and timm."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torchvision
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling.backbone.resnet import BottleneckBlock
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..checkpoint.architecture import Architecture, infer_architecture
from ..checkpoint.convert import to_torchvision
from ..checkpoint.reference_networks import torchvision_stages
from ..layers import GroupWhitening2d
from .features import Features
from .formats import DESCRIPTION, Written

LAYOUTS = ("detectron2", "torchvision", "timm")

# What a loader makes the norms of that are not batch normalisation, which torchvision and timm have by themselves, as
# they have every ReLU.
_NORM_ARGUMENTS: dict[type[nn.Module], tuple[str, ...]] = {
    GroupWhitening2d: ("num_channels", "num_groups", "num_iters", "eps", "affine", "solver", "threshold", "corr"),
    nn.GroupNorm: ("num_channels", "num_groups", "eps", "affine"),
}
_NORMS = {kind.__name__: kind for kind in _NORM_ARGUMENTS}


def write_safetensors(features: Features, path: Path, layout: str) -> Written:
    """Writes the weights with the description of input and outputs in the header.

    In the layouts of torchvision and timm, which name a ResNet's tensors alike, the header's ``norms`` says which
    modules have to take the place of batch normalisation before the weights fit.

    Raises:
        ValueError: torchvision's ResNet cannot be this backbone.
    """
    backbone = features.backbone
    tensors = {name: value.contiguous() for name, value in backbone.state_dict().items()}
    metadata = {"format": "pt", "layout": layout, DESCRIPTION: json.dumps(features.describe())}
    facts: dict[str, Any] = {"layout": layout}
    if layout == "detectron2":
        save_file(tensors, path, metadata)
        return Written(_other_weights(features, load_file(path)), facts)

    _check_same_function(backbone)
    network = infer_architecture(tensors, layout="detectron2")
    norms = {
        module.torchvision: _arguments(norm)
        for module in network.modules()
        if module.kind == "norm" and not _is_batch_norm(norm := backbone.get_submodule(module.detectron2))
    }
    facts |= {
        "network": {
            "name": network.name,
            "block": "Bottleneck" if network.bottleneck else "BasicBlock",
            "blocks": list(network.blocks),
            "groups": network.groups,
            "width": network.width,
        },
        "norms": norms,
    }
    save_file(to_torchvision(tensors), path, {**metadata, "norms": json.dumps(norms)})
    model = torchvision_resnet(network, norms)
    try:
        model.load_state_dict(load_file(path))
    except RuntimeError as error:
        raise ValueError(f"torchvision's {network.name} does not take these weights: {error}") from error

    def run(images: Tensor) -> list[Tensor]:
        with torch.no_grad():
            stages = torchvision_stages(model, images)
        return [stages[name] for name in features.names]

    return Written(run, facts)


def torchvision_resnet(network: Architecture, norms: Mapping[str, Mapping[str, Any]]) -> torchvision.models.ResNet:
    """Builds torchvision's ResNet or ResNeXt without classifier, in evaluation mode.

    Args:
        network: which.
        norms: torchvision's name of a norm -> the class and arguments of what stands there instead of batch
            normalisation.
    """
    blocks = torchvision.models.resnet
    model = torchvision.models.ResNet(
        blocks.Bottleneck if network.bottleneck else blocks.BasicBlock,
        list(network.blocks),
        groups=network.groups,
        width_per_group=network.width,
    )
    model.fc = nn.Identity()
    for name, arguments in norms.items():
        parent, _, child = name.rpartition(".")
        others = {key: value for key, value in arguments.items() if key != "class"}
        setattr(model.get_submodule(parent), child, _NORMS[arguments["class"]](**others))
    return model.eval()


def _other_weights(features: Features, tensors: dict[str, Tensor]) -> Features:
    """The same function with the weights of a file, all of them."""
    other = copy.deepcopy(features)
    with torch.no_grad():
        for value in other.backbone.state_dict().values():
            value.zero_()
    other.backbone.load_state_dict(tensors)
    return other


def _check_same_function(backbone: nn.Module) -> None:
    """Finds what weights do not show: where the stride is, and dilation."""
    for name, block in backbone.named_modules():
        if isinstance(block, BottleneckBlock) and block.conv1.stride != (1, 1):
            raise ValueError(
                f"{name} has its stride in the 1x1 convolution (MODEL.RESNETS.STRIDE_IN_1X1 True); torchvision and "
                "timm have it in the 3x3, and would give other features with these weights"
            )
        if isinstance(block, BottleneckBlock) and block.conv2.dilation != (1, 1):
            raise ValueError(
                f"{name} is dilated (MODEL.RESNETS.RES5_DILATION 2), which torchvision and timm do in another way; "
                "--layout detectron2 has no such limit"
            )


def _is_batch_norm(norm: nn.Module) -> bool:
    # Detectron2's synchronised and frozen kinds compute the same in evaluation
    return isinstance(norm, (nn.modules.batchnorm._BatchNorm, FrozenBatchNorm2d))


def _arguments(norm: nn.Module) -> dict[str, Any]:
    for kind, names in _NORM_ARGUMENTS.items():
        if isinstance(norm, kind):
            return {"class": kind.__name__, **{name: getattr(norm, name) for name in names}}
    raise ValueError(
        f"{type(norm).__name__} has no counterpart in torchvision and timm; --layout detectron2 keeps it as it is"
    )
