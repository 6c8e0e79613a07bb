"""Load the trained model of a config."""

from collections.abc import Iterable

from detectron2.config import CfgNode
from torch import nn

from ..errors import ConfigError, PartialLoadError, summarize_names
from ..modeling import build_checked_model
from .checkpoint_file import Checkpoint, open_start_weights
from .loading import load_checkpoint


def load_model(
    cfg: CfgNode, needed: str = "", *, checkpoint: Checkpoint | None = None, device: str = "cpu"
) -> nn.Module:
    """Build the detector of a config in evaluation mode and load its weights.

    Args:
        cfg: the config; it is not changed.
        needed: name prefix of the tensors that the weights must hold: ``"backbone."`` for the FPN, ``""`` for all.
            The ResNet's tensors are always needed.
        checkpoint: the weights; None opens ``MODEL.WEIGHTS``.
        device: replaces ``MODEL.DEVICE``.

    Raises:
        FileNotFoundError: the weights do not exist.
        ConfigError: no weights are given, or Detectron2 cannot build the detector.
        PartialLoadError: the weights lack a needed tensor, or have it with another shape.
        ValueError: the file is damaged or could run code.
    """
    checkpoint = checkpoint or open_start_weights(cfg).checkpoint()
    if checkpoint is None:
        raise ConfigError(
            "MODEL.WEIGHTS (''): no weights are given. Fix: give those of a trained detector, by --weights or this key."
        )
    model = build_checked_model(cfg, device).eval()
    report = load_checkpoint(model, checkpoint)
    missing = [name for name in report.new if name.startswith(needed)]
    check_shapes(model, checkpoint, missing)
    if missing:
        alone = "; a ResNet alone can be exported with --no-fpn" if needed else ""
        raise PartialLoadError(
            f"MODEL.WEIGHTS ('{checkpoint.address}'): {len(missing)} tensors are missing ({summarize_names(missing)}). "
            f"Fix: give the weights of a trained detector{alone}."
        )
    return model


def check_shapes(model: nn.Module, checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raise PartialLoadError if tensors were not loaded because the checkpoint has them with other shapes."""
    own, given = model.state_dict(), checkpoint.tensors
    shapes = [f"{name} {tuple(given[name].shape)}, not {tuple(own[name].shape)}" for name in names if name in given]
    if shapes:
        raise PartialLoadError(
            f"MODEL.WEIGHTS ('{checkpoint.address}'): {len(shapes)} tensors have other shapes than the model's "
            f"({summarize_names(shapes, 2)}). Fix: set NUM_CLASSES, or another key of the heads, as in the run of the "
            "weights."
        )
