"""Detectron2's optimizer, with the weight decay of norms for whitening layers too."""

import detectron2.solver
import torch
from detectron2.config import CfgNode
from torch import nn

from ..layers import BatchWhitening2d, GroupWhitening2d


def build_optimizer(cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
    """Build Detectron2's optimizer with ``SOLVER.WEIGHT_DECAY_NORM`` for whitening layers.

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
    decay = cfg.SOLVER.WEIGHT_DECAY_NORM
    if decay is None:  # norms have the decay of other layers
        return optimizer
    affine = {
        parameter
        for layer in model.modules()
        if isinstance(layer, (BatchWhitening2d, GroupWhitening2d))
        for name, parameter in layer.named_parameters(recurse=False)
        if name != "bias" or cfg.SOLVER.WEIGHT_DECAY_BIAS is None
    }
    for group in list(optimizer.param_groups):
        if group["weight_decay"] == decay:  # checkpoints of Detectron2's trainer fit unchanged groups
            continue
        whitening = [parameter for parameter in group["params"] if parameter in affine]
        if len(whitening) == len(group["params"]):
            group["weight_decay"] = decay
        elif whitening:
            group["params"] = [parameter for parameter in group["params"] if parameter not in affine]
            optimizer.add_param_group({**group, "params": whitening, "weight_decay": decay})
    return optimizer
