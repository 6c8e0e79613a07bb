"""Statistics that the samples of a batch share, for tiles of one image."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .group_whitening import GroupWhitening2d
from .mixin_swap import ClassChange, change_class, original_class


class JointStatistics(ClassChange):
    """Mixin for a per-sample norm: it sees the samples of a batch as one."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(x) < 2 or x.dim() < 3:  # one sample, or vectors, which are no tiles
            return super().forward(x, *args, **kwargs)
        below = x.transpose(0, 1).flatten(1, 2)[None]  # (1, C, N H, W): the samples below each other
        y = super().forward(below, *args, **kwargs)
        return y[0].unflatten(1, (len(x), x.shape[2])).transpose(0, 1)


@contextmanager
def joint_statistics(model: nn.Module) -> Iterator[None]:
    """Let the samples of a batch share their statistics, as tiles of one image.

    A per-sample norm gives a tile another mean and whitening matrix than the whole image. In this context
    :class:`GroupWhitening2d` and ``nn.GroupNorm`` compute one for all tiles of the batch. If the tiles cover the image
    once, it is that of the whole image, up to the zeros that convolutions see at the edges of tiles.

    .. code-block:: python

        with joint_statistics(model.backbone):
            outputs = model([{"image": tile} for tile in tiles])

    Args:
        model: the part of a detector that sees images. Leave out the region heads: their samples are regions.
            Use the context in one thread.

    Raises:
        ValueError: the model has none of these layers.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GroupWhitening2d | nn.GroupNorm)]
    if not layers:
        raise ValueError(
            f"model ({type(model).__name__}): no GroupWhitening2d or nn.GroupNorm. Fix: leave out joint_statistics, "
            "as other norms give a tile the statistics of the image."
        )
    changed = [layer for layer in layers if not isinstance(layer, JointStatistics)]
    for layer in changed:
        change_class(layer, JointStatistics)
    try:
        yield
    finally:
        for layer in changed:
            layer.__class__ = original_class(layer)
