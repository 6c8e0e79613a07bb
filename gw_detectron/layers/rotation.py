"""Learnable rotation of the channels of each group."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from ..ops.batch_whitening.channel_groups import effective_width


class GroupRotation(nn.Module):
    r"""Learnable orthogonal matrices, one per group of channels.

    .. math:: Q = (I + S) (I - S)^{-1}, \quad S = -S^T, \quad S = 0 \text{ initially}

    White channels stay white under a rotation, so a network may learn one. S is held by torch's orthogonal
    parametrization: a layer with a rotation can be copied and its state dict saved, but not pickled as a whole.

    Args:
        num_channels: C.
        channels_per_group: k, capped at C; the last group may be smaller.

    Raises:
        ValueError: an argument is not a positive integer.

    Source: On Batch Orthogonalization Layers, section VI-B and appendix C. Its Eq. 51 misplaces a bracket: the
        derivative, which torch computes here, is (I + W^T) dW (I - S)^{-T}.
    """

    whole: Tensor
    last: Tensor

    def __init__(self, num_channels: int, channels_per_group: int = 64) -> None:
        super().__init__()
        width = effective_width(num_channels, channels_per_group)
        groups, rest = divmod(num_channels, width)
        self._names = ["whole", "last"] if rest else ["whole"]
        for name, shape in zip(self._names, ((groups, width), (1, rest)), strict=False):
            self.register_parameter(name, nn.Parameter(torch.zeros(*shape, shape[1])))
            # use_trivialization would store a second matrix, the identity
            orthogonal(self, name, "cayley", use_trivialization=False)

    def reset_parameters(self) -> None:
        """Set the rotations to the identity."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GroupRotation":
        """Convert tensors, but keep float32 at least: torch solves no linear system in half precision."""
        super()._apply(fn, recurse)
        if any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in self.parameters()):
            super()._apply(lambda tensor: tensor.float(), recurse)
        return self

    def forward(self) -> list[Tensor]:
        """Return the rotations: (C // k, k, k), perhaps (1, r, r)."""
        return [getattr(self, name) for name in self._names]
