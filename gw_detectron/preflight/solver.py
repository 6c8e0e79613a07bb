"""Whether the batch can be shared and the learning rate schedule can be built."""

import torch
from detectron2.config import CfgNode
from detectron2.solver import build_lr_scheduler
from detectron2.utils import comm
from torch import nn

from .findings import Findings


def check_solver(cfg: CfgNode, findings: Findings) -> None:
    """Adds what is wrong with ``SOLVER``."""
    images, processes = cfg.SOLVER.IMS_PER_BATCH, comm.get_world_size()
    if images < 1:
        findings.problems.append(
            f"SOLVER.IMS_PER_BATCH is {images}. Set it to the images of a step in all processes, a multiple of "
            f"{processes} from {processes} on."
        )
    elif images % processes:
        above = -(-images // processes) * processes
        findings.problems.append(
            f"SOLVER.IMS_PER_BATCH is {images}, which {processes} processes cannot share equally. Set it to a "
            f"multiple of {processes}, for example {above}, and scale SOLVER.BASE_LR with it."
        )
    try:
        build_lr_scheduler(cfg, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    except (ValueError, AssertionError) as error:
        findings.problems.append(
            f"The learning rate schedule cannot be built: {error}. Correct SOLVER.STEPS ({list(cfg.SOLVER.STEPS)}), "
            f"which have to grow and stay below SOLVER.MAX_ITER ({cfg.SOLVER.MAX_ITER}), or "
            f"SOLVER.LR_SCHEDULER_NAME ({cfg.SOLVER.LR_SCHEDULER_NAME})."
        )
