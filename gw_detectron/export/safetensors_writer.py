"""Write weights as safetensors, in the names of Detectron2, torchvision or timm."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling.backbone.resnet import BottleneckBlock
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ..checkpoint.records import NormRecord
from ..errors import ExportError
from ..layers import GroupWhitening2d
from ..norms.convs import conv_names
from ..weights.architecture import Norms, build_torchvision, infer_architecture
from ..weights.conversion import to_torchvision
from ..weights.metadata import DESCRIPTION, NORM_CLASSES, NORMS, build_norm
from ..weights.reference_networks import torchvision_stages
from .exported_file import ExportedFile
from .feature_extractor import FeatureExtractor
from .formats import Written

LAYOUTS = ("detectron2", "torchvision", "timm")


def write_safetensors(extractor: FeatureExtractor, path: Path, layout: str = "detectron2") -> Written:
    """Write the weights and describe input and outputs in the header.

    The header's ``norms`` maps each norm layer to its norm name. torchvision and timm give a ResNet's tensors the same
    names. In these layouts ``norms`` maps each norm layer that replaces batch normalization to its class and arguments.

    Raises:
        ExportError: torchvision's ResNet cannot compute the same function.
    """
    backbone = extractor.backbone
    tensors = {name: value.contiguous() for name, value in backbone.state_dict().items()}
    description = extractor.describe()
    metadata = {"format": "pt", "layout": layout, DESCRIPTION: json.dumps(description)}
    if layout == "detectron2":
        metadata[NORMS] = json.dumps(NormRecord(backbone).state_dict())
        blocks = [module for module in backbone.modules() if isinstance(module, BottleneckBlock)]
        metadata["stride_in_1x1"] = json.dumps(any(block.conv1.stride != (1, 1) for block in blocks))
        path.write_bytes(save(tensors, metadata))
        loaded = copy.deepcopy(extractor)
        loaded.backbone.load_state_dict(load_file(path))
        return (ExportedFile(loaded, description), {"layout": layout})

    _check_torchvision_compatible(backbone)
    network = infer_architecture(tensors, layout="detectron2")
    layers = {m.torchvision: backbone.get_submodule(m.detectron2) for m in network.modules() if m.kind == "norm"}
    norms = {name: _norm_arguments(layer) for name, layer in layers.items() if not _is_batch_norm(layer)}
    path.write_bytes(save(to_torchvision(tensors), {**metadata, NORMS: json.dumps(norms)}))
    model = build_torchvision(network, Norms()).eval()
    for name, arguments in norms.items():
        model.set_submodule(name, build_norm(arguments))
    try:
        model.load_state_dict(load_file(path), assign=True)
    except RuntimeError as error:
        raise ExportError(
            f"layout ('{layout}'): torchvision's {network.name} does not take these weights: {error}. "
            "Fix: use --layout detectron2."
        ) from error

    def run(images: Tensor) -> list[Tensor]:
        with torch.no_grad():
            stages = torchvision_stages(model, images)
        return [stages[name] for name in extractor.names]

    built = {
        "name": network.name,
        "block": "Bottleneck" if network.bottleneck else "BasicBlock",
        "blocks": list(network.blocks),
        "groups": network.groups,
        "width": network.width,
    }
    return (ExportedFile(run, description), {"layout": layout, "network": built, "norms": norms})


def _check_torchvision_compatible(backbone: nn.Module) -> None:
    """Refuse convolutions, strides and dilation that torchvision does differently.

    The weights do not show them.
    """
    if conv_names(backbone):
        raise ExportError(
            "MODEL.RESNETS.CONV ('WS'): torchvision and timm do not standardize weights. Fix: use --layout detectron2."
        )
    for name, block in backbone.named_modules():
        if isinstance(block, BottleneckBlock) and block.conv1.stride != (1, 1):
            raise ExportError(
                f"MODEL.RESNETS.STRIDE_IN_1X1 (True): {name} has its stride in the 1x1 convolution; torchvision and "
                "timm have it in the 3x3 and would give other features. Fix: use --layout detectron2."
            )
        if isinstance(block, BottleneckBlock) and block.conv2.dilation != (1, 1):
            raise ExportError(
                f"MODEL.RESNETS.RES5_DILATION (2): {name} is dilated, which torchvision and timm do differently. "
                "Fix: use --layout detectron2."
            )


def _is_batch_norm(layer: nn.Module) -> bool:
    # Detectron2's synchronized and frozen kinds compute the same in evaluation
    return isinstance(layer, (nn.modules.batchnorm._BatchNorm, FrozenBatchNorm2d))


def _norm_arguments(layer: nn.Module) -> dict[str, Any]:
    for name, kind in NORM_CLASSES.items():
        if isinstance(layer, kind):
            arguments = {field: getattr(layer, field) for field in ("num_channels", "num_groups", "affine")}
            options = layer.solver.layer_arguments() if isinstance(layer, GroupWhitening2d) else {"eps": layer.eps}
            return {"class": name, **arguments, **options}
    raise ExportError(
        f"norm layer ('{type(layer).__name__}'): torchvision and timm cannot load it. Fix: use --layout detectron2."
    )
