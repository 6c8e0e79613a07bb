"""Detectron2's optimizer, with the weight decay of norms for every norm of this package."""

from typing import Any

import detectron2.solver
import torch
from detectron2.config import CfgNode
from detectron2.solver.build import get_default_optimizer_params as detectron2_optimizer_params
from torch import nn

from ..norms.names import find_norm_spec

_Groups = list[dict[str, Any]]


def build_optimizer(cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
    """Build Detectron2's optimizer with ``SOLVER.WEIGHT_DECAY_NORM`` for every norm.

    Detectron2 has a fixed list of norm layers and gives the parameters of all other layers ``SOLVER.WEIGHT_DECAY``.
    As for BN and GN, ``SOLVER.WEIGHT_DECAY_BIAS`` takes precedence for biases if it is set. Rotations keep
    ``SOLVER.WEIGHT_DECAY``.

    Args:
        cfg: Detectron2's config.
        model: the model to optimize.

    Returns:
        The optimizer. A parameter group is split only if its weight decay changes for some of its parameters.
    """
    optimizer = detectron2.solver.build_optimizer(cfg, model)
    options = cfg.SOLVER
    optimizer.param_groups = _set_norm_decay(
        optimizer.param_groups, model, options.WEIGHT_DECAY_NORM, options.WEIGHT_DECAY_BIAS
    )
    return optimizer


def get_default_optimizer_params(
    model: nn.Module,
    *args: Any,
    weight_decay_norm: float | None = None,
    weight_decay_bias: float | None = None,
    **kwargs: Any,
) -> _Groups:
    """Return Detectron2's parameter groups with ``weight_decay_norm`` for every norm.

    It takes the place of Detectron2's function of the same name in a LazyConfig; see :func:`build_optimizer`.

    Args:
        model: the model to optimize.
        args, kwargs: further arguments of Detectron2's function.
        weight_decay_norm: weight decay of norms; None is that of other layers.
        weight_decay_bias: weight decay of biases, also in norms; None is that of their layers.
    """
    groups = detectron2_optimizer_params(
        model, *args, weight_decay_norm=weight_decay_norm, weight_decay_bias=weight_decay_bias, **kwargs
    )
    return _set_norm_decay(groups, model, weight_decay_norm, weight_decay_bias)


def _set_norm_decay(groups: _Groups, model: nn.Module, decay: float | None, bias_decay: float | None) -> _Groups:
    if decay is None:  # norms have the decay of other layers
        return groups
    affine = {
        parameter
        for layer in model.modules()
        if find_norm_spec(layer) is not None
        for name, parameter in layer.named_parameters(recurse=False)
        if name != "bias" or bias_decay is None
    }
    old, new = [], []
    for group in groups:
        norms = [parameter for parameter in group["params"] if parameter in affine]
        if not norms or group.get("weight_decay") == decay:  # checkpoints of Detectron2's trainer fit such groups
            old.append(group)
        elif len(norms) == len(group["params"]):
            old.append({**group, "weight_decay": decay})
        else:
            old.append({**group, "params": [parameter for parameter in group["params"] if parameter not in affine]})
            new.append({**group, "params": norms, "weight_decay": decay})
    return old + new
