"""Norms that start as BN's fixed statistics and mix in those of each image."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.arguments import check_integer, check_number, check_tensors
from ..ops.group_whitening.reference import effective_groups
from ..ops.mixed_matmul import mix_whiten
from ..ops.mixed_statistics import FixedNorm, Mixture, mix_standardize


class MixedNorm(nn.Module):
    """Base of both layers: BN's parameters and statistics, which stay fixed."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        num_channels: int,
        alpha: float = 0.5,
        mean: float | None = None,
        eps: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_integer("num_channels", num_channels, least=1, example=64)
        check_number("alpha", alpha, least=0, most=1, example=0.5)
        check_number("eps", eps, least=0, example=1e-5)
        if mean is None:
            mean = alpha
        check_number("mean", mean, least=0, most=1, example=0.5)

        self.num_channels = num_channels
        self.alpha = alpha
        self.mean = mean
        self.eps = eps
        zeros = torch.zeros(num_channels, device=device, dtype=dtype)
        self.weight = nn.Parameter(torch.ones_like(zeros))
        self.bias = nn.Parameter(zeros.clone())
        self.register_buffer("running_mean", zeros)
        self.register_buffer("running_var", torch.ones_like(zeros))

    def reset_parameters(self) -> None:
        """Set scale, shift and statistics to a new BN layer's."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.running_mean)
        nn.init.ones_(self.running_var)

    @property
    def mixture(self) -> Mixture:
        """a and b, which a schedule may change between iterations."""
        return Mixture(self.alpha, self.mean)

    @property
    def fixed_norm(self) -> FixedNorm:
        """BN in evaluation, which the layer is at alpha = mean = 0."""
        return FixedNorm(
            self.weight, self.bias, self.running_mean, self.running_var, self.eps
        )

    @property
    def is_untrained(self) -> bool:
        """Whether mean and variance are 0 and 1 everywhere.

        A new BN has these, and one that was multiplied into its scale, as in Caffe2's weights.
        """
        if self.running_mean.is_meta:
            return False
        # Detectron2 stores 1 - eps
        distance = (self.running_var - 1).abs().max()
        return bool(distance <= 1e-4 and not self.running_mean.any())

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        state_dict.pop(f"{prefix}num_batches_tracked", None)  # of a BN layer
        key = f"{prefix}running_var"
        variance = state_dict.get(key)
        if isinstance(variance, Tensor):
            try:
                check_variance(variance, self.eps, key)
            except ValueError as error:
                error_msgs.append(str(error))

        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )

    def extra_repr(self) -> str:
        return (
            f"{self.num_channels}, alpha={self.alpha:g}, mean={self.mean:g}, "
            f"eps={self.eps:g}"
        )


def check_variance(variance: Tensor, eps: float, where: str) -> None:
    """Raise ValueError for a running variance that cannot be one; warn of channels that never changed."""
    if variance.is_meta:
        return
    if not (variance.isfinite() & (variance >= 0)).all():
        raise ValueError(f"{where}: negative, NaN or infinite values.")

    num_constant = int((variance == 0).sum())
    if num_constant and not eps:
        raise ValueError(f"{where}: 0 in {num_constant} channels, and eps is 0.")
    if num_constant:
        warnings.warn(
            f"{where}: 0 in {num_constant} channels, which were constant when BN was trained.",
            stacklevel=1,
        )


class MixedWhitening2d(MixedNorm):
    r"""Whitening layer for weights that were trained with BN (MixGW).

    .. math::
        y = \gamma \, S^{-1/2} (U - b \mu) + \beta, \quad
        S = (1 - a) I + a \Sigma + b (1 - b) \mu \mu^T, \quad
        U = \frac{x - m}{\sqrt{v + \epsilon}}

    m and v are BN's running statistics, which stay fixed; :math:`\mu` and :math:`\Sigma` are mean and
    covariance of U over each channel group of each sample. a = b = 0 is FrozenBN with trainable scale
    and shift; a = b = 1 is Group Whitening of U.
    See :mod:`gw_detectron.ops.mixed_statistics` for shapes and solver.

    Parameters and buffers are BN's, so that weights trained with BN load without conversion. Training and
    evaluation compute the same function.

    .. code-block:: python

        model = torchvision.models.resnet50(weights="DEFAULT")
        gw_detectron.convert_norms(model, {"S1-B2": "MixGW:alpha=0.5"})

    Args:
        num_channels: C, the size of dimension 1 of the input.
        alpha: a, the share of the sample's covariance, from 0 to 1.
        mean: b, the share of the sample's mean; ``alpha`` if None. With ``alpha=0`` no iteration runs.
        num_groups: g, capped at C.
        num_iters: steps of the solver,
            :func:`~gw_detectron.ops.mixed_statistics.bounded_inverse_sqrt`.
        eps: BN's.
        device, dtype: of parameters and buffers, as in torch's own layers.

    ``alpha`` and ``mean`` are options and not learned: their gradients at 0 grow with the distance of an
    image from BN's data.

    Shape:
        Input (N, C, *spatial). Output: the same shape, dtype and memory format.

    Raises ValueError or TypeError for a wrong argument. Loading a variance that is negative or not
    finite is an error of ``load_state_dict``.
    """

    def __init__(
        self,
        num_channels: int,
        alpha: float = 0.5,
        mean: float | None = None,
        num_groups: int = 64,
        num_iters: int = 6,
        eps: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_channels, alpha, mean, eps, device=device, dtype=dtype)
        check_integer("num_iters", num_iters, least=0, example=6, most=1000)
        self.num_groups = effective_groups(num_channels, num_groups)
        self.num_iters = num_iters

    def forward(self, x: Tensor) -> Tensor:
        """Whiten ``x`` by the mixed statistics."""
        check_tensors(x, self.weight, self.bias, self.num_channels)
        return mix_whiten(
            x, self.fixed_norm, self.mixture, self.num_groups, self.num_iters
        )

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, groups={self.num_groups}, iters={self.num_iters}"
        )


class MixedBatchNorm2d(MixedNorm):
    r"""Like :class:`MixedWhitening2d`, but with each channel's variance instead of the covariance (MixBN).

    .. math::
        y = \gamma \frac{U - b \mu}{\sqrt{(1 - a) + a \sigma^2 + b (1 - b) \mu^2}} + \beta

    for mean :math:`\mu` and variance :math:`\sigma^2` of U over the positions of each channel. Arguments and
    shapes are the same, without ``num_groups`` and ``num_iters``.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` by the mixed statistics."""
        check_tensors(x, self.weight, self.bias, self.num_channels)
        return mix_standardize(x, self.fixed_norm, self.mixture)
