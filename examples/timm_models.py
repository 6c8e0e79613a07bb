"""ResNets and ResNeXts with whitening as timm models: ``gw_resnet50.s1_b2`` and so on.

Importing this module registers them; the tag names the positions (Group Whitening, section 5.1). timm's own training
script finds them as

    python examples/timm_models.py train.py /imagenet --model gw_resnet50.s1_b2 ...
"""

import runpy
import sys
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
    resolve_pretrained_cfg,
)
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn

from gw_detectron.norms import POSITIONS, convert_norms

_TAGS = {
    positions.lower().replace("-", "_"): positions
    for positions in POSITIONS
    if positions
}
_NETWORKS: dict[str, dict[str, Any]] = {
    "gw_resnet18": {"block": BasicBlock, "layers": (2, 2, 2, 2)},
    "gw_resnet34": {"block": BasicBlock, "layers": (3, 4, 6, 3)},
    "gw_resnet50": {"block": Bottleneck, "layers": (3, 4, 6, 3)},
    "gw_resnet101": {"block": Bottleneck, "layers": (3, 4, 23, 3)},
    "gw_resnext50_32x4d": {
        "block": Bottleneck,
        "layers": (3, 4, 6, 3),
        "cardinality": 32,
        "base_width": 4,
    },
    "gw_resnext101_32x8d": {
        "block": Bottleneck,
        "layers": (3, 4, 23, 3),
        "cardinality": 32,
        "base_width": 8,
    },
}
_CFG = {
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "pool_size": (7, 7),
    "crop_pct": 0.875,
    "interpolation": "bilinear",
    "mean": IMAGENET_DEFAULT_MEAN,
    "std": IMAGENET_DEFAULT_STD,
    "first_conv": "conv1",
    "classifier": "fc",
}


def _tags(name: str) -> list[str]:
    """Return the tags of a network, the default first."""
    bottleneck = _NETWORKS[name]["block"] is Bottleneck
    return sorted(
        (tag for tag in _TAGS if bottleneck or tag != "s1_b3"),
        key=lambda tag: tag != "s1_b2",
    )


default_cfgs = generate_default_cfgs(
    {f"{name}.{tag}": _CFG for name in _NETWORKS for tag in _tags(name)}
)


class GWResNet(ResNet):
    """timm's ResNet with the norm ``norm`` at ``positions``; "" leaves timm's own network."""

    def __init__(
        self, *args: Any, positions: str = "S1-B2", norm: str = "GW", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if positions:
            convert_norms(self, {positions: norm})


def _register(name: str) -> None:
    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        tag = (
            resolve_pretrained_cfg(name, kwargs.get("pretrained_cfg")).tag
            or _tags(name)[0]
        )
        arguments = {**_NETWORKS[name], "positions": _TAGS[tag], **kwargs}
        return build_model_with_cfg(GWResNet, name, pretrained, **arguments)

    entrypoint.__name__ = entrypoint.__qualname__ = name
    globals()[name] = register_model(entrypoint)


for _name in _NETWORKS:
    _register(_name)

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(
            "usage: python examples/timm_models.py train.py <arguments of timm's train.py>"
        )
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
