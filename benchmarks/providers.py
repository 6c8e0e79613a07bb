"""The layers that are measured side by side."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gw_detectron.layers import GroupWhitening2d

from .figure1 import Figure1Whitening
from .floor import products, traffic
from .timing import Step

MODES = ("forward", "forward+backward")
GROUP_NORM_GROUPS = 32


class Precision(NamedTuple):
    """The number format of a measurement.

    Args:
        dtype: of the input.
        autocast: run under autocast with float32 parameters; else the parameters have the input's dtype.
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
    """One input and what is measured on it.

    Args:
        shape: (N, C, H, W).
        dtype: a name in :data:`PRECISIONS`.
        mode: of :data:`MODES`, or ``memory``. ``forward`` records no graph, as in inference.
        device: where.
        num_groups: g, capped at C.
        iters: T.
    """

    shape: tuple[int, int, int, int]
    dtype: str
    mode: str
    device: torch.device
    num_groups: int
    iters: int

    def __str__(self) -> str:
        return f"{self.dtype} {self.mode} {self.shape_text}"

    @property
    def channels(self) -> int:
        return self.shape[1]

    @property
    def groups(self) -> int:
        return min(self.num_groups, self.channels)

    @property
    def shape_text(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def precision(self) -> Precision:
        return PRECISIONS[self.dtype]

    def channel_divisor(self, provider: str) -> int:
        """Return the number that must divide the channels for a provider."""
        return {"group_norm": GROUP_NORM_GROUPS, "batch_norm": 1, "conv3x3": 1}.get(provider, self.groups)

    def input(self) -> Tensor:
        """Return a leaf that requires grad, the same in every run."""
        generator = torch.Generator(self.device).manual_seed(0)
        x = torch.randn(self.shape, generator=generator, device=self.device)
        return x.to(self.precision.dtype).requires_grad_()

    def build(self, provider: str) -> nn.Module:
        """Build a provider's layer on the device, with parameters in the dtype of the precision."""
        _, build = PROVIDERS[provider]
        assert build is not None, provider  # the floor has no layer
        return build(self).to(self.device, None if self.precision.autocast else self.precision.dtype)

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        """Call a layer, under autocast if the precision has it."""
        with self.precision.context(self.device):
            return module(x)


def _ours(case: Case) -> nn.Module:
    return GroupWhitening2d(case.channels, case.groups, case.iters)


def _ours_relu(case: Case) -> nn.Module:
    layer = _ours(case)
    layer.forward = functools.partial(layer.forward, relu=True)  # the ReLU is fused at the call
    return layer


def _conv3x3(case: Case) -> nn.Module:
    return nn.Conv2d(case.channels, case.channels, 3, padding=1, bias=False)


def _figure1(case: Case) -> nn.Module:
    return Figure1Whitening(case.channels, case.groups, case.iters)


def _figure1_compiled(case: Case) -> nn.Module:
    torch.compiler.reset()  # else the compiler gives up after a few shapes and runs the rest uncompiled
    return torch.compile(_figure1(case), dynamic=False)  # type: ignore[return-value]


#: what is measured and how to build it; the floor is not a layer
PROVIDERS: dict[str, tuple[str, Callable[[Case], nn.Module] | None]] = {
    "ours": ("GroupWhitening2d", _ours),
    "ours_relu": ("GroupWhitening2d with a fused ReLU", _ours_relu),
    "relu_apart": ("GroupWhitening2d and nn.ReLU", lambda case: nn.Sequential(_ours(case), nn.ReLU(inplace=True))),
    "figure1": ("the paper's listing in plain autograd", _figure1),
    "figure1_compiled": ("the same under torch.compile", _figure1_compiled),
    "group_norm": (f"nn.GroupNorm({GROUP_NORM_GROUPS})", lambda case: nn.GroupNorm(GROUP_NORM_GROUPS, case.channels)),
    "batch_norm": ("nn.BatchNorm2d in training mode", lambda case: nn.BatchNorm2d(case.channels)),
    "conv3x3": ("the 3x3 convolution before the layer, C to C; float32 is tf32 on a GPU, as torch chooses", _conv3x3),
    "floor": ("only the matrix products on a CPU, a copy of GroupNorm's bytes on a GPU", None),
}
#: measured only if asked for
OPTIONAL = ("figure1_compiled",)


def layer_step(module: nn.Module, x: Tensor, case: Case) -> Step:
    """Return a step that runs a layer on ``x``; gradients are dropped before each run."""
    if case.mode == "forward":
        return Step(torch.no_grad()(lambda: case.apply(module, x)))
    output = case.apply(module, x)
    generator = torch.Generator(case.device).manual_seed(1)
    grad = torch.randn(output.shape, generator=generator, device=case.device).to(output.dtype)

    def forward_backward() -> Tensor:
        y = case.apply(module, x)
        y.backward(grad)
        return y

    def drop_gradients() -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)

    return Step(forward_backward, drop_gradients)


def provider_step(provider: str, x: Tensor, case: Case) -> Step:
    """Return the step of a provider in a timed case."""
    if provider != "floor":
        return layer_step(case.build(provider), x, case)
    return traffic(x, case.mode) if case.device.type == "cuda" else products(x, case.groups, case.iters, case.mode)
