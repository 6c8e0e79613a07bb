"""Random tensors in the layers: the paper's output, or an error of torch's kind."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gw_detectron.layers import BatchWhitening2d, GroupWhitening2d

from ..ops.oracle import Setting, group_whiten
from .examples import fuzz

DTYPES = st.sampled_from(
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
SHAPES = st.one_of(
    st.tuples(st.integers(0, 3), st.sampled_from([8, 8, 8, 12]), st.integers(0, 9), st.integers(0, 9)),
    st.lists(st.integers(0, 9), max_size=5).map(tuple),
)
FORMS = st.sampled_from(["plain", "transposed", "strided", "expanded", "channels_last", "nan", "meta", "grad", "huge"])
ERRORS = (ValueError, TypeError)


def tensor(shape: tuple[int, ...], dtype: torch.dtype, form: str, seed: int) -> torch.Tensor:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if form == "transposed" and x.dim() >= 2:
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif form == "strided":
        x = torch.stack([x, x], dim=-1)[..., 0]
    elif form == "expanded" and x.dim():
        x = x[:1].expand(x.shape[0], *x.shape[1:]) if len(x) else x
    elif form == "channels_last" and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    elif form == "nan" and x.is_floating_point() and x.numel():
        x.view(-1)[0] = torch.nan
    elif form == "meta":
        x = x.to("meta")
    elif form == "huge" and x.is_floating_point():
        x = x * 1e4
    return x


@given(shape=SHAPES, dtype=DTYPES, form=FORMS, seed=st.integers(0, 9), groups=st.sampled_from([1, 4, 8]))
@fuzz(50)
def test_group_whitening(shape, dtype, form, seed, groups):
    x, layer = tensor(shape, dtype, form, seed), GroupWhitening2d(8, groups)
    if form == "meta":
        layer.to("meta")
    if form == "grad" and x.is_floating_point():
        x.requires_grad_()
    try:
        y = layer(x)
    except ERRORS as error:
        assert len(shape) < 2 or shape[1] != 8 or not dtype.is_floating_point or len(shape) == 2, error
        return
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    if x.requires_grad:
        y.sum().backward()
        assert x.grad is not None and bool(x.grad.isfinite().all())
    if form in ("meta", "nan") or dtype not in (torch.float32, torch.float64) or not x.numel():
        return
    # a sample of one value per row has no direction: the oracle divides by rounding errors there
    assume(x.shape[2:].numel() * 8 // groups > groups)
    expected = group_whiten(x.detach().numpy(), Setting(groups=groups, eps=1e-5, solver="newton", iters=5))
    tolerance = 1e-3 if dtype is torch.float32 else 1e-9
    np.testing.assert_allclose(y.detach().numpy(), expected, atol=tolerance, rtol=tolerance)


@given(
    shape=SHAPES,
    dtype=DTYPES,
    form=FORMS,
    seed=st.integers(0, 9),
    solver=st.sampled_from(["newton", "zca", "cholesky", "standardize"]),
    training=st.booleans(),
)
@fuzz(30)
def test_batch_whitening(shape, dtype, form, seed, solver, training):
    x = tensor(shape, dtype, form, seed)
    layer = BatchWhitening2d(8, 4, solver=solver).train(training)
    if form == "meta":
        layer.to("meta")
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    try:
        y = layer(x)
    except ERRORS:
        return
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    if not training:
        for name, buffer in layer.named_buffers():
            assert form == "meta" or torch.equal(buffer, before[name])


ARGUMENTS = st.one_of(st.none(), st.booleans(), st.integers(-2, 70), st.floats(), st.text(max_size=3), st.just(10**30))


@pytest.mark.parametrize("layer", [GroupWhitening2d, BatchWhitening2d])
@given(
    channels=ARGUMENTS,
    options=st.dictionaries(st.sampled_from(["num_iters", "eps", "solver", "corr", "affine"]), ARGUMENTS, max_size=2),
)
@fuzz(15)
def test_arguments_of_the_layers(layer, channels, options):
    try:
        made = layer(channels, **options)
    except ERRORS:
        return
    assert isinstance(made.num_channels, int) and made.num_channels == channels
