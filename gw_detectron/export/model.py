"""The model to export, with all of its weights."""

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import nn

from ..checkpoint import load_checkpoint, open_checkpoint
from ..errors import summarize_names


def load_model(cfg: CfgNode, needed: str = "") -> nn.Module:
    """Builds the detector of a config on the CPU and loads ``MODEL.WEIGHTS``.

    Args:
        cfg: the config; it stays as it is.
        needed: what the names of the tensors begin with that have to be in the weights beside the ResNet:
            ``"backbone."`` for the FPN, ``""`` for all.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: no weights are named, the file is damaged or could run code, or a part of the model that is needed
            is not among them.
    """
    weights = cfg.MODEL.WEIGHTS
    if not weights:
        raise ValueError("there are no weights to export: give --weights FILE, or set MODEL.WEIGHTS")
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu"
    model = build_model(cfg).eval()
    report = load_checkpoint(DetectionCheckpointer(model), open_checkpoint(weights))
    missing = [name for name in report.new if name.startswith(needed)]
    if missing:
        raise ValueError(
            f"{weights} lacks {len(missing)} of the tensors to export ({summarize_names(missing)}), which would be random. Give "
            "the weights of a trained detector; from ImageNet weights the ResNet alone can be exported (--no-fpn)"
        )
    return model
