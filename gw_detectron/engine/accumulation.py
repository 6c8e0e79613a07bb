"""Optimizer steps with the mean gradient of several batches."""

import contextlib
import time

import torch
from detectron2.engine import AMPTrainer, SimpleTrainer
from torch import Tensor

from ..errors import check_minimum


def accumulated_step(trainer: SimpleTrainer, batches: int) -> None:
    """Run one optimizer step with the mean gradient of several batches.

    The gradient is g = sum_j grad(L_j / k), where L_j is the sum of the losses of batch j of k. Loss scaling, gradient
    clipping and the exchange between processes happen once per step. Logged losses are means over the batches,
    ``data_time`` is their sum.

    Detectron2's own ``run_step`` is the case k = 1.

    Args:
        trainer: Detectron2's trainer of single steps; an AMPTrainer runs in its mixed precision.
        batches: the number k of batches.

    Raises:
        ConfigError: the number is not positive.
    """
    check_minimum("SOLVER.ACCUMULATE", batches)
    device = next(trainer.model.parameters()).device.type
    mixed = isinstance(trainer, AMPTrainer)
    precision = getattr(trainer, "precision", None)  # of later versions of Detectron2; None is the default
    scaler = trainer.grad_scaler if mixed else torch.amp.GradScaler(device, enabled=False)
    without_exchange = getattr(trainer.model, "no_sync", contextlib.nullcontext)  # of DistributedDataParallel
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
            losses = {"total_loss": losses} if isinstance(losses, Tensor) else losses
            losses = {name: loss / batches for name, loss in losses.items()}
            scaler.scale(sum(losses.values())).backward()
        for name, loss in losses.items():
            means[name] = means.get(name, 0) + loss.detach()
    trainer._write_metrics(means, data_time)
    scaler.step(trainer.optimizer)
    scaler.update()
