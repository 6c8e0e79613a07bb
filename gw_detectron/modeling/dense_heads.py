"""Detectron2's heads on whole feature maps with any norm: RetinaNet's, FCOS's and the semantic one."""

import importlib.util
import itertools
from collections.abc import Iterable
from typing import Any

from detectron2.config import CfgNode
from detectron2.layers import Conv2d, get_norm
from detectron2.modeling import META_ARCH_REGISTRY, SEM_SEG_HEADS_REGISTRY, RetinaNet
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from detectron2.modeling.meta_arch.semantic_seg import SemSegFPNHead
from torch import nn

from ..config import changed_config
from ..norms import Norm
from .any_norm_head import AnyNormHead

HAS_FCOS = importlib.util.find_spec("detectron2.modeling.meta_arch.fcos") is not None  # from v0.6 on


class _LateNorms(nn.Module):
    """Mixin for RetinaNet's head: put the norms in after Detectron2 has built it.

    From v0.6 on, Detectron2 tries the norm with 1 or 32 channels first, which many norms do not fit.
    """

    cls_subnet: nn.Sequential
    bbox_subnet: nn.Sequential

    def __init__(self, *, norm: Norm = "", **kwargs: Any) -> None:
        if norm in ("", "BN", "SyncBN"):  # Detectron2 has a rule of its own for BN
            super().__init__(norm=norm, **kwargs)
            return
        super().__init__(norm=nn.Identity, **kwargs)
        for subnet in (self.cls_subnet, self.bbox_subnet):
            for index, layer in enumerate(subnet):
                if isinstance(layer, nn.Identity):
                    subnet[index] = get_norm(norm, subnet[index - 1].out_channels)


class GWRetinaNetHead(AnyNormHead, _LateNorms, RetinaNetHead):
    """RetinaNet's head with any norm; its ReLUs are not fused.

    All feature levels share it. A norm with running statistics mixes those of the levels; GW and GN have none.

    Args:
        args, kwargs: those of Detectron2's ``RetinaNetHead``, see :class:`.AnyNormHead` for ``norm``.
    """

    norm_key = "MODEL.RETINANET.NORM"
    norm_argument = "norm"


if HAS_FCOS:
    from detectron2.modeling.meta_arch.fcos import FCOSHead

    class GWFCOSHead(AnyNormHead, _LateNorms, FCOSHead):
        """FCOS's head with any norm; its ReLUs are not fused.

        Detectron2 builds FCOS in Python or by a LazyConfig only: ``model.head._target_ = GWFCOSHead``.

        Args:
            args, kwargs: those of Detectron2's ``FCOSHead``, see :class:`.AnyNormHead` for ``norm``.
        """

        norm_argument = "norm"


@META_ARCH_REGISTRY.register()
class GWRetinaNet(RetinaNet):
    """RetinaNet whose head takes any norm.

    Args:
        args, kwargs: those of Detectron2's ``RetinaNet``.

    Raises:
        ConfigError: the norm is unknown or does not fit.
    """

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        # Detectron2 names the class of the head in its source. Let it build the head without norm, and replace it.
        arguments = super().from_config(changed_config(cfg, {"MODEL.RETINANET.NORM": ""}))
        shapes = arguments["backbone"].output_shape()
        head = GWRetinaNetHead(cfg, [shapes[name] for name in arguments["head_in_features"]])
        return arguments | {"head": head}


@SEM_SEG_HEADS_REGISTRY.register()
class GWSemSegFPNHead(AnyNormHead, SemSegFPNHead):
    """Semantic segmentation head of Panoptic FPN with any norm.

    Args:
        args, kwargs: those of Detectron2's ``SemSegFPNHead``, see :class:`.AnyNormHead` for ``norm``.
    """

    norm_key = "MODEL.SEM_SEG_HEAD.NORM"
    norm_argument = "norm"
    scale_heads: list[nn.Sequential]  # the stock head's layers, by feature level

    def relu_convs(self) -> Iterable[Conv2d]:
        return (layer for layer in itertools.chain(*self.scale_heads) if isinstance(layer, Conv2d))

    @staticmethod
    def norm_channels(conv_dims: int) -> Iterable[int]:
        return [conv_dims]
