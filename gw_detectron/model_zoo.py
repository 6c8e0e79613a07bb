"""Configs and models of this package, as in ``detectron2.model_zoo``."""

import torch
from detectron2.config import CfgNode, LazyConfig, instantiate
from omegaconf import DictConfig
from torch import nn

from .config import read_config, shipped_configs
from .errors import ConfigError, similar_names
from .modeling import build_checked_model
from .weights import load_checkpoint, open_checkpoint

__all__ = ["get", "get_config", "get_config_file", "list_configs"]


def list_configs() -> list[str]:
    """List the configs that train a detector, such as ``COCO-Detection/faster_rcnn_R_50_FPN_1x_GW.yaml``."""
    return [
        name
        for name in shipped_configs()
        if not name.startswith("common/") and "/Base-" not in f"/{name}"
    ]


def get_config_file(name: str) -> str:
    """Return the path of a config: as in :func:`list_configs`, a ``Base-*.yaml`` or a part in ``common``."""
    files = shipped_configs()
    if name not in files:
        raise ConfigError(
            f"config ({name!r}): unknown.{similar_names(name, files)} Fix: give one of `gw-detectron list configs`."
        )
    return str(files[name])


def get_config(name: str) -> CfgNode | DictConfig:
    """Load a config by its name: a ``.yaml`` with this package's keys, or a LazyConfig from a ``.py``."""
    file = get_config_file(name)
    return LazyConfig.load(file) if name.endswith(".py") else read_config(file)


def get(name: str, device: str | None = None) -> nn.Module:
    """Build the model of a config by its name, in training mode, and load its weights, if any.

    These are ``MODEL.WEIGHTS``, or ``train.init_checkpoint`` of a LazyConfig. To build a model without its weights,
    pass :func:`get_config` to ``detectron2.modeling.build_model``. ``device`` None takes the config's, or the CPU
    without a CUDA device. A config that is unknown or cannot be built is a ConfigError.
    """
    cfg = get_config(name)
    if device is None and not torch.cuda.is_available():
        device = "cpu"
    if isinstance(cfg, CfgNode):
        model, weights = build_checked_model(cfg, device), cfg.MODEL.WEIGHTS
    else:
        model, weights = (
            instantiate(cfg.model).to(device or cfg.train.device),
            cfg.train.init_checkpoint,
        )
    if weights:
        load_checkpoint(model, open_checkpoint(weights))
    return model
