"""Statistics of a whole image for norms that see it in tiles."""

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.group_whitening.reference import apply_affine
from ..ops.mixed_statistics import mixed_inverse_sqrt, mixed_inverse_std
from ..ops.numerics import autocast_off, compute_dtype, memory_format_of
from .group_whitening import GroupWhitening2d
from .mixed_norms import MixedBatchNorm2d, MixedNorm, MixedWhitening2d
from .moments import Moments, add_moments

_CLASSES = (
    GroupWhitening2d,
    MixedWhitening2d,
    MixedBatchNorm2d,
    nn.GroupNorm,
    nn.InstanceNorm2d,
)
_FORWARDS = tuple(cls.forward for cls in _CLASSES)


class ImageStatistics:
    r"""Mean and covariance that the norms of a network have on an image, gathered from its parts.

    A per-sample norm gives a tile another mean and whitening matrix than the whole image. Moments
    add up, so the parts give those of the image, for GW, MixGW, MixBN, ``nn.GroupNorm`` and
    ``nn.InstanceNorm2d``; other norms, and subclasses with a forward of their own, do not change.

    .. code-block:: python

        statistics = ImageStatistics(model.backbone.modules())
        for batch in batches_of_parts:  # which do not overlap, in random order
            with statistics.gather():
                model.backbone(batch)
        with statistics.apply():
            outputs = model(tiles)

    While gathering, each batch is normalized by the moments of all batches so far, its own included.
    So the input of a layer always fits its statistics. If all parts are one batch, the statistics are
    those of the whole image, up to the zeros that convolutions see at the edges of parts. (Passes
    that normalize by the moments of an earlier pass diverge: each layer multiplies the mismatch of
    the one before it.)

    Args:
        modules: those whose samples are images; leave out region heads. Each context takes one
            forward pass, without gradients, in one thread. A layer that is called several times in
            it has statistics for each call.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.layers: list[Any] = [
            module for module in modules if _is_per_sample_norm(module)
        ]
        self._moments: dict[tuple[int, int], Moments] = {}  # of a layer's call
        self._matrices: dict[tuple[int, int], Tensor] = {}

    def gather(self) -> AbstractContextManager[None]:
        """Add the batch of this context to the statistics, and normalize by them."""
        self._matrices.clear()
        return self._replaced(gather=True)

    def apply(self) -> AbstractContextManager[None]:
        """Normalize by the gathered statistics."""
        return self._replaced(gather=False)

    @contextmanager
    def _replaced(self, gather: bool) -> Iterator[None]:
        calls = [0] * len(self.layers)
        for index, layer in enumerate(self.layers):
            layer.forward = functools.partial(self._forward, index, calls, gather)
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward

    @torch.no_grad()
    def _forward(
        self, index: int, calls: list[int], gather: bool, x: Tensor, relu: bool = False
    ) -> Tensor:
        layer = self.layers[index]
        key = index, calls[index]
        calls[index] += 1

        with autocast_off(x.device.type):
            is_mixed = isinstance(layer, MixedNorm)
            features = (
                layer.fixed_norm.normalize(x) if is_mixed else x.to(compute_dtype(x))
            )
            tiles = features.transpose(0, 1)
            # norms by channel have a group for each
            groups = getattr(layer, "num_groups", x.shape[1])
            rows = tiles.reshape(groups, -1)  # (g, M) of all tiles
            if gather:
                batch = Moments.of(rows, full=_has_covariance(layer))
                add_moments(self._moments, key, batch)
            if key not in self._matrices:
                self._matrices[key] = _whitening(layer, self._moments[key]).to(rows)

            mean = self._moments[key].mean
            if is_mixed:
                mean = layer.mean * mean
            centered = rows - mean.to(rows)[:, None]
            matrix = self._matrices[key]
            normalized = (
                matrix @ centered if matrix.dim() == 2 else matrix[:, None] * centered
            )

            y = normalized.reshape(tiles.shape).transpose(0, 1)
            y = apply_affine(y, layer.weight, layer.bias, relu)
        return y.to(x.dtype).contiguous(memory_format=memory_format_of(x))


def _is_per_sample_norm(module: nn.Module) -> bool:
    if not isinstance(module, _CLASSES):
        return False
    # any other forward may do more, e.g. activate
    if getattr(module.forward, "__func__", None) not in _FORWARDS:
        return False
    return not getattr(module, "track_running_stats", False)


def _has_covariance(layer: nn.Module) -> bool:
    if isinstance(layer, MixedWhitening2d):
        return layer.alpha > 0
    return isinstance(layer, GroupWhitening2d)


def _whitening(layer: Any, moments: Moments) -> Tensor:
    """Return the whitening matrix (g, g) of GW and MixGW, or the diagonal (g,) of other norms."""
    sigma = moments.scatter / moments.count
    if isinstance(layer, GroupWhitening2d):
        return layer.solver(sigma)
    if isinstance(layer, MixedWhitening2d):
        return mixed_inverse_sqrt(moments.mean, sigma, layer.mixture, layer.num_iters)
    if isinstance(layer, MixedBatchNorm2d):
        return mixed_inverse_std(moments.mean, sigma, layer.mixture)
    return (sigma + layer.eps).rsqrt()
