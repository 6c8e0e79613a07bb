"""The ReLU behind a convolution's norm."""

from typing import Any

from torch import nn

from ..layers import GroupWhitening2d


def append_relu(conv: Any) -> None:
    """Makes a Detectron2 convolution end in a ReLU: its norm's own if that is group whitening, else an ``nn.ReLU``.

    Whoever replaces group whitening by another norm in a model that is built already has to call this again.

    Args:
        conv: a convolution of ``detectron2.layers``, with a norm of its own. An ``nn.ReLU`` that it ends in already is
            left to other norms as it is; any other ``activation`` is replaced.
    """
    if isinstance(conv.norm, GroupWhitening2d):
        conv.norm.relu, conv.activation = True, None
    elif not isinstance(conv.activation, nn.ReLU):
        conv.activation = nn.ReLU(inplace=True)
