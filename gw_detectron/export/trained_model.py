"""Load the trained model of a config for export."""

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from torch import nn

from ..checkpoint import load_checkpoint, open_checkpoint
from ..errors import summarize_names
from ..modeling import build_checked_model
from .parity import ExportError


def load_model(cfg: CfgNode, needed: str = "") -> nn.Module:
    """Build the detector of a config on the CPU and load ``MODEL.WEIGHTS``.

    Args:
        cfg: the config; it is not changed.
        needed: name prefix of the tensors that the weights must hold: ``"backbone."`` for the FPN, ``""`` for all.
            The ResNet's tensors are always needed.

    Raises:
        FileNotFoundError: the weights do not exist.
        ConfigError: Detectron2 cannot build the detector.
        ExportError: no weights are given, or they lack a needed tensor.
        ValueError: the file is damaged or could run code, or lacks a part of the ResNet.
    """
    weights = cfg.MODEL.WEIGHTS
    if not weights:
        raise ExportError("MODEL.WEIGHTS (''): an export needs weights. Fix: give --weights FILE.")
    model = build_checked_model(cfg, "cpu").eval()
    report = load_checkpoint(DetectionCheckpointer(model), open_checkpoint(weights))
    missing = [name for name in report.new if name.startswith(needed)]
    if missing:
        raise ExportError(
            f"MODEL.WEIGHTS ('{weights}'): {len(missing)} tensors to export are missing ({summarize_names(missing)}). "
            "Fix: give the weights of a trained detector, or export the ResNet alone (--no-fpn)."
        )
    return model
