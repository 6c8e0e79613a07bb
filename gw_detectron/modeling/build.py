"""Build the detector of a config; report a failure as one sentence."""

import contextlib
import os
import traceback

import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import nn

from ..config import changed_config
from ..errors import ConfigError, UserError
from .config_keys import misplaced_norms


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
        reason = " ".join(misplaced_norms(cfg, error.args[0] if error.args else None)) or _reason(error)
        raise ConfigError(f"MODEL: the model cannot be built: {reason}") from error


def _reason(error: Exception) -> str:
    reason = " ".join(str(error.args[0] if error.args else error).split()).rstrip(" .!")
    if "Fix: " in reason:
        return f"{reason}."
    if not isinstance(error, (UserError, ValueError)):
        # bare assertions and index errors tell nothing but their place
        torch_folder = os.path.dirname(torch.__file__)
        place = [frame for frame in traceback.extract_tb(error.__traceback__) if torch_folder not in frame.filename][-1]
        reason = f"{type(error).__name__} {reason}".rstrip() + f" ({place.filename}, line {place.lineno}: {place.line})"
    return f"{reason}. Fix: correct the MODEL keys of the config."
