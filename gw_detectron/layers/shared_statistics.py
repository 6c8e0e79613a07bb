"""Statistics of a whole image for norms that see it in tiles."""

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..ops.checks import autocast_off, compute_dtype, memory_format_of
from ..ops.group_whitening.reference import apply_affine
from .group_whitening import GroupWhitening2d

_PerSampleNorm = GroupWhitening2d | nn.GroupNorm | nn.InstanceNorm2d
_FORWARDS = (GroupWhitening2d.forward, nn.GroupNorm.forward, nn.InstanceNorm2d.forward)


class ImageStatistics:
    r"""Mean and covariance that the norms of a network have on an image, gathered from its parts.

    A per-sample norm gives a tile another mean and whitening matrix than the whole image. Moments add up, so the
    parts give those of the image, for GW, ``nn.GroupNorm`` and ``nn.InstanceNorm2d``; other norms, and subclasses with
    a forward of their own, do not change.

    .. code-block:: python

        statistics = ImageStatistics(model.backbone.modules())
        for batch in batches_of_parts:  # which do not overlap, in random order
            with statistics.gather():
                model.backbone(batch)
        with statistics.apply():
            outputs = model(tiles)

    While gathering, each batch is normalized by the moments of all batches so far, its own included. So the input of a
    layer always fits its statistics. If all parts are one batch, the statistics are those of the whole image, up to the
    zeros that convolutions see at the edges of parts. (Passes that normalize by the moments of an earlier pass diverge:
    each layer multiplies the mismatch of the one before it.)

    Args:
        modules: those whose samples are images; leave out region heads. Each context takes one forward pass, without
            gradients, in one thread. A layer that is called several times in it has statistics for each call.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.layers: list[_PerSampleNorm] = [
            module
            for module in modules
            if isinstance(module, _PerSampleNorm)
            and getattr(module.forward, "__func__", None)
            in _FORWARDS  # any other one may do more, e.g. activate
            and not getattr(module, "track_running_stats", False)
        ]
        self._moments: dict[tuple[int, int], _Moments] = {}  # of a layer's call
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
            layer.forward = functools.partial(self._forward, index, calls, gather)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward

    @torch.no_grad()
    def _forward(
        self, index: int, calls: list[int], gather: bool, x: Tensor, relu: bool = False
    ) -> Tensor:
        layer, key = self.layers[index], (index, calls[index])
        calls[index] += 1
        groups = (
            layer.num_features if isinstance(layer, nn.InstanceNorm2d) else layer.num_groups
        )
        with autocast_off(x.device.type):
            rows = (
                x.to(compute_dtype(x)).transpose(0, 1).reshape(groups, -1)
            )  # (g, M) of all tiles
            if gather:
                found = _Moments.of(rows, full=isinstance(layer, GroupWhitening2d))
                before = self._moments.get(key)
                self._moments[key] = found if before is None else before.merged(found)
            moments = self._moments[key]
            if gather or key not in self._matrices:
                sigma = moments.scatter / moments.count
                matrix = (
                    layer.solver(sigma)
                    if isinstance(layer, GroupWhitening2d)
                    else (sigma + layer.eps).rsqrt()
                )
                self._matrices[key] = matrix.to(rows)
            matrix, rows = self._matrices[key], rows - moments.mean.to(rows)[:, None]
            rows = matrix @ rows if matrix.dim() == 2 else matrix[:, None] * rows
            y = rows.reshape(x.shape[1], len(x), *x.shape[2:]).transpose(0, 1)
            y = apply_affine(y, layer.weight, layer.bias, relu)
        return y.to(x.dtype).contiguous(memory_format=memory_format_of(x))


@dataclass(frozen=True)
class _Moments:
    """Number of columns, mean (g,), and sum of squared deviations (g, g), or (g,) of its diagonal."""

    count: int
    mean: Tensor
    scatter: Tensor

    @staticmethod
    def of(rows: Tensor, full: bool) -> "_Moments":
        mean = rows.mean(1)
        centered = rows - mean[:, None]
        scatter = centered @ centered.mT if full else centered.square().sum(1)
        wide = torch.float32 if rows.is_mps else torch.float64  # MPS has no float64
        return _Moments(rows.shape[1], mean.to(wide), scatter.to(wide))

    def merged(self, other: "_Moments") -> "_Moments":
        """Return the moments of both (Chan, Golub and LeVeque, 1983)."""
        count = self.count + other.count
        shift = other.mean - self.mean
        spread = torch.outer(shift, shift) if self.scatter.dim() == 2 else shift.square()
        scatter = self.scatter + other.scatter + spread * (self.count * other.count / count)
        return _Moments(count, self.mean + shift * (other.count / count), scatter)
