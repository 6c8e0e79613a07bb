"""The optimizer: Detectron2's, which counts whitening layers among the normalisation layers."""

import detectron2.solver
import torch
from detectron2.config import CfgNode
from torch import nn

from ..layers import BatchWhitening2d, GroupWhitening2d


def build_optimizer(cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
    """Returns Detectron2's optimizer, with ``SOLVER.WEIGHT_DECAY_NORM`` for whitening layers too.

    Detectron2's own has a fixed list of normalisation layers, and gives all others ``SOLVER.WEIGHT_DECAY``.
    ``SOLVER.WEIGHT_DECAY_BIAS`` goes before it if it is set, as for BN and GN. Rotations keep ``SOLVER.WEIGHT_DECAY``.

    Args:
        cfg: Detectron2's config.
        model: the model whose parameters are optimized.
    """
    optimizer = detectron2.solver.build_optimizer(cfg, model)
    decay = cfg.SOLVER.WEIGHT_DECAY_NORM
    if decay is None:  # whichever decay each parameter has by itself
        return optimizer
    affine = {
        parameter
        for layer in model.modules()
        if isinstance(layer, (BatchWhitening2d, GroupWhitening2d))
        for name, parameter in layer.named_parameters(recurse=False)
        if name != "bias" or cfg.SOLVER.WEIGHT_DECAY_BIAS is None
    }
    for group in list(optimizer.param_groups):
        if group["weight_decay"] == decay:  # nothing to change, and checkpoints of Detectron2's own trainer fit
            continue
        ours = [parameter for parameter in group["params"] if parameter in affine]
        if len(ours) == len(group["params"]):
            group["weight_decay"] = decay
        elif ours:
            group["params"] = [parameter for parameter in group["params"] if parameter not in affine]
            optimizer.add_param_group({**group, "params": ours, "weight_decay": decay})
    return optimizer
