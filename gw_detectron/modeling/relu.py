"""The ReLU behind a convolution's norm."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..layers import GroupWhitening2d


def append_relu(conv: Any, relu: Callable[[Tensor], Tensor] = F.relu_) -> None:
    """Makes a Detectron2 convolution end in a ReLU: its norm's own if that is group whitening, else ``relu``.

    Args:
        conv: ``Conv2d`` of ``detectron2.layers``, with the attributes ``norm`` and ``activation``.
        relu: the ReLU behind other norms.
    """
    fused = isinstance(conv.norm, GroupWhitening2d)
    if fused:
        conv.norm.relu = True
    conv.activation = None if fused else relu
