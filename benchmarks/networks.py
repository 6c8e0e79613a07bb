"""Iterations of the networks in the paper's tables of running time, in training and inference, on random data.

The learning rate is zero: the optimizer does its work, the weights do not change, and all iterations are equal.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.modeling import ResNet
from detectron2.solver import build_optimizer
from detectron2.structures import Boxes, Instances, PolygonMasks
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from gw_detectron.config import read_config
from gw_detectron.modeling import gw_resnet
from gw_detectron.workbench.run import Trainer

from .cuda_graphs import capture_backbone, capture_step
from .providers import Precision
from .timing import Step

CLASSES = 1000
#: how a network runs, other than as plain training: the ends of the models' names
EXECUTIONS = ("inference", "graph", "compiled")


@dataclass(frozen=True)
class Sizes:
    """Batch and image sizes.

    Args:
        batch_size: images of a classifier.
        image_size: height and width of a classifier's images, in pixels.
        detector_batch: images of a detector.
        detector_image: shorter side of a detector's images, in pixels; the longer side is 4/3 of it.
    """

    batch_size: int = 8
    image_size: int = 224
    detector_batch: int = 2
    detector_image: int = 320

    @property
    def detector_sides(self) -> tuple[int, int]:
        """Height and width of a detector's images."""
        return self.detector_image, self.detector_image * 4 // 3


class Variant(NamedTuple):
    """Norms and convolutions of a classifier by name; or the config of a detector."""

    norm: str = ""
    whiten_norm: str = ""
    positions: str = ""
    conv: str = ""
    config: str = ""


class Iteration(NamedTuple):
    """An iteration and its model. In plain training also the forward pass, for counting memory."""

    step: Step
    model: nn.Module
    forward: Callable[[], Tensor] | None = None


def classifier(
    architecture: str,
    variant: Variant,
    sizes: Sizes,
    precision: Precision,
    device: torch.device,
    execution: str = "",
) -> Iteration:
    """Build an ImageNet iteration of a ResNet or ResNeXt.

    In training the loss is cross entropy, the optimizer SGD with momentum and weight decay.

    Args:
        architecture: such as ``R-50`` or ``X-101-32x8d``.
        variant: the norms.
        sizes: of a batch.
        precision: of the forward pass.
        device: where.
        execution: ``inference`` for the forward pass in evaluation mode, ``graph`` for the whole iteration as a CUDA
            graph, ``compiled`` for a model compiled by torch, which uses CUDA graphs, too.

    Source: Group Whitening, section 5.1.1, with another batch size than 256.
    """
    depth, groups, width = map(int, [*re.findall(r"\d+", architecture), 1, 64][:3])
    backbone = gw_resnet(
        depth,
        variant.positions,
        variant.norm,
        variant.whiten_norm,
        num_groups=groups,
        width_per_group=width,
        out_features=["res5"],
        freeze_at=0,
        conv=variant.conv,
    )
    stages = [list(stage) for stage in backbone.stages]
    model = ResNet(backbone.stem, stages, num_classes=CLASSES).to(device)
    model.train(execution != "inference")
    if execution == "compiled":
        model.compile(mode="reduce-overhead")
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.0, momentum=0.9, weight_decay=1e-4
    )
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(
        sizes.batch_size, 3, sizes.image_size, sizes.image_size, generator=generator
    ).to(device)
    if execution == "inference":

        @torch.no_grad()
        def run() -> Any:
            with precision.context(device):
                return model(images)

        return Iteration(Step(run), model)
    labels = torch.randint(CLASSES, (sizes.batch_size,), generator=generator).to(device)

    def forward() -> Tensor:
        with precision.context(device):
            return F.cross_entropy(model(images)["linear"], labels)

    step = _training_step(forward, optimizer, precision, device)
    if execution == "graph":
        step = capture_step(step)
    # a graph and a compiled model hold other memory than autograd saves
    return Iteration(step, model, None if execution else forward)


def detector(
    variant: Variant,
    sizes: Sizes,
    precision: Precision,
    device: torch.device,
    execution: str = "",
) -> Iteration:
    """Build a training iteration of the detector of a config, see :func:`detector_training`."""
    cfg = read_config(variant.config)
    cfg.MODEL.DEVICE = str(device)
    return detector_training(cfg, sizes, precision, execution)


def detector_training(
    cfg: CfgNode, sizes: Sizes, precision: Precision, execution: str = ""
) -> Iteration:
    """Build a training iteration of a detector from random weights, with the optimizer of its config.

    Each image has as many objects as the heads take positive regions, and their boxes are among the proposals. The
    heads therefore always have their full number of regions.

    Args:
        cfg: the detector and its device. Its learning rate becomes 0.
        sizes: of a batch.
        precision: of the forward pass.
        execution: ``graph`` for a backbone as CUDA graphs.
    """
    cfg.SOLVER.BASE_LR, device = 0.0, torch.device(cfg.MODEL.DEVICE)
    model: Any = Trainer.build_model(cfg).train()
    optimizer = build_optimizer(cfg, model)
    batch = random_batch(cfg, sizes)
    if execution == "graph":
        with precision.context(device):
            capture_backbone(model.backbone, model.preprocess_image(batch).tensor)

    def forward() -> Tensor:
        torch.manual_seed(0)  # sample the same anchors and proposals for the losses
        with EventStorage(), precision.context(device):
            return sum(model(batch).values())

    step = _training_step(forward, optimizer, precision, device)
    return Iteration(step, model, None if execution else forward)


def random_batch(cfg: CfgNode, sizes: Sizes) -> list[dict[str, Any]]:
    """Return noise images with random boxes and their outlines as masks, in Detectron2's training format."""
    rng = np.random.default_rng(0)
    height, width = sizes.detector_sides
    count = int(
        cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE * cfg.MODEL.ROI_HEADS.POSITIVE_FRACTION
    )
    batch = []
    for _ in range(sizes.detector_batch):
        sides = rng.uniform(0.05, 0.3, (count, 2)) * height
        corners = rng.uniform(0, 1, (count, 2)) * (np.array([width, height]) - sides)
        boxes = np.concatenate([corners, corners + sides], axis=1)
        instances = Instances((height, width))
        instances.gt_boxes = Boxes(torch.as_tensor(boxes, dtype=torch.float32))
        instances.gt_classes = torch.as_tensor(
            rng.integers(0, cfg.MODEL.ROI_HEADS.NUM_CLASSES, count)
        )
        instances.gt_masks = PolygonMasks(
            [[np.array([x0, y0, x1, y0, x1, y1, x0, y1])] for x0, y0, x1, y1 in boxes]
        )
        image = torch.as_tensor(
            rng.integers(0, 256, (3, height, width), dtype=np.uint8)
        )
        batch.append(
            {"image": image, "height": height, "width": width, "instances": instances}
        )
    return batch


def _training_step(
    forward: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    device: torch.device,
) -> Step:
    # float16 needs scaled losses; the scaler also skips steps with infinite gradients, as 0 * inf is nan
    scaler = torch.amp.GradScaler(device.type, enabled=precision.dtype == torch.float16)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(forward()).backward()
        scaler.step(optimizer)
        scaler.update()

    return Step(run)
