"""Large float32 products by oneDNN: right, taken where they are meant to be, and never needed."""

import pytest
import torch

from gw_detectron.layers import onednn

needs_onednn = pytest.mark.skipif(not onednn.available(), reason="this processor has no AVX-512, or torch no oneDNN")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def error(value: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    expected = a.double() @ b.double()
    return ((value - expected).norm() / expected.norm()).item()


@needs_onednn
@pytest.mark.parametrize("columns", [1, 33, 2048, 4203])
def test_products_of_all_kinds(columns):
    """Whitening, covariance, and the gradient of the whitening matrix, whose dY is a slice of a larger tensor."""
    x, matrix, dy = random(64, columns), random(64, 64), random(64, 3 * columns)[:, columns : 2 * columns]
    for a, b in ((matrix, x), (x, x.mT), (dy, x.mT), (random(64, 128), random(128, columns))):
        assert error(onednn.product(a, b), a, b) < 1e-6


@needs_onednn
def test_which_products_it_is_for(monkeypatch):
    x, matrix = random(2, 64, 2048), random(2, 64, 64)
    assert onednn.suits(matrix, x)
    assert onednn.suits(x, x.mT)
    assert not onednn.suits(matrix, matrix), "too small"
    assert not onednn.suits(random(2, 16, 16), x[:, :16]), "too flat"
    assert not onednn.suits(matrix.double(), x.double())
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not onednn.suits(matrix, x), "switched off by the user"


def test_no_other_processor_takes_it(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    onednn.available.cache_clear()
    try:
        assert not onednn.suits(random(2, 64, 64), random(2, 64, 2048))
    finally:
        onednn.available.cache_clear()
