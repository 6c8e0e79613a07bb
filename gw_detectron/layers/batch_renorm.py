"""Batch Renormalization as a module."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.arguments import check_integer, check_number


class BatchRenorm2d(nn.BatchNorm2d):
    r"""Batch Renormalization layer: BN whose training output approaches its evaluation output.

    .. math:: y = \gamma \Big( \frac{x - \mu_B}{\sigma_B} r + d \Big) + \beta, \quad
        r = \mathrm{clip}_{[1/r_{max}, r_{max}]} \frac{\sigma_B}{\sigma}, \quad
        d = \mathrm{clip}_{[-d_{max}, d_{max}]} \frac{\mu_B - \mu}{\sigma}

    :math:`\mu_B, \sigma_B` are the batch's; :math:`\mu, \sigma` are the running statistics before this
    batch. Gradients do not pass through r and d. Evaluation is BN.

    r_max and d_max start at 1 and 0, which is BN, stay there for ``warmup`` batches, and grow
    linearly to ``rmax`` at batch ``rmax_at`` and to ``dmax`` at batch ``dmax_at``. Batches are counted
    by ``num_batches_tracked``, which checkpoints contain.

    Parameters, buffers and running statistics are BN's: the variance is averaged, where the paper averages
    :math:`\sigma`. ``freeze()`` of Detectron2 makes FrozenBN of the layer, and
    ``nn.SyncBatchNorm.convert_sync_batchnorm`` makes SyncBN of it, without r and d.

    Args:
        num_features: C, the size of dimension 1 of the input.
        momentum: weight of a new batch in the running averages. The paper has 0.01.
        rmax, dmax: largest r, at least 1, and largest absolute d.
        warmup: number of first batches that are BN, less than ``rmax_at`` and ``dmax_at``.
        device, dtype: of parameters and buffers, as in torch's own layers.

    Shape:
        Input (N, C, H, W). Output: the same.

    Source: Batch Renormalization (arXiv 1702.03275), Algorithm 1; the schedule of its experiments.
    """

    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    #: None is a cumulative average, which torch.optim.swa_utils.update_bn sets
    momentum: float | None

    def __init__(
        self,
        num_features: int,
        momentum: float = 0.01,
        rmax: float = 3.0,
        dmax: float = 5.0,
        warmup: int = 5000,
        rmax_at: int = 40000,
        dmax_at: int = 25000,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_integer("num_features", num_features, least=1, example=64)
        check_number("momentum", momentum, least=0, most=1, example=0.01)
        check_number("rmax", rmax, least=1, example=3)
        check_number("dmax", dmax, least=0, example=5)
        check_integer("warmup", warmup, least=0, example=5000)
        check_integer("rmax_at", rmax_at, least=warmup + 1, example=warmup + 35000)
        check_integer("dmax_at", dmax_at, least=warmup + 1, example=warmup + 20000)

        super().__init__(num_features, momentum=momentum, device=device, dtype=dtype)
        self.rmax = rmax
        self.dmax = dmax
        self.warmup = warmup
        self.rmax_at = rmax_at
        self.dmax_at = dmax_at

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``, and update the running statistics in training mode."""
        if not self.training or x.numel() == 0:  # an empty batch has no statistics
            return super().forward(x)

        self._check_input_dim(x)
        r, d = self._corrections(x)

        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1 / self.num_batches_tracked.item()

        # BN's kernels, and their gradient, with gamma r and gamma d + beta for scale and shift
        return F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            weight=self.weight * r,
            bias=torch.addcmul(self.bias, self.weight, d),
            training=True,
            momentum=momentum,
            eps=self.eps,
        )

    @torch.no_grad()
    def _corrections(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return r and d, each (C,)."""
        x = x.to(self.running_var.dtype)
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        deviation = (self.running_var + self.eps).sqrt()

        r = (variance + self.eps).sqrt() / deviation
        r_max = 1 + (self.rmax - 1) * self._progress(self.rmax_at)
        r = r.clamp(1 / r_max, r_max)

        d = (mean - self.running_mean) / deviation
        d_max = self.dmax * self._progress(self.dmax_at)
        d = d.clamp(-d_max, d_max)
        return r, d

    def _progress(self, end: int) -> Tensor:
        """Return 0 up to ``warmup`` and 1 from ``end`` on.

        It is a tensor, as reading the counter waits for the GPU.
        """
        batches = self.num_batches_tracked - self.warmup
        progress = batches / (end - self.warmup)
        return progress.clamp(0, 1)

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, momentum={self.momentum}, "
            f"rmax={self.rmax:g}, dmax={self.dmax:g}, "
            f"warmup={self.warmup}, rmax_at={self.rmax_at}, dmax_at={self.dmax_at}"
        )
