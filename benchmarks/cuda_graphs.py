"""Training iterations and backbones as CUDA graphs: one launch instead of one for each kernel."""

from typing import Any

import torch
from detectron2.modeling import Backbone
from torch import Tensor, nn

from .timing import WARM_UP, Step


def capture_step(step: Step) -> Step:
    """Capture a step, whose tensors keep their shapes and addresses, as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # compiles the kernels, and creates the optimizer's state before it is captured
        for _ in range(WARM_UP):
            step.run()
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    return Step(graph.replay)


def capture_backbone(backbone: Backbone, images: Tensor) -> None:
    """Make the passes of a backbone CUDA graphs, for training on images of one size.

    What follows it in a detector depends on the images, and runs as before.

    Args:
        backbone: changed in place.
        images: (N, 3, H, W), of the size to come.
    """
    names = list(backbone.output_shape())
    was_cached = torch.is_autocast_cache_enabled()
    # a graph would keep the weights that autocast has cast once
    torch.set_autocast_cache_enabled(False)
    try:
        features: Any = torch.cuda.make_graphed_callables(
            _FeatureTuple(backbone, names), (images,)
        )
    finally:
        torch.set_autocast_cache_enabled(was_cached)

    def forward(images: Tensor) -> dict[str, Tensor]:
        return dict(zip(names, features(images), strict=True))

    backbone.forward = forward


class _FeatureTuple(nn.Module):
    """The features of a backbone by position, since a graph has no names."""

    def __init__(self, backbone: Backbone, names: list[str]) -> None:
        super().__init__()
        self.backbone = backbone
        self.run = backbone.forward  # before it is replaced
        self.names = names

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        features = self.run(images)
        return tuple(features[name] for name in self.names)
