"""Config keys that hold norm names, and the components that read them."""

from collections.abc import Iterator

from detectron2.config import CfgNode

from ..config import default_config, get_value
from ..norms.names import DETECTRON2_NORMS

#: every config key that holds a norm name
NORM_KEYS = (
    "MODEL.RESNETS.NORM",
    "MODEL.RESNETS.WHITEN_NORM",
    "MODEL.FPN.NORM",
    "MODEL.ROI_BOX_HEAD.NORM",
    "MODEL.ROI_MASK_HEAD.NORM",
    "MODEL.RETINANET.NORM",
    "MODEL.SEM_SEG_HEAD.NORM",
)
_BACKBONE, _BOX, _MASK = "MODEL.BACKBONE.NAME", "MODEL.ROI_BOX_HEAD.NAME", "MODEL.ROI_MASK_HEAD.NAME"
_IN_FPN = ("MODEL.RESNETS.NORM", "MODEL.FPN.NORM")
#: key of a component; Detectron2's component; ours, which takes any norm; the norm keys that both read
_COMPONENTS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (_BACKBONE, "build_resnet_backbone", "build_gw_resnet_backbone", ("MODEL.RESNETS.NORM",)),
    (_BACKBONE, "build_resnet_fpn_backbone", "build_gw_resnet_fpn_backbone", _IN_FPN),
    (_BACKBONE, "build_retinanet_resnet_fpn_backbone", "build_gw_retinanet_resnet_fpn_backbone", _IN_FPN),
    ("MODEL.ROI_HEADS.NAME", "Res5ROIHeads", "", ("MODEL.RESNETS.NORM",)),
    (_BOX, "FastRCNNConvFCHead", "GWFastRCNNConvFCHead", ("MODEL.ROI_BOX_HEAD.NORM",)),
    (_MASK, "MaskRCNNConvUpsampleHead", "GWMaskRCNNConvUpsampleHead", ("MODEL.ROI_MASK_HEAD.NORM",)),
    ("MODEL.META_ARCHITECTURE", "RetinaNet", "", ("MODEL.RETINANET.NORM",)),
    ("MODEL.SEM_SEG_HEAD.NAME", "SemSegFPNHead", "", ("MODEL.SEM_SEG_HEAD.NORM",)),
)
#: keys that this package adds -> key of the component that reads them
_OWN_KEYS = {
    "MODEL.RESNETS.WHITEN_POSITIONS": _BACKBONE,
    "MODEL.RESNETS.WHITEN_NORM": _BACKBONE,
    "MODEL.RESNETS.CONV": _BACKBONE,
    "MODEL.FPN.CONV": _BACKBONE,
    "MODEL.ROI_BOX_HEAD.SINGLE_RELU": _BOX,
    "MODEL.ROI_BOX_HEAD.CONV": _BOX,
    "MODEL.ROI_MASK_HEAD.CONV": _MASK,
}


def misplaced_norms(cfg: CfgNode, spec: object) -> Iterator[str]:
    """Yield an error for each component that cannot use a norm name.

    These are Detectron2's own components, which take only Detectron2's norms.

    Args:
        cfg: config of a model that cannot be built.
        spec: the argument of the ``KeyError`` that building it raised.
    """
    if spec == "" or spec in DETECTRON2_NORMS:
        return
    own = ", ".join(DETECTRON2_NORMS)
    for component, name, ours, norms in _COMPONENTS:
        for norm in norms:
            if get_value(cfg, norm) == spec and get_value(cfg, component) == name:
                fix = f"set {component} {ours}" if ours else f"set {norm} to one of these"
                yield (
                    f"{norm} ({spec!r}): {component} is Detectron2's {name}, which takes only Detectron2's norms "
                    f"({own}). Fix: {fix}."
                )


def unread_keys(cfg: CfgNode) -> Iterator[str]:
    """Yield an error for each key that no component reads.

    The keys are those of this package with another value than the default.

    Args:
        cfg: config of any model.
    """
    defaults = default_config()
    for key, reader in _OWN_KEYS.items():
        value = get_value(cfg, key)
        if not value or value == get_value(defaults, key):  # an empty value asks for nothing
            continue
        for component, name, ours, _ in _COMPONENTS:
            if ours and component == reader and name == get_value(cfg, component):
                yield (
                    f"{key} ({value!r}): {component} is Detectron2's {name}, which does not read it. "
                    f"Fix: set {component} {ours}."
                )
