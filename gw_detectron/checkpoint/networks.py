"""The same classifier twice, on torchvision's ResNet and on Detectron2's, for comparing them."""

import functools
import os
from collections.abc import Mapping

import torch
import torchvision
from detectron2.config import CfgNode, get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling import ResNet
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from ..config import add_gw_config
from ..errors import summarize_names
from ..layers import GroupWhitening2d
from ..modeling import add_pool_norm, build_gw_resnet_backbone
from .architecture import POOL_NORM, norms_at
from .convert import Conversion, to_torchvision, unwrap
from .provenance import Provenance, sha256_of
from .reading import read_weights_file

STAGES = ("stem", "res2", "res3", "res4", "res5")
LOGITS = "logits"


def torchvision_classifier(weights: Conversion, tensors: Mapping[str, Tensor]) -> torchvision.models.ResNet:
    """Builds torchvision's ResNet, with Group Whitening at the positions, in evaluation mode.

    Args:
        weights: say which network it is.
        tensors: its numbers in torchvision's names; scale and shift of whitening may be (1, C, 1, 1).

    Raises:
        ValueError: the tensors are of another network.
    """
    network = weights.architecture
    classes = len(tensors["fc.weight"]) if "fc.weight" in tensors else None
    with torch.device("meta"):  # shapes only; the numbers are loaded
        model = torchvision.models.ResNet(
            Bottleneck if network.bottleneck else BasicBlock,
            list(network.blocks),
            num_classes=classes or 1,
            groups=network.groups,
            width_per_group=network.width,
            norm_layer=functools.partial(nn.GroupNorm, 32) if weights.norm == "GN" else nn.BatchNorm2d,
        )
        for module in norms_at(network, weights.positions):
            parent, _, name = module.torchvision.rpartition(".")
            setattr(model.get_submodule(parent), name, GroupWhitening2d(module.shape[0]))
        if weights.pool_norm:
            add_pool_norm(model, weights.pool_norm, model.fc.in_features)
    if classes is None:
        model.fc = nn.Identity()
    theirs, ours = (f"{name}." for name in POOL_NORM)
    known = {name.replace(theirs, ours): value for name, value in tensors.items()}
    if not weights.pool_norm:  # the authors' ResNeXts have one that they do not use
        known = {name: value for name, value in known.items() if not name.startswith(ours)}
    _load(model, known)
    return model.eval()


def torchvision_stages(model: torchvision.models.ResNet, images: Tensor) -> dict[str, Tensor]:
    """Runs torchvision's ResNet on normalised images, (N, 3, H, W), and returns the output of each stage."""
    x = model.maxpool(model.relu(model.bn1(model.conv1(images))))
    outputs = {"stem": x}
    for stage, layer in zip(STAGES[1:], (model.layer1, model.layer2, model.layer3, model.layer4), strict=True):
        outputs[stage] = x = layer(x)
    if not isinstance(model.fc, nn.Identity):
        outputs[LOGITS] = model.fc(torch.flatten(model.avgpool(x), 1))
    return outputs


def detectron2_classifier(weights: Conversion, cfg: CfgNode, *, norm_eps: float | None = None) -> ResNet:
    """Builds the backbone of a config, with a classifier if there is one, in evaluation mode.

    Args:
        weights: its numbers.
        cfg: with this package's keys.
        norm_eps: another eps of the batch norms.

    Raises:
        ValueError: the config is of another network than the weights, or a norm does not fit.
    """
    classes = len(weights.tensors["linear.weight"]) if weights.has_classifier else None
    outputs = [*STAGES, "linear"] if weights.has_classifier else list(STAGES)
    with torch.device("meta"):  # shapes only; the numbers are loaded
        backbone = build_gw_resnet_backbone(cfg, ShapeSpec(channels=len(cfg.MODEL.PIXEL_MEAN)))
        stages = [list(stage) for stage in backbone.stages]
        model = ResNet(backbone.stem, stages, num_classes=classes, out_features=outputs)
        if weights.pool_norm:
            add_pool_norm(model, weights.pool_norm, model.linear.in_features)
    _load(model, weights.tensors)
    for module in model.modules():
        if norm_eps is not None and hasattr(module, "running_var"):
            module.eps = norm_eps
    return model.eval()


def detectron2_stages(model: ResNet, images: Tensor) -> dict[str, Tensor]:
    """Runs Detectron2's ResNet on normalised images, (N, 3, H, W), and returns the output of each stage."""
    outputs = model(images)
    return {LOGITS if name == "linear" else name: value for name, value in outputs.items()}


def torchvision_tensors(
    weights: str | os.PathLike[str], source: str | os.PathLike[str] | None, provenance: Provenance
) -> dict[str, Tensor]:
    """Reads the weights of torchvision's network from the source if it is given, else from the weights themselves."""
    if source is not None and (digest := sha256_of(source)) != provenance.source_sha256:
        raise ValueError(
            f"{source} has the SHA-256 {digest}, but {weights} was converted from {provenance.source} with "
            f"{provenance.source_sha256}"
        )
    tensors = unwrap(read_weights_file(source or weights).value)
    return to_torchvision(tensors) if "stem.conv1.weight" in tensors else tensors


def config_for(provenance: Provenance) -> CfgNode:
    """The config of a backbone that fits weights."""
    cfg = get_cfg()
    add_gw_config(cfg)
    cfg.merge_from_other_cfg(CfgNode(provenance.config()))
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.RESNETS.OUT_FEATURES = list(STAGES)
    return cfg


def _load(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    wanted = {name for name in model.state_dict() if not name.endswith("num_batches_tracked")}
    given = {name for name in tensors if not name.endswith("num_batches_tracked")}
    if wanted != given:
        raise ValueError(
            "the weights are of another network than the one that was built: "
            f"{len(wanted - given)} tensors are missing ({summarize_names(sorted(wanted - given)) or '-'}), "
            f"{len(given - wanted)} are left over ({summarize_names(sorted(given - wanted)) or '-'})"
        )
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise ValueError(
            f"the weights are of another network than the one that was built: {lines[-1].strip()}"
        ) from None
