"""Whether the machine and the processes of a run can do what the config asks for."""

import torch
import torch.distributed as dist
from detectron2.config import CfgNode

from .findings import Findings


def check_machine(cfg: CfgNode, findings: Findings, *, eval_only: bool) -> None:
    """Adds what is wrong with the device and mixed precision."""
    try:
        torch.device(cfg.MODEL.DEVICE)
    except RuntimeError:
        findings.problems.append(f"MODEL.DEVICE is {cfg.MODEL.DEVICE!r}, which is no device. Set it to cuda or cpu.")
        return
    on_cpu = cfg.MODEL.DEVICE == "cpu"
    no_gpu = not torch.cuda.is_available()
    if not on_cpu and no_gpu:
        findings.problems.append(
            f"MODEL.DEVICE is {cfg.MODEL.DEVICE}, but torch sees no GPU here. Set MODEL.DEVICE cpu, or give "
            "--num-gpus 0."
        )
    if on_cpu and dist.is_initialized() and dist.get_backend() == "nccl":
        findings.problems.append(
            "MODEL.DEVICE is cpu, but the processes are joined by nccl, which needs GPUs. Start them with "
            "torchrun and give --num-gpus 0."
        )
    if cfg.SOLVER.AMP.ENABLED and (on_cpu or no_gpu) and not eval_only:
        findings.problems.append(
            "SOLVER.AMP.ENABLED is True, but mixed precision needs a GPU. Set SOLVER.AMP.ENABLED False."
        )
