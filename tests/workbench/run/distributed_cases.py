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
from gw_detectron.workbench.commands.train import get_parser
from gw_detectron.workbench.commands.train import run_here as main
from gw_detectron.workbench.console import errors_reported
from gw_detectron.workbench.run import Trainer
from gw_detectron.workbench.run.optimizer import accumulated_step
from gw_detectron.workbench.run.processes import launch_from_args
from tests.shapes import register_shapes
from tests.tiny_run import config_of, words

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
    return config_of(get_parser().parse_args(words(Path("unused"), **overrides)))


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of a tensor, relative to its largest value."""
    assert found.keys() == expected.keys()
    scales = {name: float(value.abs().max()) for name, value in expected.items()}
    smallest = 1e-6 * max(scales.values())
    return max(
        float((found[name] - expected[name]).abs().max()) / max(scale, smallest)
        for name, scale in scales.items()
    )


def relative_norm(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the Euclidean norm of the difference of all tensors, relative to that of the expected ones."""
    one, other = (
        torch.cat([tensors[name].flatten() for name in expected])
        for tensors in (found, expected)
    )
    return float((one - other).norm() / other.norm())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad
    }


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
        torch.randn(4, 32, SIDE >> k, SIDE >> k, generator=rng).double()
        for k in range(2, 7)
    ]
    torch.manual_seed(0)
    start, reference = (
        build_backbone(norm_config(name)).double().train()
        for name in (norm, NORMS[norm])
    )
    reference.load_state_dict(start.state_dict())

    def step(model: nn.Module, mine: slice) -> None:
        features = model(images[mine]).values()
        loss = sum(
            (y * weight[mine]).sum()
            for y, weight in zip(features, weights, strict=True)
        )
        loss.backward()

    step(reference, slice(None))
    parallel = create_ddp_model(start, broadcast_buffers=False, device_ids=None)
    step(parallel, slice(sum(share[:rank]), sum(share[: rank + 1])))

    own = gradients(start)
    assert len(set(comm.all_gather(digest(own)))) == 1, "the gradients are made equal"
    own = {name: processes * value for name, value in own.items()} | averages(start)
    return relative(own, gradients(reference) | averages(reference))


def record(index: int) -> dict:
    """Return an input of the detector with index + 1 objects."""
    rng = torch.Generator().manual_seed(index)
    objects = index + 1
    corners = torch.rand(objects, 2, generator=rng) * 32
    sizes = 16 + torch.rand(objects, 2, generator=rng) * 16
    instances = Instances((SIDE, SIDE))
    instances.gt_boxes = Boxes(torch.cat((corners, corners + sizes), 1))
    instances.gt_classes = torch.randint(6, (objects,), generator=rng)
    instances.gt_masks = BitMasks(torch.rand(objects, SIDE, SIDE, generator=rng) > 0.5)
    image = torch.randint(256, (3, SIDE, SIDE), generator=rng, dtype=torch.uint8)
    return {"image": image, "instances": instances}


def compare_gradients(args: argparse.Namespace) -> None:
    """Write the differences from one process, and those of accumulated gradients, to ``gradients.pt``."""
    found: dict[str, Any] = {
        norm: [compare_with_joint_batch(norm, share) for share in SHARES]
        for norm in NORMS
    }
    found["accumulated"] = accumulate_gradients()
    if comm.is_main_process():
        torch.save(found, Path(config_of(args).OUTPUT_DIR) / "gradients.pt")


class MeanSquare(nn.Module):
    """The mean square of the features of a backbone, a mean over images."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        return sum(
            feature.square().mean() for feature in self.backbone(images).values()
        )


def accumulate_gradients() -> float:
    """Accumulate two images in each process; return the difference from the joint batch."""
    first, processes = 2 * comm.get_rank(), comm.get_world_size()
    rng = torch.Generator().manual_seed(0)
    images = torch.randn(
        2 * processes, 3, SIDE, SIDE, generator=rng, dtype=torch.float64
    )
    torch.manual_seed(0)
    model = MeanSquare(build_backbone(norm_config("GW:groups=16")).double().train())
    parallel = create_ddp_model(model, broadcast_buffers=False, device_ids=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = SimpleTrainer(parallel, images[first : first + 2].split(1), optimizer)

    with EventStorage():
        accumulated_step(trainer, 2)
    accumulated = gradients(model)

    model.zero_grad()
    model(images).backward()
    return relative(accumulated, gradients(model))


def train(args: argparse.Namespace) -> None:
    """Train as tools/train_net.py; write what each process has at the end to ``processes.pt`` in ``OUTPUT_DIR``."""
    noted: dict[str, Any] = {"saved": 0}
    run, save = Trainer.train, torch.save

    def run_and_note(trainer: Trainer) -> dict | None:
        results = run(trainer)
        model = trainer.checkpointer.model
        noted["parameters"] = digest(dict(model.named_parameters()))
        noted["state"] = digest(model.state_dict())
        noted["without gradient"] = [
            name
            for name, p in model.named_parameters()
            if p.requires_grad and p.grad is None
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
        save(processes, Path(config_of(args).OUTPUT_DIR) / "processes.pt")


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
