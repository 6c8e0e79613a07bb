"""The configs this package ships, and models built from them; the counterpart of ``detectron2.model_zoo``."""

import difflib
import importlib.resources
from pathlib import Path

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode, get_cfg
from detectron2.modeling import build_model
from torch import nn

from .checkpoint import load_checkpoint, open_checkpoint
from .config import add_gw_config

__all__ = ["get", "get_config", "get_config_file", "list_configs"]


def list_configs() -> list[str]:
    """Lists the configs that train a detector, in the form the other functions take.

    Returns:
        Sorted names relative to the folder ``configs``, such as ``COCO-Detection/faster_rcnn_R_50_FPN_1x_GW.yaml``.
        The ``Base-*.yaml`` files that others build upon are left out.
    """
    return [name for name in _files() if not name.rpartition("/")[2].startswith("Base-")]


def get_config_file(name: str) -> str:
    """Finds a config that came with the package.

    Args:
        name: as in :func:`list_configs`; a ``Base-*.yaml`` is found too.

    Returns:
        The path of the yaml file. Its ``_BASE_`` stands in the same tree.

    Raises:
        ValueError: there is no such config; the message has the nearest names.
    """
    files = _files()
    if name in files:
        return str(files[name])
    near = difflib.get_close_matches(name, files, n=3, cutoff=0.5)
    hint = f"The nearest are {', '.join(near)}." if near else "gw_detectron.model_zoo.list_configs() has the names."
    raise ValueError(f"There is no config {name!r}. {hint}")


def get_config(name: str, trained: bool = False) -> CfgNode:
    """Loads a config that came with the package.

    Args:
        name: as in :func:`list_configs`.
        trained: False leaves ``MODEL.WEIGHTS`` as the yaml has it, which is the pretrained backbone or nothing. True
            asks for the weights of a trained detector.

    Returns:
        Detectron2's config with this package's keys.

    Raises:
        ValueError: there is no such config, or ``trained`` is True: no detector weights are published yet.
    """
    file = get_config_file(name)
    if trained:
        raise ValueError(
            f"trained=True: no weights of a trained {name} are published. Train it (tools/train_net.py --config-file "
            f"{file}) and set MODEL.WEIGHTS to the outcome, or pass trained=False."
        )
    cfg = get_cfg()
    add_gw_config(cfg)
    cfg.merge_from_file(file)
    return cfg


def get(name: str, trained: bool = False, device: str | None = None) -> nn.Module:
    """Builds the model of a config and loads its ``MODEL.WEIGHTS``, if it names any.

    To build a model without its weights give :func:`get_config` to ``detectron2.modeling.build_model``.

    Args:
        name: as in :func:`list_configs`.
        trained: as in :func:`get_config`.
        device: for example ``"cpu"``; by default the config's, or the CPU where there is no CUDA device.

    Returns:
        The model, in training mode.

    Raises:
        ValueError: as in :func:`get_config`.
    """
    cfg = get_config(name, trained)
    if device is not None:
        cfg.MODEL.DEVICE = device
    elif not torch.cuda.is_available():
        cfg.MODEL.DEVICE = "cpu"
    model = build_model(cfg)
    if cfg.MODEL.WEIGHTS:
        load_checkpoint(DetectionCheckpointer(model), open_checkpoint(cfg.MODEL.WEIGHTS))
    return model


def _files() -> dict[str, Path]:
    package = Path(str(importlib.resources.files("gw_detectron")))
    # In a wheel the configs are inside the package; in a clone, which an editable install points to, beside it.
    for folder in (package / "configs", package.parent / "configs"):
        if folder.is_dir():
            return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.yaml"))}
    raise FileNotFoundError(f"{package / 'configs'}: the configs of gw_detectron are missing. Install it again.")
