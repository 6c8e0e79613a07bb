"""Build the detector of a config; the keys of norms and class counts, and the components that read them."""

import contextlib
import traceback
from collections.abc import Iterator
from typing import NamedTuple

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
_BACKBONE = "MODEL.BACKBONE.NAME"
_ROI_HEADS = "MODEL.ROI_HEADS.NAME"
_SEMANTIC = "MODEL.SEM_SEG_HEAD.NAME"
_BOX = "MODEL.ROI_BOX_HEAD.NAME"
_MASK = "MODEL.ROI_MASK_HEAD.NAME"


class _StockComponent(NamedTuple):
    """A component of Detectron2 that takes only Detectron2's norms, and ours in its place."""

    key: str
    name: str
    ours: str
    norms: tuple[str, ...]  # keys that both read


_RESNET = "MODEL.RESNETS.NORM"
_FPN = "MODEL.FPN.NORM"
_STOCK_COMPONENTS = (
    _StockComponent(
        _BACKBONE, "build_resnet_backbone", "build_gw_resnet_backbone", (_RESNET,)
    ),
    _StockComponent(
        _BACKBONE,
        "build_resnet_fpn_backbone",
        "build_gw_resnet_fpn_backbone",
        (_RESNET, _FPN),
    ),
    _StockComponent(
        _BACKBONE,
        "build_retinanet_resnet_fpn_backbone",
        "build_gw_retinanet_resnet_fpn_backbone",
        (_RESNET, _FPN),
    ),
    _StockComponent(_ROI_HEADS, "Res5ROIHeads", "GWRes5ROIHeads", (_RESNET,)),
    _StockComponent(
        _BOX, "FastRCNNConvFCHead", "GWFastRCNNConvFCHead", ("MODEL.ROI_BOX_HEAD.NORM",)
    ),
    _StockComponent(
        _MASK,
        "MaskRCNNConvUpsampleHead",
        "GWMaskRCNNConvUpsampleHead",
        ("MODEL.ROI_MASK_HEAD.NORM",),
    ),
    _StockComponent(
        "MODEL.META_ARCHITECTURE", "RetinaNet", "GWRetinaNet", ("MODEL.RETINANET.NORM",)
    ),
    _StockComponent(
        _SEMANTIC, "SemSegFPNHead", "GWSemSegFPNHead", ("MODEL.SEM_SEG_HEAD.NORM",)
    ),
)
_OUR_BACKBONES = (
    "build_gw_resnet_backbone",
    "build_gw_resnet_fpn_backbone",
    "build_gw_retinanet_resnet_fpn_backbone",
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
    without_memory = (
        torch.device("meta") if device == "meta" else contextlib.nullcontext()
    )
    try:
        with without_memory:
            return build_model(cfg)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        spec = error.args[0] if error.args else None
        reason = " ".join(misplaced_norms(cfg, spec)) or _reason(error)
        raise ConfigError(f"MODEL: the model cannot be built: {reason}") from error


def _reason(error: Exception) -> str:
    """Return the text of an error of a component in one line; with its place, if it is of no kind for users."""
    text = str(error.args[0] if error.args else error)
    reason = " ".join(text.split()).rstrip(" .!")
    if "Fix: " in reason:
        return f"{reason}."
    if not isinstance(error, (UserError, ValueError)):
        # bare assertions and index errors tell nothing but their place
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename}, line {place.lineno}: {place.line}"
        reason = f"{type(error).__name__} {reason}".rstrip() + f" ({where})"
    return f"{reason}. Fix: correct the MODEL keys of the config."


def object_count_keys(cfg: CfgNode) -> list[str]:
    """Return the keys that count the classes of objects, such as MODEL.ROI_HEADS.NUM_CLASSES."""
    nodes = CLASS_COUNTS.get(cfg.MODEL.META_ARCHITECTURE, {})
    return [
        f"MODEL.{node}.NUM_CLASSES" for node in nodes if nodes[node] == "thing_classes"
    ]


def misplaced_norms(cfg: CfgNode, spec: object) -> Iterator[str]:
    """Yield an error for each of Detectron2's components that cannot use a norm name.

    ``spec`` is the argument of the ``KeyError`` that building the model raised.
    """
    if spec in ("", *DETECTRON2_NORMS):
        return
    own = ", ".join(DETECTRON2_NORMS)
    for stock in _stock_components(cfg):
        for norm in stock.norms:
            if get_value(cfg, norm) == spec:
                yield (
                    f"{norm} ({spec!r}): {stock.key} is Detectron2's {stock.name}, which takes only Detectron2's norms "
                    f"({own}). Fix: set {stock.key} {stock.ours}."
                )


def unread_keys(cfg: CfgNode) -> Iterator[str]:
    """Yield an error for each key that no component reads.

    The keys are those of this package with another value than the default, ``WHITEN_POSITIONS`` of a ResNet whose res5
    is in Detectron2's head, and norms of layers that the model does not have.
    """
    defaults = default_config()
    for key, reader in _OWN_KEYS.items():
        if get_value(cfg, key) != get_value(defaults, key):
            yield from _unread_by_stock(cfg, key, reader)

    positions = cfg.MODEL.RESNETS.WHITEN_POSITIONS
    whitens = positions and get_value(cfg, _BACKBONE) in _OUR_BACKBONES
    if whitens and positions != "S1":
        yield from _unread_by_stock(cfg, "MODEL.RESNETS.WHITEN_POSITIONS", _ROI_HEADS)
    if whitens and not cfg.MODEL.RESNETS.WHITEN_NORM:
        yield (
            f"MODEL.RESNETS.WHITEN_NORM (''): leaves the layers at WHITEN_POSITIONS ({positions!r}) without any norm. "
            "Fix: set WHITEN_POSITIONS '' for MODEL.RESNETS.NORM everywhere, or WHITEN_NORM, e.g. GW."
        )

    box = cfg.MODEL.ROI_BOX_HEAD
    reads_box = _has(cfg, _ROI_HEADS) and cfg.MODEL.ROI_HEADS.NAME == "StandardROIHeads"
    takes_norm = reads_box and box.NAME == "GWFastRCNNConvFCHead"
    if takes_norm and box.NORM and not box.NUM_CONV:
        yield (
            f"MODEL.ROI_BOX_HEAD.NORM ({box.NORM!r}): the head has no convolutions to normalize "
            "(MODEL.ROI_BOX_HEAD.NUM_CONV is 0). Fix: set NUM_CONV 4 and NUM_FC 1, or NORM ''."
        )


def _unread_by_stock(cfg: CfgNode, key: str, reader: str) -> Iterator[str]:
    """Yield an error if a key has a value, and Detectron2's component is in the place of its reader."""
    value = get_value(cfg, key)
    if not value:  # an empty value asks for nothing
        return
    for stock in _stock_components(cfg):
        if stock.key == reader:
            yield (
                f"{key} ({value!r}): {reader} is Detectron2's {stock.name}, which does not read it. "
                f"Fix: set {reader} {stock.ours}."
            )


def _has(cfg: CfgNode, component: str) -> bool:
    """Return whether the architecture of a config has a component; all of them have a backbone."""
    if component not in (_ROI_HEADS, _SEMANTIC):
        return True
    _, node, _ = component.split(".")
    return node in CLASS_COUNTS.get(cfg.MODEL.META_ARCHITECTURE, {})


def _stock_components(cfg: CfgNode) -> Iterator[_StockComponent]:
    """Yield Detectron2's components that a config asks for."""
    for stock in _STOCK_COMPONENTS:
        if get_value(cfg, stock.key) == stock.name and _has(cfg, stock.key):
            yield stock
