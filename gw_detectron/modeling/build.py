"""Build the detector of a config; the keys of norms and class counts, and the components that read them."""

import contextlib
import os
import traceback
from collections.abc import Iterator

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import nn

from ..config import changed_config, default_config, get_value
from ..errors import ConfigError, UserError
from ..norms import DETECTRON2_NORMS

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
_BACKBONE, _ROI_HEADS, _SEMANTIC = (
    "MODEL.BACKBONE.NAME",
    "MODEL.ROI_HEADS.NAME",
    "MODEL.SEM_SEG_HEAD.NAME",
)
_BOX, _MASK = "MODEL.ROI_BOX_HEAD.NAME", "MODEL.ROI_MASK_HEAD.NAME"
_IN_RESNET = ("MODEL.RESNETS.NORM",)
_IN_FPN = (*_IN_RESNET, "MODEL.FPN.NORM")
#: key of a component; Detectron2's component; ours, which takes any norm; the norm keys that both read
_COMPONENTS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (_BACKBONE, "build_resnet_backbone", "build_gw_resnet_backbone", _IN_RESNET),
    (_BACKBONE, "build_resnet_fpn_backbone", "build_gw_resnet_fpn_backbone", _IN_FPN),
    (
        _BACKBONE,
        "build_retinanet_resnet_fpn_backbone",
        "build_gw_retinanet_resnet_fpn_backbone",
        _IN_FPN,
    ),
    (_ROI_HEADS, "Res5ROIHeads", "GWRes5ROIHeads", _IN_RESNET),
    (_BOX, "FastRCNNConvFCHead", "GWFastRCNNConvFCHead", ("MODEL.ROI_BOX_HEAD.NORM",)),
    (
        _MASK,
        "MaskRCNNConvUpsampleHead",
        "GWMaskRCNNConvUpsampleHead",
        ("MODEL.ROI_MASK_HEAD.NORM",),
    ),
    ("MODEL.META_ARCHITECTURE", "RetinaNet", "GWRetinaNet", ("MODEL.RETINANET.NORM",)),
    (_SEMANTIC, "SemSegFPNHead", "GWSemSegFPNHead", ("MODEL.SEM_SEG_HEAD.NORM",)),
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


#: architecture -> node of MODEL that counts the classes, and their names in a dataset's metadata
CLASS_COUNTS = {
    "RetinaNet": {"RETINANET": "thing_classes"},
    "GWRetinaNet": {"RETINANET": "thing_classes"},
    "GeneralizedRCNN": {"ROI_HEADS": "thing_classes"},
    "PanopticFPN": {"ROI_HEADS": "thing_classes", "SEM_SEG_HEAD": "stuff_classes"},
    "SemanticSegmentor": {"SEM_SEG_HEAD": "stuff_classes"},
}


def build_checked_model(cfg: CfgNode, device: str | None = None) -> nn.Module:
    """Build the detector of a config.

    Detectron2 and custom components raise any kind of error for values that do not fit.

    Args:
        cfg: the config; it is not changed.
        device: replaces ``MODEL.DEVICE``. ``"meta"`` needs no memory for weights.

    Raises:
        ConfigError: the model cannot be built. The error of the component is its ``__cause__``.
        MemoryError, torch.OutOfMemoryError: the device is too small for the model.
    """
    if device is not None:
        cfg = changed_config(cfg, {"MODEL.DEVICE": device})
    try:
        with torch.device("meta") if device == "meta" else contextlib.nullcontext():
            return build_model(cfg)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = " ".join(
            misplaced_norms(cfg, error.args[0] if error.args else None)
        ) or _reason(error)
        raise ConfigError(f"MODEL: the model cannot be built: {reason}") from error


def _reason(error: Exception) -> str:
    reason = " ".join(str(error.args[0] if error.args else error).split()).rstrip(" .!")
    if "Fix: " in reason:
        return f"{reason}."
    if not isinstance(error, (UserError, ValueError)):
        # bare assertions and index errors tell nothing but their place
        torch_folder = os.path.dirname(torch.__file__)
        place = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if torch_folder not in frame.filename
        ][-1]
        reason = (
            f"{type(error).__name__} {reason}".rstrip()
            + f" ({place.filename}, line {place.lineno}: {place.line})"
        )
    return f"{reason}. Fix: correct the MODEL keys of the config."


