"""Detectron2's optimizer, with whitening layers treated as normalization layers."""

import detectron2.solver
import torch
from detectron2.config import CfgNode
from torch import nn

from ..layers import BatchWhitening2d, GroupWhitening2d


def build_optimizer(cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
    """Build Detectron2's optimizer with ``SOLVER.WEIGHT_DECAY_NORM`` for whitening layers.

    Detectron2 has a fixed list of normalization layers and gives all other layers ``SOLVER.WEIGHT_DECAY``. For biases
    ``SOLVER.WEIGHT_DECAY_BIAS`` takes precedence, as for BN and GN. Rotations keep ``SOLVER.WEIGHT_DECAY``.

    Args:
        cfg: Detectron2's config.
        model: the model whose parameters are optimized.
    """
    optimizer = detectron2.solver.build_optimizer(cfg, model)
    decay = cfg.SOLVER.WEIGHT_DECAY_NORM
    if decay is None:  # norms are not treated differently
        return optimizer
    affine = {
        parameter
        for layer in model.modules()
        if isinstance(layer, (BatchWhitening2d, GroupWhitening2d))
        for name, parameter in layer.named_parameters(recurse=False)
        if name != "bias" or cfg.SOLVER.WEIGHT_DECAY_BIAS is None
    }
    for group in list(optimizer.param_groups):
        if group["weight_decay"] == decay:  # unchanged groups fit checkpoints of Detectron2's own trainer
            continue
        ours = [parameter for parameter in group["params"] if parameter in affine]
        if len(ours) == len(group["params"]):
            group["weight_decay"] = decay
        elif ours:
            group["params"] = [parameter for parameter in group["params"] if parameter not in affine]
            optimizer.add_param_group({**group, "params": ours, "weight_decay": decay})
    return optimizer
