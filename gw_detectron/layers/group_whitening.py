"""Group Whitening as a module."""

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.group_whitening.op import group_whiten
from ..ops.group_whitening.reference import effective_groups
from ..ops.solvers import Solver


class GroupWhitening2d(nn.Module):
    r"""Group Whitening (GW): whitens the channel groups of each sample, with no batch statistics.

    .. math:: y = \gamma \, \Pi^{-1}(\psi(\Sigma) X_C) + \beta, \quad \Sigma = \tfrac{1}{M} X_C X_C^T + \epsilon I

    See :func:`gw_detectron.layers.group_whiten` for the symbols. Training and evaluation compute the same function.

    ``num_groups`` is the side g of the covariance matrix, taken over M = C / g * prod(spatial) columns. Layers that
    whiten over the batch usually count "channels per group" instead.

    Args:
        num_channels: C, the size of dimension 1 of the input.
        num_groups: g, capped at C. One group with the exact solver is GroupNorm with one group.
        num_iters: steps T of the ``newton`` solver.
        eps: added to the diagonal of the covariance, in units of the input's variance.
        affine: learn a per-channel scale and shift, both of shape (C,).
        solver: a name in :data:`gw_detectron.layers.SOLVERS`: ``"newton"`` (iterative, the published choice), ``"zca"``
            (exact), ...
        threshold: c of the solver ``"zca_max"``.
        corr: standardise the groups, then decorrelate their correlation matrix.

    Shape: (N, C, *spatial) -> the same, for zero to three spatial dimensions; dtype and memory format are kept.

    Raises:
        ValueError: an argument out of its range, or groups that do not divide the channels.

    Source: Group Whitening (CVPR 2021), section 3; supplement, Algorithm 1.
    """

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
    ) -> None:
        super().__init__()
        self.num_channels = num_channels
        self.num_groups = effective_groups(num_channels, num_groups)
        self.solver = Solver(solver, num_iters, eps, threshold, corr)
        self.affine = affine
        self.weight = nn.Parameter(torch.ones(num_channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_channels)) if affine else None

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        """Whiten ``x``, (N, C, *spatial).

        Args:
            x: the input.
            relu: also apply ReLU, in the same passes over memory. The caller decides at each call, so that the ReLU
                stays with the caller when this layer is replaced.
        """
        if x.dim() < 2 or x.shape[1] != self.num_channels:
            raise ValueError(
                f"GroupWhitening2d expects input of shape (N, {self.num_channels}, *spatial), got {tuple(x.shape)}"
            )
        return group_whiten(x, self.num_groups, self.weight, self.bias, solver=self.solver, relu=relu)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # the authors' checkpoints hold the affine parameters as (1, C, 1, 1)
        for name in ("weight", "bias"):
            value = state_dict.get(prefix + name)
            if value is not None and value.dim() > 1 and value.shape[1] == value.numel() == self.num_channels:
                state_dict[prefix + name] = value.reshape(-1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.num_channels}, groups={self.num_groups}, {self.solver}, affine={self.affine}"
