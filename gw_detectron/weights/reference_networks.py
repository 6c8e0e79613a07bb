"""Build the same classifier with torchvision and with Detectron2."""

from collections.abc import Mapping

import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import ResNet
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck
from torchvision.models.resnet import ResNet as TorchvisionResNet

from ..config import changed_config, default_config
from ..errors import WeightsError, summarize_names
from ..modeling import add_pool_norm, build_gw_resnet_backbone
from ..modeling.resnet import STAGES
from .architecture import POOL_NORM, build_torchvision
from .conversion import Conversion
from .provenance import Provenance

LOGITS = "logits"


def torchvision_classifier(weights: Conversion, tensors: Mapping[str, Tensor]) -> TorchvisionResNet:
    """Build torchvision's ResNet with the weights' norms, in evaluation mode.

    Args:
        weights: their architecture, norms and strides are built.
        tensors: the values, with torchvision's names; scale and shift of GW may be (1, C, 1, 1).

    Raises:
        WeightsError: the tensors are of another network.
    """
    classes = len(tensors["fc.weight"]) if "fc.weight" in tensors else None
    model = build_torchvision(weights.architecture, weights.provenance.norms, weights.pool_norm, classes)
    if weights.provenance.preprocessing.stride_in_1x1:
        for block in model.modules():
            if isinstance(block, Bottleneck):
                block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
    source, target = (f"{name}." for name in POOL_NORM[:2])
    known = {name.replace(source, target): value for name, value in tensors.items()}
    if not weights.pool_norm:  # the authors' ResNeXts have one that they do not use
        known = {name: value for name, value in known.items() if not name.startswith(target)}
    return _load(model, known)


def torchvision_stages(model: TorchvisionResNet, images: Tensor) -> dict[str, Tensor]:
    """Run torchvision's ResNet; return the output of every stage.

    Args:
        model: the network.
        images: normalized, (N, 3, H, W).
    """
    x = model.maxpool(model.relu(model.bn1(model.conv1(images))))
    outputs = {"stem": x}
    for stage, layer in zip(STAGES[1:], (model.layer1, model.layer2, model.layer3, model.layer4), strict=True):
        outputs[stage] = x = layer(x)
    if not isinstance(model.fc, nn.Identity):
        outputs[LOGITS] = model.fc(torch.flatten(model.avgpool(x), 1))
    return outputs


def detectron2_classifier(weights: Conversion, cfg: CfgNode, *, norm_eps: float | None = None) -> ResNet:
    """Build a config's backbone with the weights' classifier, in evaluation mode.

    Args:
        weights: the values.
        cfg: with this package's keys.
        norm_eps: replaces eps of the batch norms.

    Raises:
        WeightsError: the config's network is not the weights' network.
        ValueError: a norm does not fit.
    """
    cfg = changed_config(cfg, {"MODEL.BACKBONE.FREEZE_AT": 0, "MODEL.RESNETS.OUT_FEATURES": list(STAGES)})
    classes = len(weights.tensors["linear.weight"]) if weights.has_classifier else None
    with torch.device("meta"):  # the values are loaded
        backbone = build_gw_resnet_backbone(cfg, ShapeSpec(channels=len(cfg.MODEL.PIXEL_MEAN)))
        outputs = [*STAGES, "linear"] if weights.has_classifier else list(STAGES)
        stages = [list(stage) for stage in backbone.stages]
        model = ResNet(backbone.stem, stages, num_classes=classes, out_features=outputs)
        if weights.pool_norm:
            add_pool_norm(model, weights.pool_norm, model.linear.in_features)
    _load(model, weights.tensors)
    for module in model.modules():
        if norm_eps is not None and hasattr(module, "running_var"):
            module.eps = norm_eps
    return model


def detectron2_stages(model: ResNet, images: Tensor) -> dict[str, Tensor]:
    """Run Detectron2's ResNet; return the output of every stage.

    Args:
        model: the network.
        images: normalized, (N, 3, H, W).
    """
    return {LOGITS if name == "linear" else name: value for name, value in model(images).items()}


def config_for(provenance: Provenance) -> CfgNode:
    """Build the config of a backbone that fits the weights."""
    cfg = default_config()
    cfg.merge_from_other_cfg(CfgNode(provenance.config()))
    return cfg


def _load(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    counter = "num_batches_tracked"
    expected = {name for name in model.state_dict() if not name.endswith(counter)}
    given = {name for name in tensors if not name.endswith(counter)}
    reason = ""
    if expected != given:
        reason = (
            f"{len(expected - given)} tensors missing ({summarize_names(sorted(expected - given)) or '-'}), "
            f"{len(given - expected)} unexpected ({summarize_names(sorted(given - expected)) or '-'})"
        )
    else:
        try:
            model.load_state_dict(tensors, assign=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip().rstrip(".")
    if reason:
        raise WeightsError(f"weights: do not fit the network: {reason}. Fix: give weights and config of one network.")
    return model.eval()
