"""Detectron2's optimizer with weight decay for every norm, and steps over several batches."""

import contextlib
import time
from typing import Any

import torch
from detectron2.engine import AMPTrainer, SimpleTrainer
from detectron2.solver.build import (
    get_default_optimizer_params as detectron2_optimizer_params,
)
from torch import Tensor, nn

from ...norms.names import norm_spec

Groups = list[dict[str, Any]]


def get_default_optimizer_params(
    model: nn.Module,
    base_lr: float | None = None,
    weight_decay: float | None = None,
    **kwargs: Any,
) -> Groups:
    """Return Detectron2's parameter groups with ``weight_decay_norm`` for every norm.

    It takes the place of Detectron2's function of the same name, with the same arguments, in a
    LazyConfig.
    """
    groups = detectron2_optimizer_params(model, base_lr, weight_decay, **kwargs)
    return set_norm_decay(
        groups, model, kwargs.get("weight_decay_norm"), kwargs.get("weight_decay_bias")
    )


def set_norm_decay(
    groups: Groups, model: nn.Module, decay: float | None, bias_decay: float | None
) -> Groups:
    """Return parameter groups of an optimizer with one weight decay for every norm.

    Detectron2 has a fixed list of norm layers and gives the parameters of all other layers
    ``SOLVER.WEIGHT_DECAY``, which rotations keep. The decay of biases takes precedence, as for BN
    and GN, unless it is None. Groups whose decay does not change for any parameter stay as they
    are.
    """
    if decay is None:  # norms have the decay of other layers
        return groups

    affine = _affine_parameters(model, biases=bias_decay is None)
    kept, split = [], []
    for group in groups:
        norms = [parameter for parameter in group["params"] if parameter in affine]
        others = [parameter for parameter in group["params"] if parameter not in affine]

        # checkpoints of Detectron2's trainer fit such groups
        if not norms or group.get("weight_decay") == decay:
            kept.append(group)
        elif not others:
            kept.append({**group, "weight_decay": decay})
        else:
            kept.append({**group, "params": others})
            split.append({**group, "params": norms, "weight_decay": decay})
    return kept + split


def _affine_parameters(model: nn.Module, *, biases: bool) -> set[nn.Parameter]:
    """Return the scales of all norms, and their shifts."""
    return {
        parameter
        for layer in model.modules()
        if norm_spec(layer) is not None
        for name, parameter in layer.named_parameters(recurse=False)
        if biases or name != "bias"
    }


def accumulated_step(trainer: SimpleTrainer, batches: int) -> None:
    """Run one optimizer step with the mean gradient of k batches, in the precision of the trainer.

    The gradient is g = sum_j grad(L_j / k), where L_j is the sum of the losses of batch j of k.
    Loss scaling, gradient clipping and the exchange between processes happen once per step. Logged
    losses are means over the batches, ``data_time`` is their sum. Detectron2's own ``run_step`` is
    the case k = 1.
    """
    device = next(trainer.model.parameters()).device.type
    mixed = isinstance(trainer, AMPTrainer)
    precision = getattr(trainer, "precision", None)  # after v0.6; None is the default
    scaler = (
        trainer.grad_scaler if mixed else torch.amp.GradScaler(device, enabled=False)
    )
    # of DistributedDataParallel
    without_exchange = getattr(trainer.model, "no_sync", contextlib.nullcontext)

    means: dict[str, Tensor] = {}
    data_time = 0.0
    trainer.optimizer.zero_grad()

    for remaining in reversed(range(batches)):
        start = time.perf_counter()
        data = next(trainer._data_loader_iter)
        data_time += time.perf_counter() - start

        with without_exchange() if remaining else contextlib.nullcontext():
            with torch.autocast(device, dtype=precision, enabled=mixed):
                losses = trainer.model(data)
            if isinstance(losses, Tensor):
                losses = {"total_loss": losses}
            losses = {name: loss / batches for name, loss in losses.items()}
            scaler.scale(sum(losses.values())).backward()

        for name, loss in losses.items():
            means[name] = means.get(name, 0) + loss.detach()

    trainer._write_metrics(means, data_time)
    scaler.step(trainer.optimizer)
    scaler.update()
