"""Norms of timm that contain their activation, which takes the place of a fused ReLU."""

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..ops.checks import check_integer, check_number, compute_dtype

try:
    from timm.layers.evo_norm import EvoNorm2dS0
    from timm.layers.filter_response_norm import FilterResponseNormTlu2d, inv_instance_rms
except ImportError as error:
    raise ConfigError(f"timm cannot be imported ({error}). Fix: pip install timm.") from error


class _WithActivation(nn.Module):
    """Mixin for a layer of timm: its activation only where the caller fuses a ReLU.

    Statistics are computed in float32.

    Attributes:
        fuses_relu: True: ``forward`` accepts ``relu=True``, see :class:`gw_detectron.layers.GroupWhitening2d`.
        norm_name: see :mod:`.names`.
        needs_relu: whether it normalizes only with ``relu=True``.
    """

    fuses_relu = True
    needs_relu = False
    norm_name: str
    weight: Tensor
    bias: Tensor
    eps: float

    def __init__(self, num_channels: int, eps: float, **arguments: int) -> None:
        check_integer("num_channels", num_channels, 1, 64)
        check_number("eps", eps, 0, float("inf"), 1e-5)
        super().__init__(num_channels, eps=eps, **arguments)
        self.num_channels = num_channels

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        """Normalize ``x``.

        Args:
            x: floating point, (N, C, H, W).
            relu: also apply the layer's activation, in place of the caller's ReLU.

        Returns:
            y in the shape and dtype of ``x``.

        Raises:
            ValueError: ``x`` has another shape.
        """
        if x.dim() != 4 or x.shape[1] != self.num_channels:
            raise ValueError(
                f"{self.norm_name}: expected input of shape (N, {self.num_channels}, H, W), got {tuple(x.shape)}. "
                "Fix: give it feature maps with as many channels as the layer has."
            )
        values = x.to(compute_dtype(x))
        if relu:
            return super().forward(values).to(x.dtype)
        # the activation's parameter gets a gradient of zero, since DistributedDataParallel waits for each
        shift = self.bias + 0 * self.activation_parameter
        y = torch.addcmul(shift[:, None, None], self.normalize(values), self.weight[:, None, None])
        return y.to(x.dtype)

    def normalize(self, x: Tensor) -> Tensor:
        """Normalize without scale, shift and activation."""
        raise NotImplementedError

    @property
    def activation_parameter(self) -> Tensor:
        """The learnable parameter of the activation, (C,)."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.num_channels}, eps={self.eps:g}"


class FilterResponseNorm2d(_WithActivation, FilterResponseNormTlu2d):
    r"""Filter Response Normalization layer, with a thresholded linear unit (TLU) as its activation.

    .. math:: y = \gamma \, \frac{x}{\sqrt{\nu^2 + \epsilon}} + \beta, \quad z = \max(y, \tau)

    :math:`\nu^2` is the mean of x^2 over the pixels of a channel of a sample. z is the output where a ReLU is fused,
    y elsewhere. With a learnable :math:`\epsilon` the paper also serves feature maps of one pixel; this layer has none.

    Args:
        num_channels: C.
        eps: added to the mean square; the paper has 1e-6.

    Raises:
        ValueError, TypeError: an argument out of its range or of the wrong type.

    Source: Filter Response Normalization Layer (arXiv 1911.09737), section 3.
    """

    norm_name = "FRN"
    tau: Tensor

    def __init__(self, num_channels: int, eps: float = 1e-6) -> None:
        super().__init__(num_channels, eps)

    def normalize(self, x: Tensor) -> Tensor:
        return x * inv_instance_rms(x, self.eps)

    @property
    def activation_parameter(self) -> Tensor:
        return self.tau


class EvoNormS0(_WithActivation, EvoNorm2dS0):
    r"""EvoNorm-S0 layer: normalization and activation in one.

    .. math:: y = \gamma \, \frac{x \, \mathrm{sigmoid}(v x)}{\sqrt{s^2 + \epsilon}} + \beta

    :math:`s^2` is the variance of a group of channels of a sample. Where no ReLU is fused the layer is scale and shift
    alone, :math:`\gamma x + \beta`, as in timm.

    Args:
        num_channels: C.
        num_groups: groups of channels.
        eps: added to the variance.

    Raises:
        ValueError, TypeError: an argument out of its range or of the wrong type, or groups that do not divide C.

    Source: Evolving Normalization-Activation Layers (arXiv 2004.02967).
    """

    norm_name = "EvoNormS0"
    needs_relu = True  # to normalize
    v: Tensor

    def __init__(self, num_channels: int, num_groups: int = 32, eps: float = 1e-5) -> None:
        check_integer("num_groups", num_groups, 1, 32)
        super().__init__(num_channels, eps, groups=num_groups)
        self.num_groups = num_groups
        if num_channels % num_groups:
            raise ValueError(f"num_groups ({num_groups}): does not divide {num_channels} channels. Fix: use a divisor.")

    def normalize(self, x: Tensor) -> Tensor:
        return x

    @property
    def activation_parameter(self) -> Tensor:
        return self.v

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, groups={self.num_groups}"


LAYERS: dict[str, type[nn.Module]] = {layer.norm_name: layer for layer in (FilterResponseNorm2d, EvoNormS0)}
