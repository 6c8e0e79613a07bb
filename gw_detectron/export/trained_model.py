"""Load the trained model of a config."""

from detectron2.config import CfgNode
from torch import nn

from ..checkpoint import load_checkpoint, open_start_weights
from ..errors import ConfigError, PartialLoadError, summarize_names
from ..modeling import build_checked_model


def load_model(cfg: CfgNode, needed: str = "", *, device: str = "cpu") -> nn.Module:
    """Build the detector of a config in evaluation mode and load ``MODEL.WEIGHTS``.

    Args:
        cfg: the config; it is not changed.
        needed: name prefix of the tensors that the weights must hold: ``"backbone."`` for the FPN, ``""`` for all.
            The ResNet's tensors are always needed.
        device: replaces ``MODEL.DEVICE``.

    Raises:
        FileNotFoundError: the weights do not exist.
        ConfigError: no weights are given, or Detectron2 cannot build the detector.
        PartialLoadError: the weights lack a needed tensor.
        ValueError: the file is damaged or could run code.
    """
    start = open_start_weights(cfg)
    checkpoint = start.checkpoint()
    if checkpoint is None:
        raise ConfigError(
            "MODEL.WEIGHTS (''): no weights are given. Fix: give those of a trained detector, by --weights or this key."
        )
    model = build_checked_model(cfg, device).eval()
    report = load_checkpoint(model, checkpoint)
    missing = [name for name in report.new if name.startswith(needed)]
    if missing:
        raise PartialLoadError(
            f"MODEL.WEIGHTS ('{start.address}'): {len(missing)} tensors are missing ({summarize_names(missing)}). Fix: "
            "give the weights of a trained detector; a ResNet alone can be exported with --no-fpn."
        )
    return model
