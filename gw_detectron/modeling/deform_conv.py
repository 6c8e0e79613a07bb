"""Detectron2's deformable convolutions by torchvision's operator."""

from detectron2.layers import DeformConv, ModulatedDeformConv
from torch import Tensor, nn
from torchvision.ops import deform_conv2d


class _TorchvisionOperator(nn.Module):
    """Mixin for a deformable convolution: torchvision's operator."""

    weight: Tensor
    bias: Tensor | None = None  # DeformConv has none
    norm: nn.Module | None
    activation: nn.Module | None

    def forward(self, x: Tensor, offset: Tensor, mask: Tensor | None = None) -> Tensor:
        x = deform_conv2d(x, offset, self.weight, self.bias, self.stride, self.padding, self.dilation, mask)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.activation is None else self.activation(x)


class TorchvisionDeformConv(_TorchvisionOperator, DeformConv):
    """Deformable convolution with norm and activation.

    Source: Deformable Convolutional Networks, equation 2.
    """


class TorchvisionModulatedDeformConv(_TorchvisionOperator, ModulatedDeformConv):
    """Modulated deformable convolution with norm and activation.

    Source: Deformable ConvNets v2, equation 1.
    """


def use_torchvision_operator(conv: DeformConv | ModulatedDeformConv) -> None:
    """Change a deformable convolution to torchvision's operator, in place.

    Detectron2's operator needs its compiled extension and trains on GPUs only.
    """
    # as in conv_norm_relu: another convolution would draw other random numbers for all later layers
    conv.__class__ = TorchvisionModulatedDeformConv if isinstance(conv, ModulatedDeformConv) else TorchvisionDeformConv
