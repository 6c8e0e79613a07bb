"""The matmul backend: accuracy, passes, half precision, threads, memory saved for backward."""

import pytest
import torch
from torch import nn

from benchmarks.layer_benchmark import SHAPES
from benchmarks.memory import saved_bytes
from gw_detectron.ops import torch_private
from gw_detectron.ops.group_whitening import matmul

from .cases import (
    assert_errors_below,
    assert_like_reference,
    error,
    gradients,
    layer,
    randn,
    reference,
)


@pytest.mark.parametrize(
    ("shape", "onednn"),
    [*((shape, True) for shape in SHAPES), ((3, 128, 50, 84), False)],
    ids=str,
)
def test_float32_is_within_2e_5_of_float64(shape, onednn, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", onednn)
    x = randn(*shape) * 2 + 1
    dy = randn(*shape, seed=1)
    assert_like_reference(layer(shape[1]), x, dy, 2e-5)


@pytest.mark.parametrize("num_iters", [5, matmul.MOST_ITERS, matmul.MOST_ITERS + 1, 20])
def test_a_large_mean_behind_the_variance_of_another_group(num_iters):
    x, dy = randn(2, 2, 64, 32, 32)
    x[:, 0] += 570  # 1.9 times the deviation of the next channel
    x[:, 1] *= 300
    assert_like_reference(layer(64, num_iters=num_iters), x, dy, 4e-5)


@pytest.mark.parametrize("deviations", [0, 0.5, 1.9, 2.1, 3, 100])
def test_means_on_both_sides_of_the_switch(deviations):
    """Means of up to two deviations stay in the products."""
    x, dy = randn(2, 4, 64, 30, 40)
    x += deviations * randn(64, 1, 1).sign()

    mean, sigma = matmul.statistics(x, 64)
    large = matmul.large_means(mean, sigma.diagonal(dim1=1, dim2=2))

    assert (large is not None) == (deviations > 2)
    assert_like_reference(layer(64), x, dy, 5e-6)


#: y and dx are rounded to the dtype (half a unit in the last place, about eps / 4 in the mean square);
#: the sums are not
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)]
)
@pytest.mark.parametrize("shape", [(2, 128, 20, 24), (40, 256, 7, 7)], ids=str)
def test_half_precision_input_costs_no_more_than_its_own_rounding(
    shape, dtype, tolerance
):
    x = (randn(*shape) * 2 + 1).to(dtype)
    dy = randn(*shape, seed=1).to(dtype)
    made = layer(shape[1])

    y, dx, *sums = gradients(made, x, dy)

    assert y.dtype == dx.dtype == dtype
    assert all(value.dtype == torch.float32 for value in sums)
    expected = reference(made, x, dy)
    assert_errors_below(tolerance, (y, dx), expected[:2])
    assert_errors_below(2e-5, sums, expected[2:])


def test_parameters_in_half_precision_are_converted_before_they_multiply():
    made = layer(64).half()
    nn.init.constant_(made.weight, 2)
    x, sign = randn(2, 2, 64, 9, 9).half()
    # which times the weight is beyond float16, unlike its gradient
    dy = sign.sign() * 4e4

    y, dx, *_ = gradients(made, 8 * x, dy)

    assert_errors_below(1e-3, (y, dx), reference(made, 8 * x, dy)[:2])


SMALL = ((5, 24, 6, 7), (2, 8, 31), (37, 16, 3, 3), (1, 32, 5))


@pytest.mark.parametrize("samples", [1, 2, 3, 100])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_however_many_samples_a_pass_has(shape, samples, monkeypatch):
    monkeypatch.setattr(matmul, "samples_per_pass", lambda x, groups: samples)
    x, dy = randn(2, *shape, dtype=torch.float64)
    assert_like_reference(layer(shape[1], 8).double(), x, dy, 1e-12)


@pytest.mark.skipif(
    not torch_private.onednn_available(), reason="oneDNN is not used on this processor"
)
@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kept", [1, 1000, 10**7])
def test_whatever_onednn_multiplies(kept, dtype, relu, monkeypatch):
    """The limits are lowered: by default oneDNN does not multiply matrices as small as these."""
    monkeypatch.setattr(matmul, "_LARGEST_KEPT", kept)
    monkeypatch.setattr(torch_private, "_SHORTEST", 1)
    monkeypatch.setattr(torch_private, "_LONGEST", 1)
    for shape in SMALL:
        x, dy = randn(2, *shape).to(dtype)
        made = layer(shape[1], 8)

        values = gradients(made, x, dy, relu=relu)

        for value, expected in zip(
            values, reference(made, x, dy, relu=relu), strict=True
        ):
            tolerance = 2e-5 if value.dtype == torch.float32 else 4e-3
            assert error(value, expected) < tolerance


def test_an_expanded_gradient_and_a_sliced_input():
    x = torch.randn(4, 40, 6, 7, dtype=torch.float64)[::2, 3:35, :, 1:]
    dy = torch.ones((), dtype=torch.float64).expand(x.shape)
    assert_like_reference(layer(32, 8).double(), x, dy, 1e-12)


@pytest.mark.parametrize(
    ("shape", "limit"),
    [((2, 64, 100, 168), 1.1), ((2, 512, 25, 42), 1.1), ((512, 256, 7, 7), 1.6)],
    ids=str,
)
def test_little_more_is_kept_for_backward_than_by_group_norm(shape, limit):
    x = torch.randn(shape, requires_grad=True)
    ours = layer(shape[1])
    group_norm = nn.GroupNorm(32, shape[1])

    saved = saved_bytes(lambda: ours(x), ours)

    assert 0 < saved <= limit * saved_bytes(lambda: group_norm(x), group_norm)
