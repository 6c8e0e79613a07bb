"""ImageStatistics: tiles are normalized by the mean and the whitening matrix of their image."""

import pytest
import timm
import torch
from torch import nn

from gw_detectron.layers import (
    BatchRenorm2d,
    GroupWhitening2d,
    ImageStatistics,
    MixedBatchNorm2d,
    MixedWhitening2d,
)

from ..ops.cases import assert_close


def tiles_of(image, rows, columns):
    """Cut (1, C, H, W) into (rows * columns, C, H / rows, W / columns)."""
    _, c, h, w = image.shape
    cut = image.reshape(c, rows, h // rows, columns, w // columns)
    return cut.permute(1, 3, 0, 2, 4).reshape(
        rows * columns, c, h // rows, w // columns
    )


LAYERS = {
    "GW": lambda: GroupWhitening2d(16, 8),
    "GW_zca": lambda: GroupWhitening2d(16, 4, solver="zca"),
    "GW_corr": lambda: GroupWhitening2d(16, 4, solver="zca", corr=True, affine=False),
    "MixGW": lambda: MixedWhitening2d(16, 0.5, 0.8, num_groups=4),
    "MixGW_mean": lambda: MixedWhitening2d(16, 0.0, 0.8, num_groups=4),
    "MixBN": lambda: MixedBatchNorm2d(16, 0.5, 0.8),
    "GN": lambda: nn.GroupNorm(4, 16),
    "IN": lambda: nn.InstanceNorm2d(16, affine=True),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last]
)
def test_tiles_are_normalized_as_their_image(make, memory_format):
    torch.manual_seed(0)
    layer = make().double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    image = torch.randn(1, 16, 12, 20, dtype=torch.float64) * 3 + 100
    image[..., 10:] *= 5  # tiles of different statistics
    tiles = tiles_of(image, 2, 2).to(memory_format=memory_format)
    expected = tiles_of(layer(image), 2, 2).detach()
    alone = layer(tiles)
    assert (alone - expected).norm() > 0.05 * expected.norm()

    together = ImageStatistics([layer])
    with together.gather():
        gathered = layer(tiles)
    apart = ImageStatistics([layer])
    for tile in tiles:  # in batches, the moments add up
        with apart.gather():
            layer(tile[None])

    assert_close(gathered, expected, 1e-8)
    for statistics in (together, apart):
        with statistics.apply():
            y = layer(tiles[1:])
        assert_close(y, expected[1:], 1e-8)
        assert y.is_contiguous(memory_format=memory_format)
    assert torch.equal(layer(tiles), alone)  # afterwards as before


def test_a_shared_layer_has_statistics_for_each_call():
    torch.manual_seed(0)
    layer = GroupWhitening2d(8, 4)  # as in the heads of dense detectors, for all levels
    levels = [torch.randn(2, 8, side, side) * side for side in (16, 8)]
    statistics = ImageStatistics([layer])

    with statistics.gather():
        gathered = [layer(level, relu=True) for level in levels]
    with statistics.apply():
        applied = [layer(level, relu=True) for level in levels]

    torch.testing.assert_close(applied, gathered)
    for y in applied:
        assert y.min() == 0
        assert 0.1 < y.std() < 1


def test_half_precision_under_autocast():
    torch.manual_seed(0)
    layer = GroupWhitening2d(8, 4)
    x = torch.randn(3, 8, 9, 9)
    with ImageStatistics([layer]).gather():
        expected = layer(x)

    with torch.autocast("cpu", torch.bfloat16), ImageStatistics([layer]).gather():
        y = layer(x.bfloat16())

    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)


def test_other_norms_are_left_alone():
    others = (
        nn.BatchNorm2d(4),
        BatchRenorm2d(4),
        nn.InstanceNorm2d(4, track_running_stats=True),
        nn.Conv2d(3, 3, 3),
        timm.layers.GroupNormAct(4, 2),  # has an activation
    )
    renamed = type("Renamed", (nn.GroupNorm,), {})(2, 4)

    assert ImageStatistics((*others, renamed)).layers == [renamed]


def test_errors_restore_the_layers():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), GroupWhitening2d(8, 4), nn.GroupNorm(2, 8)
    )
    x = torch.randn(2, 3, 9, 9)
    before = model(x)

    with (
        pytest.raises(RuntimeError, match="stop"),
        ImageStatistics(model.modules()).gather(),
    ):
        assert not torch.allclose(model(x), before)
        raise RuntimeError("stop")

    assert torch.equal(model(x), before)