def object_count_keys(cfg: CfgNode) -> list[str]:
    """Return the keys that count the classes of objects, such as MODEL.ROI_HEADS.NUM_CLASSES."""
    nodes = CLASS_COUNTS.get(cfg.MODEL.META_ARCHITECTURE, {})
    return [
        f"MODEL.{node}.NUM_CLASSES" for node, field in nodes.items() if field == "thing_classes"
    ]


def misplaced_norms(cfg: CfgNode, spec: object) -> Iterator[str]:
    """Yield an error for each of Detectron2's components that cannot use a norm name.

    ``spec`` is the argument of the ``KeyError`` that building the model raised.
    """
    if spec == "" or spec in DETECTRON2_NORMS:
        return
    own = ", ".join(DETECTRON2_NORMS)
    for component, name, ours, norms in _stock_components(cfg):
        for norm in norms:
            if get_value(cfg, norm) == spec:
                yield (
                    f"{norm} ({spec!r}): {component} is Detectron2's {name}, which takes only Detectron2's norms "
                    f"({own}). Fix: set {component} {ours}."
                )


def unread_keys(cfg: CfgNode) -> Iterator[str]:
    """Yield an error for each key that no component reads.

    The keys are those of this package with another value than the default, ``WHITEN_POSITIONS`` of a ResNet whose res5
    is in Detectron2's head, and norms of layers that the model does not have.
    """
    defaults = default_config()
    stock = list(_stock_components(cfg))
    readers = {
        key: reader
        for key, reader in _OWN_KEYS.items()
        if get_value(cfg, key) != get_value(defaults, key)
    }
    whitens = get_value(cfg, _BACKBONE) in [
        ours for key, _, ours, _ in _COMPONENTS if key == _BACKBONE
    ]
    if whitens and cfg.MODEL.RESNETS.WHITEN_POSITIONS != "S1":
        readers["MODEL.RESNETS.WHITEN_POSITIONS"] = _ROI_HEADS
    for key, reader in readers.items():
        value = get_value(cfg, key)
        if not value:  # an empty value asks for nothing
            continue
        for component, name, ours, _ in stock:
            if component == reader:
                yield (
                    f"{key} ({value!r}): {component} is Detectron2's {name}, which does not read it. "
                    f"Fix: set {component} {ours}."
                )
    positions = cfg.MODEL.RESNETS.WHITEN_POSITIONS if whitens else ""
    if positions and not cfg.MODEL.RESNETS.WHITEN_NORM:
        yield (
            f"MODEL.RESNETS.WHITEN_NORM (''): leaves the layers at WHITEN_POSITIONS ({positions!r}) without any norm. "
            "Fix: set WHITEN_POSITIONS '' for MODEL.RESNETS.NORM everywhere, or WHITEN_NORM, e.g. GW."
        )
    box = cfg.MODEL.ROI_BOX_HEAD
    standard = _has(cfg, _ROI_HEADS) and cfg.MODEL.ROI_HEADS.NAME == "StandardROIHeads"
    if standard and box.NAME == "GWFastRCNNConvFCHead" and box.NORM and not box.NUM_CONV:
        yield (
            f"MODEL.ROI_BOX_HEAD.NORM ({box.NORM!r}): the head has no convolutions to normalize "
            "(MODEL.ROI_BOX_HEAD.NUM_CONV is 0). Fix: set NUM_CONV 4 and NUM_FC 1, or NORM ''."
        )


def _has(cfg: CfgNode, component: str) -> bool:
    """Return whether the architecture of a config has a component; all of them have a backbone."""
    node = component.split(".")[1]
    return component not in (_ROI_HEADS, _SEMANTIC) or node in CLASS_COUNTS.get(
        cfg.MODEL.META_ARCHITECTURE, {}
    )


def _stock_components(cfg: CfgNode) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Yield Detectron2's components that a config asks for."""
    for row in _COMPONENTS:
        component, name = row[:2]
        if name == get_value(cfg, component) and _has(cfg, component):
            yield row
