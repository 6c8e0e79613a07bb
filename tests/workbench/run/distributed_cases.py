"""Cases of test_processes.py: each process of a launcher runs ``distributed_cases.py CASE [FLAGS]``."""

import argparse
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import SimpleTrainer, create_ddp_model
from detectron2.modeling import build_backbone
from detectron2.structures import BitMasks, Boxes, Instances
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from gw_detectron.errors import ConfigError
from gw_detectron.workbench.console import errors_reported
from gw_detectron.workbench.run import Trainer, get_parser, main
from gw_detectron.workbench.run.optimizer import accumulated_step
from gw_detectron.workbench.run.processes import launch_from_args
from gw_detectron.workbench.run.train import run_config
from tests.shapes import register_shapes
from tests.tiny_run import words

#: norm of the processes -> norm of the one process with the joint batch
NORMS = {
    "GW:groups=16": "GW:groups=16",
    "BW:channels=16,sync=true": "BW:channels=16",
    "BN": "BN",
}
SHARES = ([3, 1], [4, 0])  # images of each of two processes
SIDE = 64


def norm_config(norm: str, **overrides: object) -> CfgNode:
    """Return a config whose backbone, FPN and heads have one norm."""
    keys = (
        "RESNETS__NORM",
        "RESNETS__WHITEN_NORM",
        "FPN__NORM",
        "ROI_BOX_HEAD__NORM",
        "ROI_MASK_HEAD__NORM",
    )
    overrides |= {f"MODEL__{key}": norm for key in keys}
    return run_config(get_parser().parse_args(words(Path("unused"), **overrides)))


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of a tensor, relative to its largest value."""
    assert found.keys() == expected.keys()
    scale = max((float(value.abs().max()) for value in expected.values()), default=1.0)
    differences = [
        float((found[name] - value).abs().max() / value.abs().max().clamp_min(1e-6 * scale))
        for name, value in expected.items()
    ]
    return max(differences, default=0.0)


def relative_norm(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the Euclidean norm of the difference of all tensors, relative to that of the expected ones."""
    squares = [(found[name] - value).square().sum() for name, value in expected.items()]
    return float(
        (sum(squares) / sum(value.square().sum() for value in expected.values())) ** 0.5
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def averages(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.named_buffers() if "running" in name}


def digest(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of named tensors."""
    sha = hashlib.sha256()
    for name, value in tensors.items():
        sha.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def compare_with_joint_batch(norm: str, share: list[int]) -> float:
    """Compare gradients and running statistics of backbone and FPN with those of one process that has all images.

    The loss is linear in the features and a sum over images. DistributedDataParallel averages over processes, so its
    gradients times their number are those of the joint batch.

    Returns:
        The largest relative difference, on the main process.
    """
    rng = torch.Generator().manual_seed(0)
    rank, processes = comm.get_rank(), comm.get_world_size()
    images = torch.randn(4, 3, SIDE, SIDE, generator=rng, dtype=torch.float64)
    weights = [
        torch.randn(4, 32, SIDE >> k, SIDE >> k, generator=rng).double() for k in range(2, 7)
    ]
    torch.manual_seed(0)
    start, reference = (
        build_backbone(norm_config(each)).double().train() for each in (norm, NORMS[norm])
    )
    reference.load_state_dict(start.state_dict())

    def step(model: nn.Module, mine: slice) -> None:
        features = model(images[mine])
        sum(
            (y * weight[mine]).sum()
            for y, weight in zip(features.values(), weights, strict=True)
        ).backward()

    step(reference, slice(None))
    parallel = create_ddp_model(start, broadcast_buffers=False, device_ids=None)
    step(parallel, slice(sum(share[:rank]), sum(share[: rank + 1])))
    own = gradients(start)
    assert len(set(comm.all_gather(digest(own)))) == 1, (
        "DistributedDataParallel makes the gradients equal"
    )
    own = {name: processes * value for name, value in own.items()} | averages(start)
    return relative(own, gradients(reference) | averages(reference))


def record(index: int) -> dict:
    """Return an input of the detector with index + 1 objects."""
    rng = torch.Generator().manual_seed(index)
    corners = torch.rand(index + 1, 2, generator=rng) * 32
    instances = Instances((SIDE, SIDE))
    instances.gt_boxes = Boxes(
        torch.cat((corners, corners + 16 + torch.rand(index + 1, 2, generator=rng) * 16), 1)
    )
    instances.gt_classes = torch.randint(6, (index + 1,), generator=rng)
    instances.gt_masks = BitMasks(torch.rand(index + 1, SIDE, SIDE, generator=rng) > 0.5)
    return {
        "image": torch.randint(256, (3, SIDE, SIDE), generator=rng, dtype=torch.uint8),
        "instances": instances,
    }


def compare_gradients(args: argparse.Namespace) -> None:
    """Write the differences from one process, and those of accumulated gradients, to ``gradients.pt``."""
    found: dict[str, Any] = {
        norm: [compare_with_joint_batch(norm, share) for share in SHARES] for norm in NORMS
    }
    found["accumulated"] = accumulate_gradients()
    if comm.is_main_process():
        torch.save(found, Path(run_config(args).OUTPUT_DIR) / "gradients.pt")


class MeanSquare(nn.Module):
    """The mean square of the features of a backbone, a mean over images."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        return sum(feature.square().mean() for feature in self.backbone(images).values())


def accumulate_gradients() -> float:
    """Accumulate two images in each process; return the difference from the joint batch."""
    rank, processes = comm.get_rank(), comm.get_world_size()
    images = torch.randn(
        2 * processes,
        3,
        SIDE,
        SIDE,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    )
    torch.manual_seed(0)
    model = MeanSquare(build_backbone(norm_config("GW:groups=16")).double().train())
    parallel = create_ddp_model(model, broadcast_buffers=False, device_ids=None)
    trainer = SimpleTrainer(
        parallel,
        images[2 * rank : 2 * rank + 2].split(1),
        torch.optim.SGD(model.parameters(), lr=0.0),
    )
    with EventStorage():
        accumulated_step(trainer, 2)
    found = gradients(model)
    model.zero_grad()
    model(images).backward()
    return relative(found, gradients(model))


def train(args: argparse.Namespace) -> None:
    """Train as tools/train_net.py; write what each process has at the end to ``processes.pt`` in ``OUTPUT_DIR``."""
    noted: dict[str, Any] = {"saved": 0}
    run, save = Trainer.train, torch.save

    def run_and_note(trainer: Trainer) -> dict | None:
        results = run(trainer)
        model = trainer.checkpointer.model
        noted["parameters"], noted["state"] = (
            digest(dict(model.named_parameters())),
            digest(model.state_dict()),
        )
        noted["without gradient"] = [
            name for name, p in model.named_parameters() if p.requires_grad and p.grad is None
        ]
        return results

    def save_and_count(*words: Any, **options: Any) -> None:
        noted["saved"] += 1
        save(*words, **options)

    Trainer.train, torch.save = run_and_note, save_and_count
    main(args)
    noted["local"] = (comm.get_local_rank(), comm.get_local_size())
    processes = comm.all_gather(noted)
    if comm.is_main_process():
        save(processes, Path(run_config(args).OUTPUT_DIR) / "processes.pt")


def fail(kind: str) -> Callable[[argparse.Namespace], None]:
    """Return a training whose process 1 fails in iteration 2."""

    def case(args: argparse.Namespace) -> None:
        run_step = Trainer.run_step

        def fail_in_iteration_2(trainer: Trainer) -> None:
            if trainer.iter == 2:
                Path(os.environ["FAILED_FILE"]).touch()
                if kind == "user_error":
                    raise ConfigError("KEY (1): wrong. Fix: give 2.")
                if kind == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(3600)
            run_step(trainer)

        if comm.get_rank() == 1:
            Trainer.run_step = fail_in_iteration_2
        main(args)

    return case


CASES = {"train": train, "compare_gradients": compare_gradients}
CASES |= {kind: fail(kind) for kind in ("user_error", "killed", "hang")}

if __name__ == "__main__":
    case = sys.argv.pop(1)
    register_shapes(Path(os.environ["SHAPES"]))
    with errors_reported():
        launch_from_args(CASES[case], get_parser().parse_args())
