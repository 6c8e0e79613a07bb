"""Where a yaml takes norm names, and which of Detectron2's components know their own norms and keys only."""

from collections.abc import Iterator
from typing import NamedTuple

from detectron2.config import CfgNode, get_cfg

from ..config import add_gw_config
from .norm import DETECTRON2_NORMS

#: every key that holds a norm name
NORM_KEYS = (
    "MODEL.RESNETS.NORM",
    "MODEL.RESNETS.WHITEN_NORM",
    "MODEL.FPN.NORM",
    "MODEL.ROI_BOX_HEAD.NORM",
    "MODEL.ROI_MASK_HEAD.NORM",
    "MODEL.RETINANET.NORM",
    "MODEL.SEM_SEG_HEAD.NORM",
)


class _Stock(NamedTuple):
    norm: str  # the key of the norm
    part: str  # the key of the component that reads it
    name: str  # Detectron2's
    instead: str = ""  # the component that takes any norm, if there is one


_STOCK = (
    _Stock("MODEL.RESNETS.NORM", "MODEL.BACKBONE.NAME", "build_resnet_backbone", "build_gw_resnet_backbone"),
    *(
        _Stock(norm, "MODEL.BACKBONE.NAME", name, instead)
        for name, instead in (
            ("build_resnet_fpn_backbone", "build_gw_resnet_fpn_backbone"),
            ("build_retinanet_resnet_fpn_backbone", "build_gw_retinanet_resnet_fpn_backbone"),
        )
        for norm in ("MODEL.RESNETS.NORM", "MODEL.FPN.NORM")
    ),
    _Stock("MODEL.RESNETS.NORM", "MODEL.ROI_HEADS.NAME", "Res5ROIHeads"),
    _Stock("MODEL.ROI_BOX_HEAD.NORM", "MODEL.ROI_BOX_HEAD.NAME", "FastRCNNConvFCHead", "GWFastRCNNConvFCHead"),
    _Stock(
        "MODEL.ROI_MASK_HEAD.NORM",
        "MODEL.ROI_MASK_HEAD.NAME",
        "MaskRCNNConvUpsampleHead",
        "GWMaskRCNNConvUpsampleHead",
    ),
    _Stock("MODEL.RETINANET.NORM", "MODEL.META_ARCHITECTURE", "RetinaNet"),
    _Stock("MODEL.SEM_SEG_HEAD.NORM", "MODEL.SEM_SEG_HEAD.NAME", "SemSegFPNHead"),
)


#: the keys that this package adds, and the key of the component that reads them
_OWN_KEYS = {
    "MODEL.RESNETS.WHITEN_POSITIONS": "MODEL.BACKBONE.NAME",
    "MODEL.RESNETS.WHITEN_NORM": "MODEL.BACKBONE.NAME",
    "MODEL.ROI_BOX_HEAD.SINGLE_RELU": "MODEL.ROI_BOX_HEAD.NAME",
}


def misplaced_norms(cfg: CfgNode, spec: object) -> Iterator[str]:
    """Says for each component of Detectron2 that has been given a norm name which it does not know what to do.

    Args:
        cfg: of a model that cannot be built.
        spec: what the ``KeyError`` named that came of it.
    """
    if spec in DETECTRON2_NORMS:
        return
    own = ", ".join(filter(None, DETECTRON2_NORMS))
    for place in _STOCK:
        if _value(cfg, place.norm) == spec and _value(cfg, place.part) == place.name:
            advice = f"Set {place.norm} to one of them"
            if place.instead:
                advice = f"Set {place.part} {place.instead}, which takes any norm name, or {place.norm} to one of them"
            yield (
                f"{place.norm} is {spec!r}, but it is read by Detectron2's {place.name} ({place.part}), which takes "
                f"Detectron2's own norms only: {own}. {advice}."
            )


def unread_keys(cfg: CfgNode) -> Iterator[str]:
    """Says for each key of this package that has been set, but is not read by the component of Detectron2, what to do.

    Args:
        cfg: of any model.
    """
    usual = get_cfg()
    add_gw_config(usual)
    for key, part in _OWN_KEYS.items():
        name, value = _value(cfg, part), _value(cfg, key)
        instead = next((place.instead for place in _STOCK if (place.part, place.name) == (part, name)), "")
        if instead and value and value != _value(usual, key):  # an empty one asks for nothing
            yield (
                f"{key} is {value!r}, but {part} is Detectron2's {name}, which does not read it. Set {part} {instead}, "
                f"or leave {key} out."
            )


def _value(cfg: CfgNode, key: str) -> object:
    for part in key.split("."):
        cfg = cfg[part]
    return cfg
