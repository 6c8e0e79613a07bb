"""Group Whitening as a module."""

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.arguments import check_flag, check_tensors
from ..ops.group_whitening.op import whiten
from ..ops.group_whitening.reference import effective_groups
from ..ops.solvers import Solver


class GroupWhitening2d(nn.Module):
    r"""Group Whitening layer: whiten the channel groups of each sample.

    .. math:: y = \gamma \, \Pi^{-1}(\psi(\Sigma) X_C) + \beta, \quad
        \Sigma = \tfrac{1}{M} X_C X_C^T + \epsilon I

    See :func:`~gw_detectron.ops.group_whitening.reference.group_whiten_reference` for the symbols.
    There are no batch statistics: training and evaluation compute the same function.

    ``num_groups`` is g, the side of the covariance matrix, computed over M = C / g * prod(spatial)
    columns. Layers that whiten over the batch usually count "channels per group" instead.

    .. code-block:: python

        layer = GroupWhitening2d(256)
        y = layer(torch.randn(2, 256, 50, 84))

    Args:
        num_channels: C, the size of dimension 1 of the input.
        num_groups: g, capped at C. One group with the exact solver is GroupNorm with one group.
        affine: learn a per-channel scale and shift, both of shape (C,).
        solver, num_iters, eps, threshold, corr: see :class:`~gw_detectron.layers.Solver`;
            ``"zca"`` is exact.
        device, dtype: of scale and shift, as in torch's own layers.

    Shape:
        Input (N, C, *spatial), with zero to three spatial dimensions. Output: the same shape, dtype
        and memory format.

    Attributes:
        fuses_relu: True: ``forward`` accepts ``relu=True``. A caller that has a ReLU after its norm
            may test for this. A subclass with its own ``forward`` sets it itself.
        solver: the Solver.

    Raises ValueError or TypeError for a wrong argument, such as groups that do not divide the channels.

    Source: Group Whitening (CVPR 2021), section 3; supplement, Algorithm 1.
    """

    fuses_relu = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in vars(cls) and "fuses_relu" not in vars(cls):
            cls.fuses_relu = (
                False  # its forward may not take relu, or change what comes out
            )

    def __init__(
        self,
        num_channels: int,
        num_groups: int = 64,
        num_iters: int = 5,
        eps: float = 1e-5,
        affine: bool = True,
        solver: str = "newton",
        *,
        threshold: float = 0.01,
        corr: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_flag("affine", affine)

        self.num_channels = num_channels
        self.num_groups = effective_groups(num_channels, num_groups)
        self.solver = Solver(solver, num_iters, eps, threshold, corr)
        self.affine = affine

        self.weight = None
        self.bias = None
        if affine:
            self.weight = nn.Parameter(
                torch.ones(num_channels, device=device, dtype=dtype)
            )
            self.bias = nn.Parameter(
                torch.zeros(num_channels, device=device, dtype=dtype)
            )

    def reset_parameters(self) -> None:
        """Set the scale to 1 and the shift to 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        """Whiten ``x``; with ``relu`` also apply ReLU, fused into the same passes over memory.

        The caller decides at each call, so the ReLU stays with the caller when this layer is replaced.
        """
        check_tensors(x, self.weight, self.bias, self.num_channels)
        return whiten(x, self.weight, self.bias, self.num_groups, self.solver, relu)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        # the authors' checkpoints hold the affine parameters as (1, C, 1, 1)
        for name in ("weight", "bias"):
            key = prefix + name
            value = state_dict.get(key)
            if value is None or value.dim() < 2:
                continue
            if value.shape[1] == value.numel() == self.num_channels:
                state_dict[key] = value.reshape(-1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return (
            f"{self.num_channels}, groups={self.num_groups}, "
            f"{self.solver}, affine={self.affine}"
        )
