"""Check device, batch size and learning rate schedule of a run."""

import torch
import torch.distributed as dist
from detectron2.config import CfgNode
from detectron2.solver import build_lr_scheduler
from detectron2.utils import comm
from torch import nn

from ..config import get_value
from ..installation import compiler_names, find_compiler
from .findings import Findings


def check_device(cfg: CfgNode, findings: Findings, *, eval_only: bool) -> None:
    """Check ``MODEL.DEVICE`` and mixed precision."""
    device, has_gpu = cfg.MODEL.DEVICE, torch.cuda.is_available()
    try:
        torch.device(device)
    except RuntimeError:
        findings.problems.append(f"MODEL.DEVICE ('{device}'): unknown device. Fix: set it to cuda or cpu.")
        return
    if device != "cpu" and not has_gpu:
        findings.problems.append(
            f"MODEL.DEVICE ('{device}'): torch finds no GPU here. Fix: set MODEL.DEVICE cpu, or give --num-gpus 0."
        )
    if device == "cpu" and dist.is_initialized() and dist.get_backend() == "nccl":
        findings.problems.append(
            "MODEL.DEVICE ('cpu'): the processes communicate by nccl, which needs GPUs. Fix: launch them with torchrun "
            "and --num-gpus 0."
        )
    if cfg.SOLVER.AMP.ENABLED and (device == "cpu" or not has_gpu) and not eval_only:
        findings.problems.append(
            "SOLVER.AMP.ENABLED (True): mixed precision needs a GPU. Fix: set SOLVER.AMP.ENABLED False."
        )


def check_compiler(cfg: CfgNode, findings: Findings) -> None:
    """Check that ``MODEL.COMPILE`` finds a compiler of the host's code."""
    if cfg.MODEL.COMPILE and find_compiler() is None:
        findings.problems.append(
            f"MODEL.COMPILE (True): torch.compile finds no C++ compiler (of {', '.join(compiler_names())}). "
            "Fix: install g++, or set MODEL.COMPILE False."
        )


def check_scaled_periods(cfg: CfgNode, scaled: CfgNode, findings: Findings) -> None:
    """Check that ``SOLVER.REFERENCE_WORLD_SIZE`` does not scale a period to 0.

    Args:
        cfg: the config as given.
        scaled: the config of this number of processes.
        findings: problems are added.
    """
    for key in ("SOLVER.CHECKPOINT_PERIOD", "TEST.EVAL_PERIOD"):
        if get_value(cfg, key) and not get_value(scaled, key):
            findings.problems.append(
                f"SOLVER.REFERENCE_WORLD_SIZE ({cfg.SOLVER.REFERENCE_WORLD_SIZE}): scales {key} "
                f"{get_value(cfg, key)} to 0 for {comm.get_world_size()} processes. Fix: raise {key}."
            )


def check_schedule(cfg: CfgNode, findings: Findings) -> None:
    """Check the batch size and the learning rate schedule."""
    images, processes = cfg.SOLVER.IMS_PER_BATCH, comm.get_world_size()
    if images % processes:
        findings.problems.append(
            f"SOLVER.IMS_PER_BATCH ({images}): {processes} processes cannot share it equally. Fix: set it to a "
            f"multiple of {processes}, e.g. {-(-images // processes) * processes}, and scale SOLVER.BASE_LR with it."
        )
    try:
        build_lr_scheduler(cfg, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    except (ValueError, AssertionError) as error:
        findings.problems.append(
            f"SOLVER: the learning rate schedule cannot be built: {error}. Fix: correct SOLVER.STEPS "
            f"({list(cfg.SOLVER.STEPS)}), which must increase and stay below SOLVER.MAX_ITER ({cfg.SOLVER.MAX_ITER}), "
            f"or SOLVER.LR_SCHEDULER_NAME ({cfg.SOLVER.LR_SCHEDULER_NAME})."
        )
