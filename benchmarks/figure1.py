"""Group Whitening as printed in the paper: plain autograd, no fused operations."""

import torch
from torch import Tensor, nn


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
        p = torch.eye(self.num_groups, dtype=x.dtype, device=x.device).expand(sigma.shape)
        inverse_trace = torch.addcmul(zeros, sigma, p).sum((1, 2), keepdim=True).reciprocal()
        sigma_n = torch.addcmul(zeros, sigma, inverse_trace)
        for _ in range(self.num_iters):
            p = torch.baddbmm(p, torch.matrix_power(p, 3), sigma_n, beta=1.5, alpha=-0.5)
        whitening = torch.addcmul(zeros, p, inverse_trace.sqrt())
        return whitening.matmul(x_c).view_as(x) * self.weight + self.bias
