"""The layers that are timed side by side."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gw_detectron.layers import GroupWhitening2d

from . import floor
from .figure1 import Figure1Whitening
from .timing import Step

MODES = ("forward", "forward+backward")
GROUP_NORM_GROUPS = 32


class Precision(NamedTuple):
    """In which numbers a layer works.

    Args:
        dtype: of its input.
        autocast: whether it runs under autocast with parameters in float32, as in mixed precision training; else its
            parameters have the dtype of the input.
    """

    dtype: torch.dtype
    autocast: bool

    def context(self, device: torch.device) -> AbstractContextManager:
        return torch.autocast(device.type, self.dtype) if self.autocast else nullcontext()


PRECISIONS = {
    "fp32": Precision(torch.float32, autocast=False),
    "bf16": Precision(torch.bfloat16, autocast=True),
    "fp16": Precision(torch.float16, autocast=True),
    "bf16-pure": Precision(torch.bfloat16, autocast=False),
    "fp16-pure": Precision(torch.float16, autocast=False),
}


@dataclass(frozen=True)
class Case:
    """One input and what is done with it.

    Args:
        shape: (N, C, H, W).
        precision: a name in :data:`PRECISIONS`.
        mode: of :data:`MODES`. ``forward`` records no graph, as in inference.
        device: where.
        groups: g, capped at C.
        iters: T.
    """

    shape: tuple[int, int, int, int]
    precision: str
    mode: str
    device: torch.device
    groups: int
    iters: int

    @property
    def channels(self) -> int:
        return self.shape[1]

    @property
    def shape_text(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def side(self) -> int:
        """The side of the covariance matrix."""
        return min(self.groups, self.channels)

    def input(self) -> Tensor:
        """A leaf with gradient, the same in every run."""
        generator = torch.Generator(self.device).manual_seed(0)
        x = torch.randn(self.shape, generator=generator, device=self.device)
        return x.to(PRECISIONS[self.precision].dtype).requires_grad_()

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        """The module's output, under autocast if the precision has it."""
        with PRECISIONS[self.precision].context(self.device):
            return module(x)

    def place(self, module: nn.Module) -> nn.Module:
        """Puts a module on the device, with parameters in the dtype of the precision."""
        precision = PRECISIONS[self.precision]
        return module.to(self.device) if precision.autocast else module.to(self.device, precision.dtype)


def _figure1(case: Case) -> nn.Module:
    return Figure1Whitening(case.channels, case.side, case.iters)


def _figure1_compiled(case: Case) -> nn.Module:
    torch.compiler.reset()  # else the compiler gives up after a few shapes and runs the rest uncompiled
    return torch.compile(_figure1(case), dynamic=False)  # type: ignore[return-value]


#: how to build the layers
LAYERS: dict[str, Callable[[Case], nn.Module]] = {
    "ours": lambda case: GroupWhitening2d(case.channels, case.groups, case.iters),
    "ours_relu": lambda case: GroupWhitening2d(case.channels, case.groups, case.iters, relu=True),
    "relu_apart": lambda case: nn.Sequential(LAYERS["ours"](case), nn.ReLU(inplace=True)),
    "figure1": _figure1,
    "figure1_compiled": _figure1_compiled,
    "group_norm": lambda case: nn.GroupNorm(GROUP_NORM_GROUPS, case.channels),
    "batch_norm": lambda case: nn.BatchNorm2d(case.channels),
    "conv3x3": lambda case: nn.Conv2d(case.channels, case.channels, 3, padding=1, bias=False),
}
#: what is timed, in words
PROVIDERS = {
    "ours": "GroupWhitening2d",
    "ours_relu": "GroupWhitening2d with the ReLU behind it as a part of it",
    "relu_apart": "the same with nn.ReLU",
    "figure1": "the paper's listing in plain autograd",
    "figure1_compiled": "the same under torch.compile",
    "group_norm": f"nn.GroupNorm with {GROUP_NORM_GROUPS} groups",
    "batch_norm": "nn.BatchNorm2d in training mode",
    "conv3x3": "the 3x3 convolution beside the layer, C to C",
    "floor": "the bare matrix products on a CPU, a copy of the bytes GroupNorm moves on a GPU",
}
#: those that are left out unless asked for
OPTIONAL = ("figure1_compiled",)


def module_step(module: nn.Module, x: Tensor, case: Case) -> Step:
    """A layer's pass over ``x``, its gradients dropped before each run."""

    if case.mode == "forward":
        return Step(torch.no_grad()(lambda: case.apply(module, x)))
    result = case.apply(module, x)
    generator = torch.Generator(case.device).manual_seed(1)
    grad = torch.randn(result.shape, generator=generator, device=case.device).to(result.dtype)

    def forward_backward() -> Tensor:
        y = case.apply(module, x)
        y.backward(grad)
        return y

    def drop_gradients() -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)

    return Step(forward_backward, drop_gradients)


def floor_step(x: Tensor, case: Case) -> Step:
    """The floor of the device."""
    if case.device.type == "cuda":
        return floor.traffic(x, case.mode)
    return floor.products(x, case.side, case.iters, case.mode)
