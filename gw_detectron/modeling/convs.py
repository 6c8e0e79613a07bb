"""Convolutions of Detectron2 with other operators: a fused norm and ReLU, torchvision's deformable convolution.

Stock blocks and heads build stock convolutions. Building another one would draw random numbers and change the initial
values of all later layers, so these functions change the class of a built convolution, as
``torch.nn.utils.parametrize`` does.
"""

import torch.nn.functional as F
from detectron2.layers import Conv2d, DeformConv
from torch import Tensor, nn
from torchvision.ops import deform_conv2d


class ConvNormReLU(Conv2d):
    """Convolution, norm and ReLU, the last two fused if the norm can.

    The convolution keeps its ``norm`` and its ``activation``. Each call decides: if the activation is ``nn.ReLU`` or
    ``F.relu`` and the norm has ``fuses_relu = True`` (:class:`gw_detectron.layers.GroupWhitening2d`), it calls
    ``norm(x, relu=True)``, which saves passes over memory. Otherwise it is Detectron2's ``Conv2d``. So the network's
    function survives when either of them is replaced, frozen or converted.

    Hooks on the convolution and on the norm run. In a fused call the norm's output includes the ReLU, and hooks on the
    activation do not run.
    """

    def forward(self, x: Tensor) -> Tensor:
        norm_fuses = getattr(self.norm, "fuses_relu", False)
        if norm_fuses:
            # a forward of the instance may not take relu; torch.compile of torch 2.7 traces no vars()
            norm_fuses = "forward" not in self.norm.__dict__

        # a subclass of nn.ReLU may compute another function
        is_relu = type(self.activation) is nn.ReLU or self.activation is F.relu
        if not (norm_fuses and is_relu):
            return super().forward(x)

        x = F.conv2d(
            x,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )
        return self.norm(x, relu=True)


def append_fusible_relu(conv: Conv2d) -> None:
    """Turn a convolution into a :class:`ConvNormReLU` in place, with an ``nn.ReLU`` if it has no activation."""
    conv.__class__ = ConvNormReLU
    if conv.activation is None:
        conv.activation = nn.ReLU(inplace=True)


class TorchvisionDeformConv(DeformConv):
    """Deformable convolution by torchvision's operator, in version 2 with a mask; with norm and activation.

    Detectron2's operator needs its compiled extension and trains on GPUs only. Sources: Deformable Convolutional
    Networks, equation 2; Deformable ConvNets v2, equation 1.
    """

    bias: Tensor | None = None  # stock blocks have none

    def forward(self, x: Tensor, offset: Tensor, mask: Tensor | None = None) -> Tensor:
        x = deform_conv2d(
            x,
            offset,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            mask,
        )
        if self.norm is not None:
            x = self.norm(x)
        return x if self.activation is None else self.activation(x)
