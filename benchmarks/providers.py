"""The layers that are measured side by side, among them the paper's listing, and a lower bound of the time."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gw_detectron.layers import GroupWhitening2d

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
        return (
            torch.autocast(device.type, self.dtype) if self.autocast else nullcontext()
        )


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

    def input(self) -> Tensor:
        """Return a leaf that requires grad, the same in every run."""
        generator = torch.Generator(self.device).manual_seed(0)
        x = torch.randn(self.shape, generator=generator, device=self.device)
        return x.to(self.precision.dtype).requires_grad_()

    def build(self, provider: str) -> nn.Module:
        """Build a provider's layer on the device, with parameters in the dtype of the precision."""
        _, build = PROVIDERS[provider]
        assert build is not None, provider  # the floor has no layer
        return build(self).to(
            self.device, None if self.precision.autocast else self.precision.dtype
        )

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        """Call a layer, under autocast if the precision has it."""
        with self.precision.context(self.device):
            return module(x)


class Figure1Whitening(nn.Module):
    r"""The paper's listing, operation by operation: the baseline of every faster implementation.

    Mean, centering, covariance, trace, T times :math:`P \leftarrow 1.5 P - 0.5 P^3 \Sigma_N`, whitening, affine. Like
    the listing it has no :math:`\epsilon`, multiplies by constants through ``addcmul`` with a zero matrix, and starts
    from :math:`P_0 = I` with full matrix products. A constant sample gives NaN.

    Args:
        num_channels: C.
        num_groups: g, which divides C.
        num_iters: T.

    Shape: (N, C, H, W), contiguous -> the same.

    Source: Group Whitening supplement, Figure 1.
    """

    def __init__(self, num_channels: int, num_groups: int, num_iters: int) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.num_iters = num_iters
        self.weight = nn.Parameter(torch.ones(1, num_channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(1, num_channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x_g = x.view(x.shape[0], self.num_groups, -1)
        x_c = x_g - x_g.mean(-1, keepdim=True)
        sigma = x_c.matmul(x_c.transpose(1, 2)) / x_g.shape[-1]
        zeros = torch.zeros_like(sigma)
        p = torch.eye(self.num_groups, dtype=x.dtype, device=x.device).expand(
            sigma.shape
        )
        inverse_trace = (
            torch.addcmul(zeros, sigma, p).sum((1, 2), keepdim=True).reciprocal()
        )
        sigma_n = torch.addcmul(zeros, sigma, inverse_trace)
        for _ in range(self.num_iters):
            p = torch.baddbmm(
                p, torch.matrix_power(p, 3), sigma_n, beta=1.5, alpha=-0.5
            )
        whitening = torch.addcmul(zeros, p, inverse_trace.sqrt())
        return whitening.matmul(x_c).view_as(x) * self.weight + self.bias


def _ours(case: Case) -> nn.Module:
    return GroupWhitening2d(case.channels, case.groups, case.iters)


def _ours_relu(case: Case) -> nn.Module:
    layer = _ours(case)
    # the ReLU is fused at the call
    layer.forward = functools.partial(layer.forward, relu=True)
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
    "relu_apart": (
        "GroupWhitening2d and nn.ReLU",
        lambda case: nn.Sequential(_ours(case), nn.ReLU(inplace=True)),
    ),
    "figure1": ("the paper's listing in plain autograd", _figure1),
    "figure1_compiled": ("the same under torch.compile", _figure1_compiled),
    "group_norm": (
        f"nn.GroupNorm({GROUP_NORM_GROUPS})",
        lambda case: nn.GroupNorm(GROUP_NORM_GROUPS, case.channels),
    ),
    "batch_norm": (
        "nn.BatchNorm2d in training mode",
        lambda case: nn.BatchNorm2d(case.channels),
    ),
    "conv3x3": (
        "the 3x3 convolution before the layer, C to C; float32 is tf32 on a GPU, as torch chooses",
        _conv3x3,
    ),
    "floor": (
        "only the matrix products on a CPU, a copy of GroupNorm's bytes on a GPU",
        None,
    ),
}
#: measured only if asked for
OPTIONAL = ("figure1_compiled",)


def layer_step(module: nn.Module, x: Tensor, case: Case) -> Step:
    """Return a step that runs a layer on ``x``; gradients are dropped before each run."""
    if case.mode == "forward":
        return Step(torch.no_grad()(lambda: case.apply(module, x)))
    output = case.apply(module, x)
    generator = torch.Generator(case.device).manual_seed(1)
    grad = torch.randn(output.shape, generator=generator, device=case.device).to(
        output.dtype
    )

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
    return (
        traffic(x, case.mode)
        if case.device.type == "cuda"
        else products(x, case.groups, case.iters, case.mode)
    )


#: (g, g) products of one solver step. Forward: P^2, P^3, P^3 S with S = Sigma_N. Backward, with D the symmetric part of
#: the gradient of P_k, and Q = P_{k-1}, which commutes with S: QD, Q(QD), (QD)Q, Q(Q^2 D) for dS, and
#: (DQ^2 + QDQ + Q^2 D)S for the gradient of Q
SOLVER_PRODUCTS = {"forward": 3, "forward+backward": 3 + 5}
#: passes over the tensor in memory: forward x for the statistics, x again, y; backward x and dy twice, dx
PASSES = {"forward": 3, "forward+backward": 3 + 5}


def products(x: Tensor, groups: int, iters: int, mode: str) -> Step:
    """Return a step that does only the matrix products: no centering, no affine.

    Results are new tensors, like the results of a layer. A layer can be faster: it can use the symmetry of Sigma, which
    counts as a full product, and P_1, which counts as three products, needs none.

    Args:
        x: (N, C, H, W). Its dtype is the dtype of the big products; the solver's products are at least float32.
        groups: g, which divides C.
        iters: T.
        mode: ``forward`` or ``forward+backward``.
    """
    x_g = x.detach().reshape(x.shape[0], groups, -1)
    dy = torch.randn_like(x_g)
    # of norm about one, so that no product overflows or becomes subnormal, which is slow on a CPU
    small = torch.randn(x.shape[0], groups, groups, device=x.device) / groups**0.5
    small = small.to(torch.promote_types(x.dtype, torch.float32))
    whitening = small.to(x.dtype)

    def solve(count: int) -> None:
        for _ in range(count * iters):
            torch.bmm(small, small)

    @torch.no_grad()
    def run() -> tuple[Tensor, ...]:
        sigma = torch.bmm(x_g, x_g.mT)
        solve(SOLVER_PRODUCTS["forward"])
        y = torch.bmm(whitening, x_g)
        if mode == "forward":
            return sigma, y
        grad_whitening = torch.bmm(dy, x_g.mT)
        solve(SOLVER_PRODUCTS[mode] - SOLVER_PRODUCTS["forward"])
        return (
            sigma,
            y,
            grad_whitening,
            torch.baddbmm(torch.bmm(whitening, dy), whitening, x_g),
        )

    return Step(run)


def traffic(x: Tensor, mode: str) -> Step:
    """Return a step that moves as many bytes as a normalization of each sample must move.

    A copy reads and writes every byte, so it copies half of the :data:`PASSES` over ``x``.
    """
    source = torch.empty(
        PASSES[mode] * x.numel() // 2, dtype=x.dtype, device=x.device
    ).normal_()
    target = torch.empty_like(source)
    return Step(lambda: target.copy_(source))
