"""Private torch APIs: oneDNN products, and what happens in a torch without these names."""

import pytest
import torch

from gw_detectron.layers import GroupWhitening2d
from gw_detectron.ops import torch_private

needs_onednn = pytest.mark.skipif(
    not torch_private.onednn_available(), reason="not used on this processor, or torch has no oneDNN"
)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def error(value: torch.Tensor, a: torch.Tensor, b: torch.Tensor, plus: torch.Tensor | None = None) -> float:
    expected = a.double() @ b.double() + (0 if plus is None else plus.double())
    return ((value - expected).norm() / expected.norm()).item()


@needs_onednn
@pytest.mark.parametrize("columns", [1, 33, 2048, 4203])
def test_products_of_all_kinds(columns):
    """The shapes of whitening, covariance, and the gradient of the whitening matrix (dY is a slice)."""
    x, matrix, dy = random(64, columns), random(64, 64), random(64, 3 * columns)[:, columns : 2 * columns]
    for a, b in ((matrix, x), (x, x.mT), (dy, x.mT), (random(64, 128), random(128, columns))):
        plus = random(a.shape[0], b.shape[1])
        assert error(torch_private.onednn_matmul(a, b), a, b) < 1e-6
        assert error(torch_private.onednn_matmul(a, b, plus), a, b, plus) < 1e-6


@needs_onednn
def test_for_large_float32_on_a_cpu():
    like = random(2)
    assert torch_private.onednn_is_faster(like, 64, 5000)
    assert not torch_private.onednn_is_faster(like, 64, 64), "too small"
    assert not torch_private.onednn_is_faster(like, 16, 5000), "too flat"
    assert not torch_private.onednn_is_faster(like.double(), 64, 5000)
    assert not torch_private.onednn_is_faster(like.bfloat16(), 64, 5000)
    assert not torch_private.onednn_is_faster(like.to("meta"), 64, 5000)


@pytest.mark.parametrize("flag", [True, False])
def test_an_export_is_recognized_with_and_without_the_private_flag(flag, monkeypatch):
    if flag and not torch_private._EXPORTING_FLAG:
        pytest.skip("this torch has no torch.compiler._is_exporting_flag")
    monkeypatch.setattr(torch_private, "_EXPORTING_FLAG", flag)
    program = torch.export.export(GroupWhitening2d(8, 4), (random(2, 8, 3, 3),))
    assert not any("gw_detectron" in str(node.target) for node in program.graph.nodes)
