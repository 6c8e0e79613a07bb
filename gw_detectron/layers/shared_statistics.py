"""Statistics that the samples of a batch share, for tiles of one image."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .group_whitening import GroupWhitening2d


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
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = functools.partial(_as_one_sample, layer.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward  # type: ignore[method-assign]


def _as_one_sample(forward: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if len(x) < 2 or x.dim() < 3:  # a single sample or (N, C) input: nothing to join
        return forward(x, *args, **kwargs)
    below = x.transpose(0, 1).flatten(1, 2)[None]  # (1, C, N H, W): the samples below each other
    y = forward(below, *args, **kwargs)
    return y[0].unflatten(1, (len(x), x.shape[2])).transpose(0, 1)
