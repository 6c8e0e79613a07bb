"""Detectron2's heads on whole feature maps with any norm: RetinaNet's, FCOS's and the semantic one.

Their arguments are the stock heads'. ``norm`` is a norm name or an argument of Detectron2's ``get_norm``; one that is
unknown or does not fit is a ConfigError.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from detectron2.config import CfgNode, configurable
from detectron2.layers import Conv2d, get_norm
from detectron2.modeling import META_ARCH_REGISTRY, SEM_SEG_HEADS_REGISTRY, RetinaNet
from detectron2.modeling.meta_arch.fcos import FCOSHead
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from detectron2.modeling.meta_arch.semantic_seg import SemSegFPNHead
from torch import nn

from ..config import changed_config
from ..norms import Norm, resolve_norm
from .convs import append_fusible_relu


def _for_channels(norm: Norm, channels: Sequence[int]) -> Norm:
    """Limit a norm to the channel counts of a head.

    Detectron2's RetinaNet head first builds the norm with 1 or 32 channels, which many norms do not fit.
    """
    if norm in ("", "BN", "SyncBN"):  # Detectron2 has a rule of its own for BN
        return norm

    def layer(count: int) -> nn.Module:
        return get_norm(norm, count) if count in channels else nn.Identity()

    return layer


class GWRetinaNetHead(RetinaNetHead):
    """RetinaNet's head with any norm; its ReLUs are not fused.

    All feature levels share it. Running statistics mix the levels; GW and GN have none.
    """

    norm_key = "MODEL.RETINANET.NORM"

    @configurable
    def __init__(
        self, *, conv_dims: Sequence[int], norm: Norm = "", **kwargs: Any
    ) -> None:
        norm = resolve_norm(norm, where=f"{type(self).__name__}, {self.norm_key}")
        norm = _for_channels(norm, conv_dims)
        super().__init__(conv_dims=conv_dims, norm=norm, **kwargs)


class GWFCOSHead(GWRetinaNetHead, FCOSHead):
    """FCOS's head with any norm; its ReLUs are not fused.

    Detectron2 builds FCOS in Python or by a LazyConfig only: ``model.head._target_ = GWFCOSHead``.
    """

    norm_key = "norm"


@META_ARCH_REGISTRY.register()
class GWRetinaNet(RetinaNet):
    """RetinaNet whose head takes any norm."""

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        # Detectron2 names the class of the head in its source. Let it build the head without norm, and replace it.
        arguments = super().from_config(
            changed_config(cfg, {"MODEL.RETINANET.NORM": ""})
        )
        shapes = arguments["backbone"].output_shape()
        levels = [shapes[name] for name in arguments["head_in_features"]]
        return arguments | {"head": GWRetinaNetHead(cfg, levels)}


@SEM_SEG_HEADS_REGISTRY.register()
class GWSemSegFPNHead(SemSegFPNHead):
    """Semantic segmentation head of Panoptic FPN with any norm, and fused ReLUs."""

    @configurable
    def __init__(self, *args: Any, norm: Norm = "", **kwargs: Any) -> None:
        norm = resolve_norm(norm, where="GWSemSegFPNHead, MODEL.SEM_SEG_HEAD.NORM")
        super().__init__(*args, norm=norm, **kwargs)
        for layer in itertools.chain(*self.scale_heads):
            if isinstance(layer, Conv2d):
                append_fusible_relu(layer)
