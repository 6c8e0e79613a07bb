"""Convolution, norm and ReLU, fused where the norm can."""

import torch.nn.functional as F
from detectron2.layers import Conv2d
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]


class ConvNormReLU(Conv2d):
    """Convolution, norm and ReLU, the last two fused if the norm can.

    The convolution keeps its ``norm`` and its ``activation``. Each call decides: if the activation is ``nn.ReLU`` or
    ``F.relu`` and the norm has ``fuses_relu = True`` (:class:`gw_detectron.layers.GroupWhitening2d`), it calls
    ``norm(x, relu=True)``, which saves passes over memory. Otherwise it is Detectron2's ``Conv2d``. So the network's
    function survives when either of them is replaced, frozen or converted.

    Hooks on the convolution and on the norm run. In a fused call the norm's output includes the ReLU, and hooks on the
    activation do not run.

    Attributes:
        fuses_norm: True, for code that must know whether a norm is called with ``relu=True``.
    """

    fuses_norm = True

    def forward(self, x: Tensor) -> Tensor:
        if is_scripting():  # TorchScript cannot compile super()
            x = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
            if self.norm is not None:
                x = self.norm(x)
            if self.activation is not None:
                x = self.activation(x)
            return x
        # a subclass of nn.ReLU may compute another function, a forward of the instance may not take relu
        fuses = getattr(self.norm, "fuses_relu", False) and "forward" not in self.norm.__dict__
        if fuses and (type(self.activation) is nn.ReLU or self.activation is F.relu):
            x = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
            return self.norm(x, relu=True)
        return super().forward(x)


def append_fusible_relu(conv: Conv2d) -> None:
    """Turn a convolution into a :class:`ConvNormReLU`, in place.

    Args:
        conv: a convolution of Detectron2. It keeps its activation; if it has none, it gets an ``nn.ReLU``.
    """
    # Stock blocks and heads build stock convolutions. Building another one would draw random numbers and change the
    # initial values of all later layers, so change the class, as torch.nn.utils.parametrize does.
    conv.__class__ = ConvNormReLU
    if conv.activation is None:
        conv.activation = nn.ReLU(inplace=True)
