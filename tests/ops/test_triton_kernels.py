"""The Triton kernels against float64.

Triton chooses its interpreter when it is imported, so the checks run in subprocesses: they are functions named
``check_*``, which the tests at the end collect. By hand:

    TRITON_INTERPRET=1 pytest -o python_functions='check_*' tests/ops/test_triton_kernels.py

On a machine with a GPU the same command without the variable runs the compiled kernels. The last tests compile the
kernels without a GPU.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.compiled_kernels import (
    compile_launch,
    compiler_tool,
    kernel_name,
    layer_launches,
)
from gw_detectron.errors import MissingPackageError
from gw_detectron.layers import GroupWhitening2d, newton_inverse_sqrt
from gw_detectron.ops.group_whitening import triton as triton_kernels
from gw_detectron.ops.group_whitening.triton import newton as write_newton
from gw_detectron.ops.group_whitening.triton import plans, support, tiling
from gw_detectron.ops.group_whitening.triton.compiler import triton
from gw_detectron.ops.group_whitening.triton.gradients import (
    apply_backward,
    grad_products,
    matrix_gradients,
)
from gw_detectron.ops.group_whitening.triton.newton import in_registers, operands
from gw_detectron.ops.group_whitening.triton.whitening import apply
from gw_detectron.ops.group_whitening.triton.whitening import (
    statistics as write_statistics,
)

from . import oracle
from .cases import features, randn
from .conftest import ON_EVERY_BACKEND
from .oracle import Setting

TESTS = Path(__file__).parents[1]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

#: largest error as a fraction of the largest value. float16 and bfloat16 round operands and result
#: (the interpreter truncates bfloat16 instead); float32 has the rounding of sums of some hundred
#: terms, which tensor cores round toward zero.
TOLERANCE = {FP32: 3e-6 if INTERPRETED else 2e-5, FP16: 2e-3, BF16: 2e-2}

#: (shape, groups): one and many groups, padded rows, one and several channels in a group, odd sizes, a
#: single column, tiles that span channels, no to three spatial dimensions, matrices of several blocks
SHAPES = [
    ((2, 32, 13, 31), 16),
    ((2, 48, 5, 7), 16),
    ((2, 10, 9), 1),
    ((3, 6, 2, 3, 4), 3),
    ((2, 64, 1, 1), 64),
    ((2, 40), 8),
    ((2, 64, 6, 11), 64),
    ((1, 192, 3, 3), 96),
]
CHANNELS_LAST = [
    ((2, 32, 13, 31), 16),
    ((2, 48, 5, 7), 16),
    ((2, 64, 6, 11), 64),
    ((2, 24, 3, 5), 8),
]
DTYPES = [FP32, FP16, BF16]


@pytest.fixture(autouse=True)
def small_splits(monkeypatch, request):
    """Give programs few tiles, and launch few programs: small inputs are split and programs loop."""
    if not request.function.__name__.startswith("check_"):
        return
    for dtype, tuning in tiling.HOPPER.items():
        settings = [setting._replace(min_tiles=1) for setting in tuning[:4]]
        monkeypatch.setitem(tiling.HOPPER, dtype, tiling.Tuning(*settings))
    monkeypatch.setattr(support, "processors", lambda device: 1)


class Sample:
    """Arguments of the kernels, and the expected values in float64."""

    def __init__(
        self, shape, groups, dtype=FP32, channels_last=False, affine=True, relu=False
    ):
        self.groups = groups
        self.dtype = dtype
        n, channels = shape[:2]
        memory_format = (
            torch.channels_last if channels_last else torch.contiguous_format
        )
        self.x = (
            features(*shape, seed=1)
            .to(DEVICE, dtype)
            .contiguous(memory_format=memory_format)
        )
        self.dy = (
            features(*shape, seed=2)
            .to(DEVICE, dtype)
            .contiguous(memory_format=memory_format)
        )
        self.y = (self.x - self.x.float().mean()).relu().to(dtype) if relu else None
        self.weight = randn(channels).abs().add(0.5).to(DEVICE) if affine else None
        self.bias = randn(channels, seed=1).to(DEVICE) if affine else None

        self.x_g = self.grouped(self.x)
        self.dy_g = self.grouped(self.dy * (self.y > 0) if relu else self.dy)
        self.mean = self.x_g.mean((2, 3))
        self.x_c = self.x_g - self.mean[..., None, None]
        self.sigma = self.covariance(eps=1e-5)
        # those of the Newton iteration: symmetric
        matrices = randn(2, n, groups, groups, seed=2, dtype=torch.float64)
        self.whitening, self.slope = matrices + matrices.mT
        self.shift = randn(n, groups, seed=3, dtype=torch.float64)

    def grouped(self, activations):
        n, channels = activations.shape[:2]
        double = activations.double().cpu()
        return double.reshape(n, self.groups, channels // self.groups, -1)

    def covariance(self, eps=0.0):
        columns = self.x_c.flatten(2)
        identity = torch.eye(self.groups, dtype=torch.float64)
        return columns @ columns.mT / columns.shape[-1] + eps * identity

    def per_channel(self, parameter, default):
        if parameter is None:
            parameter = torch.full((self.x.shape[1],), default)
        return parameter.double().cpu().reshape(self.groups, -1, 1)

    def scaled_dy(self):
        return self.dy_g * self.per_channel(self.weight, 1.0)

    def given(self, *tensors):
        return [tensor.to(DEVICE, FP32) for tensor in tensors]

    def input_gradient(self, out, dy=None, mean=None):
        """Run the kernel with gradients for which dX = W (weight * dY - shift) + slope (X - mean)."""
        columns = self.x_g[0, 0].numel()
        mean = self.mean if mean is None else mean
        dy = self.dy if dy is None else dy
        largest = torch.maximum(
            self.scaled_dy().abs().amax((1, 2, 3)), self.shift.abs().amax(1)
        )
        mean, sigma, whitening, grad_sigma, grad_mean, largest = self.given(
            mean,
            self.sigma,
            self.whitening,
            self.slope * columns / 2,
            self.shift * columns,
            largest,
        )
        # the last row alone is read
        grad = torch.cat(
            [torch.full_like(grad_sigma, torch.nan), grad_mean[:, None]], 1
        )
        apply_backward(
            self.x,
            mean,
            sigma,
            dy,
            self.weight,
            whitening,
            grad_sigma,
            grad,
            largest,
            out,
        )


def statistics(x, groups, eps=0.0):
    mean = torch.empty((len(x), groups), device=DEVICE)
    covariance = torch.empty((len(x), groups, groups), device=DEVICE)
    write_statistics(x, groups, eps, mean, covariance)
    return mean, covariance


def newton(sigma, num_iters):
    whitening = torch.empty_like(sigma)
    write_newton(sigma, num_iters, whitening)
    return whitening


def newton_backward(sigma, grad, num_iters):
    """Return whitening matrices and dL/dSigma."""
    groups = sigma.shape[1]
    whitening = torch.empty_like(sigma)
    kept = None
    if in_registers(groups, num_iters):
        kept = operands(sigma, groups, num_iters)
        write_newton(sigma, num_iters, whitening, kept)

    grad = torch.nn.functional.pad(grad, (0, 0, 0, 1))
    products = torch.zeros(1, *grad.shape, device=DEVICE)
    dweight, dbias = torch.empty(2, groups, device=DEVICE)
    grad_sigma = matrix_gradients(
        products, whitening, dweight, dbias, sigma, grad, num_iters, kept
    )
    return whitening, grad_sigma


def papers_layer(sample, x, dy, setting, relu=False):
    """Algorithms 1 and 2 of the supplement, in numpy: y and the gradients of x, weight and bias."""
    tensors = x, dy, sample.weight, sample.bias
    x, dy, weight, bias = (tensor.double().cpu().numpy() for tensor in tensors)
    y = oracle.group_whiten(x, setting, weight, bias)
    if relu:
        dy = np.where(y > 0, dy, 0)
        y = np.maximum(y, 0)
    gradients = oracle.group_whiten_backward(x, dy, setting, weight)
    return [torch.from_numpy(array) for array in (y, *gradients)]


def assert_relatively_close(values, expected, tolerance):
    for value, wanted in zip(values, expected, strict=True):
        assert relative_error(value, wanted) < tolerance


def relative_error(actual, expected):
    largest = expected.double().cpu().abs().max()
    return largest_difference(actual, expected) / largest.clamp_min(1e-300)


def largest_difference(actual, expected):
    actual = actual.double().cpu().reshape(expected.shape)
    return (actual - expected.double().cpu()).abs().max()


def cases():
    rows = [(shape, groups, FP32, False) for shape, groups in SHAPES]
    rows += [(shape, groups, FP32, True) for shape, groups in CHANNELS_LAST]
    rows += [(*SHAPES[i], dtype, False) for dtype in (FP16, BF16) for i in (0, 1)]
    rows += [(*CHANNELS_LAST[1], dtype, True) for dtype in (FP16, BF16)]
    return pytest.mark.parametrize(
        ("shape", "groups", "dtype", "channels_last"), rows, ids=str
    )


# ---------------------------------------------------------------------------------------- statistics


@cases()
def check_statistics(shape, groups, dtype, channels_last):
    sample = Sample(shape, groups, dtype, channels_last)

    mean, covariance = statistics(sample.x, groups, eps=0.25)

    assert relative_error(mean, sample.mean) < TOLERANCE[FP32]
    # float16 and bfloat16 values are exact, but centered values are rounded to tf32
    tolerance = TOLERANCE[FP32] if dtype == FP32 else 2e-4
    assert relative_error(covariance, sample.covariance(eps=0.25)) < tolerance


def check_operands_are_rounded_to_nearest():
    """Tensor cores cut the low bits of a tf32 operand off, which would shrink every variance by 6.5e-4."""
    x = Sample((1, 16, 4, 8), 16, FP16).x

    mean, covariance = statistics(x, 16)

    centered = x.float().reshape(16, -1) - mean.reshape(16, 1)
    bits = (centered.view(torch.int32) + 4096) & -8192
    rounded = bits.view(FP32).double()
    assert relative_error(covariance[0], rounded @ rounded.mT / 32) < TOLERANCE[FP32]


def check_newton_of_a_singular_covariance():
    """With many steps the tangents of its null space grow by 3.4 in each."""
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 16, 4)))
    sigma = (x @ x.mT / 4).requires_grad_()
    expected = newton_inverse_sqrt(sigma, 8)
    (expected_grad,) = torch.autograd.grad(expected, sigma, torch.ones_like(sigma))
    sigma = sigma.detach().to(DEVICE, FP32)

    _, grad_sigma = newton_backward(sigma, torch.ones_like(sigma), 8)
    _, of_many_steps = newton_backward(sigma, torch.ones_like(sigma), 20)

    assert relative_error(grad_sigma, expected_grad) < 1e-3
    assert of_many_steps.isfinite().all()


@pytest.mark.parametrize("scale", [1e-8, 1e-3, 1e8])
def check_float32_of_any_magnitude(scale):
    """Operands are scaled before they are split into float16, also where one channel is 1e4 times another."""
    sample = Sample((2, 32, 13, 31), 16)
    scales = scale * torch.logspace(0, 4, 32, device=DEVICE)[:, None, None]
    x = sample.x * scales
    x[0, 0, 0, 0] *= 1e3
    dy = sample.dy / scales
    eps = 1e-5 * scale**2

    y, mean, sigma = triton_kernels.forward(
        x, sample.weight, sample.bias, 16, 5, eps, False
    )
    gradients = triton_kernels.backward(dy, None, x, mean, sigma, sample.weight, 5)

    expected = papers_layer(sample, x, dy, Setting(16, eps=eps))
    assert_relatively_close((y, *gradients), expected, 2e-5)


@pytest.mark.parametrize("processors", [1, 3, 132])
def check_statistics_of_any_number_of_splits(processors, monkeypatch):
    monkeypatch.setattr(support, "processors", lambda device: processors)
    sample = Sample((2, 48, 23, 29), 16)

    found = statistics(sample.x, 16)
    again = statistics(sample.x, 16)

    assert all(map(torch.equal, found, again))
    assert relative_error(found[1], sample.covariance()) < TOLERANCE[FP32]


@pytest.mark.parametrize("outlier", [False, True], ids=["", "first pixel zero"])
def check_statistics_with_a_large_mean(outlier):
    """A mean of 1e4 deviations; a first column far from it must not spoil the sums (x is exact)."""
    x = Sample((2, 32, 23, 31), 16).x + 1e4
    if outlier:
        x[:, :, 0, 0] = 0

    mean, covariance = statistics(x, 16)

    x_g = x.double().cpu().reshape(2, 16, -1)
    x_c = x_g - x_g.mean(-1, keepdim=True)
    assert relative_error(mean, x_g.mean(-1)) < 1e-7
    assert relative_error(covariance, x_c @ x_c.mT / x_c.shape[-1]) < TOLERANCE[FP32]


def check_statistics_of_constant_rows():
    value = torch.linspace(-3, 7, 16, device=DEVICE)  # not exact in any sum
    x = (
        value.repeat_interleave(3)[None, :, None, None]
        .expand(2, 48, 13, 17)
        .contiguous()
    )

    mean, covariance = statistics(x, 16)

    assert torch.equal(mean, value.expand(2, 16))
    assert not covariance.any()


# ---------------------------------------------------------------------------------------- Newton's iteration


def covariances(n, g):
    """With eigenvalues over three orders of magnitude."""
    deviations = torch.exp(1.5 * randn(n, g, 1, seed=1, dtype=torch.float64))
    x = randn(n, g, 3 * g, dtype=torch.float64) * deviations
    return x @ x.mT / (3 * g) + 1e-5 * torch.eye(g)


@pytest.mark.parametrize(
    ("g", "num_iters", "scale"),
    [
        (3, 0, 1),
        (3, 1, 1),
        (32, 2, 1e-18),
        (1, 5, 1),
        (32, 5, 1e18),
        (64, 5, 1),
        (100, 3, 1e-6),
        (16, 8, 1),
        (16, 16, 1),
    ],
)
def check_newton_and_its_gradient(g, num_iters, scale):
    """The expected gradient is that of autograd through the textbook iteration."""
    sigma = (covariances(3 if g < 64 else 1, g) * scale).requires_grad_()
    grad = randn(*sigma.shape, seed=2, dtype=torch.float64) + 3 * torch.eye(g)
    expected = newton_inverse_sqrt(sigma, num_iters)
    (expected_grad,) = torch.autograd.grad(expected, sigma, grad)
    expected_grad = (expected_grad + expected_grad.mT) / 2
    sigma = sigma.detach().to(DEVICE, FP32)

    whitening = newton(sigma, num_iters)
    again, grad_sigma = newton_backward(sigma, grad.to(DEVICE, FP32), num_iters)

    assert torch.equal(whitening, again) or not INTERPRETED
    assert_relatively_close(
        (whitening, again, grad_sigma),
        (expected.detach(), expected.detach(), expected_grad),
        TOLERANCE[FP32],
    )


def check_newton_of_nothing_and_of_nan():
    """No variance gives zero and a zero gradient; NaN stays in its sample."""
    variances = torch.tensor([0.0, 1e-25, 1.0, 1.0])
    sigma = variances[:, None, None] * torch.eye(16)
    sigma[2, 3, 5] = torch.nan
    sigma[2, 4, 4] = torch.nan
    sigma = sigma.to(DEVICE)

    for result in newton_backward(sigma, torch.ones_like(sigma), 5):
        assert not result[:2].any()
        assert result[2].isnan().all()
        assert result[3].isfinite().all()
        assert result[3].any()


# ---------------------------------------------------------------------------------------- center, whiten, affine


@cases()
@pytest.mark.parametrize(
    ("affine", "relu"), [(True, False), (False, False), (True, True)]
)
def check_apply(shape, groups, dtype, channels_last, affine, relu):
    sample = Sample(shape, groups, dtype, channels_last, affine)
    y = torch.empty_like(sample.x)
    mean, sigma, whitening = sample.given(sample.mean, sample.sigma, sample.whitening)

    apply(sample.x, mean, sigma, whitening, sample.weight, sample.bias, relu, out=y)

    white = torch.einsum("nrk,nkjp->nrjp", sample.whitening, sample.x_c)
    expected = white * sample.per_channel(sample.weight, 1.0)
    expected = expected + sample.per_channel(sample.bias, 0.0)
    assert relative_error(y, expected.relu() if relu else expected) < TOLERANCE[dtype]


@cases()
@pytest.mark.parametrize(
    ("affine", "relu"), [(True, False), (False, False), (True, True)]
)
def check_grad_products_and_the_parameters_gradients(
    shape, groups, dtype, channels_last, affine, relu
):
    sample = Sample(shape, groups, dtype, channels_last, affine, relu)
    mean, sigma, whitening = sample.given(sample.mean, sample.sigma, sample.whitening)
    arguments = sample.x, mean, sample.dy, sample.weight, sample.y
    masked = torch.full_like(sample.x, 7)
    dweight, dbias = torch.empty(2, shape[1], device=DEVICE)
    # None: whitening is written, too
    kept = operands(sigma, groups, 5) if in_registers(groups, 5) else None

    products, grad, largest = grad_products(*arguments, masked)
    again, *_ = grad_products(*arguments, masked.clone())
    matrix_gradients(products, whitening, dweight, dbias, sigma, grad, 5, kept)

    assert torch.equal(products, again)
    expected_masked = torch.full_like(masked, 7)
    if relu:
        expected_masked = torch.where(sample.y > 0, sample.dy, 0)
    assert torch.equal(masked, expected_masked)

    # relative to the lengths of the factors: a single column may be its own mean
    limit = TOLERANCE[dtype] * sample.dy_g.norm() * sample.x_g.norm()
    expected = torch.einsum("nrjp,nkjp->jnrk", sample.dy_g, sample.x_c)
    scaled = torch.einsum("nrjp,nkjp->nrk", sample.scaled_dy(), sample.x_c)
    whitening = whitening.double().cpu()
    expected_dweight = (expected * whitening).sum((1, 3)).T.flatten()
    assert largest_difference(products[:, :, :-1], expected) < limit
    assert largest_difference(grad[:, :-1], scaled) < limit
    assert largest_difference(dweight, expected_dweight) < limit * whitening.norm()

    sums = sample.dy_g.sum(-1)
    assert_relatively_close(
        (products[:, :, -1], grad[:, -1], dbias),
        (sums.permute(2, 0, 1), sample.scaled_dy().sum((2, 3)), sums.sum(0).flatten()),
        TOLERANCE[FP32],
    )
    if largest is not None:
        assert relative_error(largest, sample.scaled_dy().abs().amax((1, 2, 3))) < 1e-6


@cases()
@pytest.mark.parametrize(
    ("affine", "in_place"), [(True, False), (False, False), (True, True)]
)
def check_apply_backward(shape, groups, dtype, channels_last, affine, in_place):
    sample = Sample(shape, groups, dtype, channels_last, affine)
    dx = sample.dy.clone()

    sample.input_gradient(dx, dx if in_place else None)

    scaled = sample.scaled_dy() - sample.shift[..., None, None]
    by_output = torch.einsum("nrk,nkjp->nrjp", sample.whitening, scaled)
    by_statistics = torch.einsum("nrk,nkjp->nrjp", sample.slope, sample.x_c)
    assert relative_error(dx, by_output + by_statistics) < TOLERANCE[dtype]


def check_mixed_memory_formats():
    """A gradient often comes in another memory format than the input."""
    sample = Sample((2, 48, 5, 7), 16, channels_last=True, relu=True)
    (mean,) = sample.given(sample.mean)
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        dy = sample.dy.contiguous(memory_format=memory_format)
        dx = torch.empty_like(sample.x)
        masked = torch.empty_like(sample.x)
        sample.input_gradient(dx, dy)
        products = grad_products(sample.x, mean, dy, sample.weight, sample.y, masked)
        results.append((dx, *products, masked))

    assert_relatively_close(*results, TOLERANCE[FP32])


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 12, 5, 7), 6), ((1, 96, 3, 3), 96)], ids=str
)
def check_nothing_beside_the_tensors_is_read_or_written(shape, groups, channels_last):
    """The tensors lie in the middle of larger ones that hold NaN."""
    sample = Sample(shape, groups)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    n, c, h, w = shape
    frames = torch.full((5, n + 2, c + 16, h, w), torch.nan, device=DEVICE)
    frames = [frame.contiguous(memory_format=memory_format) for frame in frames]
    x, dy, y, dx, masked = (frame[1:-1, 8:-8] for frame in frames)
    sample.x = x.copy_(sample.x)
    sample.dy = dy.copy_(sample.dy)
    (whitening,) = sample.given(sample.whitening)

    mean, covariance = statistics(x, groups)
    apply(x, mean, covariance, whitening, sample.weight, sample.bias, True, out=y)
    sample.input_gradient(dx, mean=mean)
    products, grad, _ = grad_products(x, mean, dy, sample.weight, y, masked)

    for result in (covariance, y, dx, products, grad):
        assert result.isfinite().all()
    for frame in frames:
        assert frame.isfinite().sum() == x.numel()


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
def check_half_precision_does_not_overflow(dtype):
    """Centered values and W times the weight beyond 65504, the largest float16, with results within it."""
    x = torch.full((1, 16, 4, 8), -6e4, device=DEVICE, dtype=dtype)
    x[..., :2] = 6e4
    y = torch.empty_like(x)
    mean = torch.full((1, 16), -3e4, device=DEVICE)
    sigma = torch.eye(16, device=DEVICE)[None]

    apply(x, mean, 2.7e9 * sigma, 1e-4 * sigma, None, None, False, out=y)
    assert y.float().amax().item() == pytest.approx(9, rel=1e-2)

    apply(x / 6e8, mean * 0, sigma, 1e5 * sigma, None, None, False, out=y)
    assert y.float().amax().item() == pytest.approx(10, rel=2e-2)


def check_float16_where_a_large_common_part_cancels():
    """Centered values are not float16; their rounding to one would be 5 times that of the result."""
    common = randn(2, 1, 9, 31)
    own = randn(2, 32, 9, 31, seed=1)
    x = (30 * common + own).to(DEVICE, FP16)

    y, *_ = triton_kernels.forward(x, None, None, 32, 5, 1e-5, False)

    expected = oracle.group_whiten(x.double().cpu().numpy(), Setting(32))
    assert relative_error(y, torch.from_numpy(expected)) < 1e-3


def check_a_tensor_that_does_not_collapse_is_copied():
    x = torch.zeros(2, 8, 6, 6, device=DEVICE)[..., ::2]
    assert tiling.prepare(x).is_contiguous()


def check_more_than_32_bits_reach_is_refused(monkeypatch):
    x = torch.zeros(2, 8, 6, 6, device=DEVICE)
    wide = torch.zeros(2, 16, 6, 6, device=DEVICE)[:, ::2]

    monkeypatch.setattr(support, "MAX_EXTENT", 8 * 6 * 6 + 1)
    assert triton_kernels.supported(x, 4)
    assert tiling.prepare(x) is x
    assert tiling.prepare(wide).is_contiguous()

    monkeypatch.setattr(support, "MAX_EXTENT", 8 * 6 * 6)
    assert not triton_kernels.supported(x, 4)


@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 32, 9, 7), 16), ((2, 64, 5, 13), 64)], ids=str
)
def check_the_whole_layer_follows_the_papers(shape, groups, channels_last, relu):
    sample = Sample(shape, groups, channels_last=channels_last)
    setting = Setting(groups)
    x = sample.x
    solution = triton_kernels.solution_for(x, groups, setting.iters)

    y, mean, sigma = triton_kernels.forward(
        x,
        sample.weight,
        sample.bias,
        groups,
        setting.iters,
        setting.eps,
        relu,
        solution,
    )
    saved = y if relu else None, x, mean, sigma, sample.weight, setting.iters
    gradients = triton_kernels.backward(sample.dy, *saved, solution)

    if INTERPRETED:
        assert all(
            map(torch.equal, gradients, triton_kernels.backward(sample.dy, *saved))
        )
    expected = papers_layer(sample, x, sample.dy, setting, relu)
    assert_relatively_close((y, *gradients), expected, 2e-5)


# ---------------------------------------------------------------------------------------- tests of a plain run


IN_INTERPRETER = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def run_checks(keyword, **environment):
    run(["-o", "python_functions=check_*", "-k", keyword, __file__], **environment)


def run(arguments, **environment):
    environment = os.environ | environment
    environment.pop("PYTEST_ADDOPTS", None)

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=TESTS.parent,
    )

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout


needs_triton = pytest.mark.skipif(
    triton is None, reason="Triton 3.3 or newer is not installed"
)
#: a few seconds of checks: every kernel, both memory formats, a fused ReLU
SAMPLE = "newton_of_nothing or constant_rows or mixed_memory_formats or (whole_layer and 9 and relu)"


@needs_triton
@pytest.mark.parametrize(
    "keyword",
    [
        SAMPLE,
        pytest.param("newton", marks=pytest.mark.slow),
        pytest.param("not newton", marks=pytest.mark.slow),
    ],
)
def test_the_kernels_in_the_interpreter(keyword):
    run_checks(keyword, **IN_INTERPRETER)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("module", sorted(ON_EVERY_BACKEND))
def test_the_layers_tests_in_the_interpreter(module):
    """Run the tests of operation and layer there, which take these kernels for all dtypes but float64."""
    too_slow_there = "stem_size or (equal_channels and 30.0)"
    (file,) = TESTS.glob(f"*/{module}.py")
    run(["-k", f"not (float64 or {too_slow_there})", str(file)], **IN_INTERPRETER)


@needs_triton
@pytest.mark.slow
def test_the_layer_compiles_in_one_graph_in_the_interpreter():
    file = TESTS / "ops" / "test_op.py"
    run(["-k", "compiles_in_one_graph", str(file)], **IN_INTERPRETER)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_kernels_on_the_device():
    run_checks("check", TRITON_INTERPRET="0")


def test_without_triton_or_a_gpu_nothing_is_supported():
    assert not triton_kernels.supported(torch.zeros(1, 8, 2, 2), 8)
    program = (
        "import sys; sys.modules['triton'] = sys.modules['detectron2'] = None\n"
        "import torch; from gw_detectron.ops.group_whitening import triton as triton_kernels\n"
        "assert not triton_kernels.supported(torch.zeros(1, 8, 2, 2), 8)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=TESTS.parent)


@needs_triton
@pytest.mark.parametrize(
    ("capability", "version", "works"),
    [
        ((7, 5), (3, 8), False),
        ((8, 0), (3, 3), True),
        ((9, 0), (3, 3), True),
        ((12, 0), (3, 3), True),
        ((12, 1), (3, 5), False),  # there Triton 3.5 aborts the process
        ((12, 1), (3, 6), True),
        ((11, 0), (3, 6), False),
        # there Triton 3.6 compiles a race: triton-lang/triton#9871
        (
            (10, 0),
            (3, 6),
            False,
        ),
        ((10, 0), (3, 7), True),
        ((10, 3), (3, 8), False),  # still wrong in 3.7: triton-lang/triton#10590
    ],
)
def test_gpus_that_this_triton_compiles_for(monkeypatch, capability, version, works):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(support, "VERSION", version)

    assert support.compiles_for(torch.device("cuda")) is works


def test_fake_tensors_on_a_gpu_that_is_not_there():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with FakeTensorMode():
        x = torch.empty((2, 64, 8, 8), device="cuda")
        assert GroupWhitening2d(64, device="cuda")(x).shape == x.shape


@needs_triton
def test_a_missing_c_compiler_is_named():
    """Triton compiles its launcher at the first launch."""

    class Kernel:
        def __getitem__(self, grid):
            raise RuntimeError(
                "Failed to find C compiler. Please specify via CC environment variable"
            )

    launch = plans.Launch(Kernel(), (1, 1), torch.empty(1), 4, 2, {})

    with pytest.raises(MissingPackageError, match="gcc"):
        launch.run()


@pytest.mark.parametrize(
    ("dtype", "allowed", "expected"),
    [
        (FP32, False, "tf32x3"),
        (FP32, True, "tf32"),
        (FP16, False, "tf32"),
        (BF16, False, "tf32"),
    ],
    ids=str,
)
def test_float32_is_multiplied_in_tf32_alone_where_the_user_allows_it(
    dtype, allowed, expected
):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        precision = support.input_precision(torch.empty(1, dtype=dtype))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before

    assert precision == expected


@pytest.fixture
def compile_for(monkeypatch, tmp_path_factory):
    """Compile what a layer would launch for an input, for a compute capability, without a GPU."""
    try:
        compiler_tool("ptxas"), compiler_tool("cuobjdump")
    except MissingPackageError as error:
        pytest.skip(str(error))
    monkeypatch.setenv(
        "TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton")
    )

    def compile_for(capability, x, groups, relu, only=""):
        monkeypatch.setattr(support, "is_hopper", lambda x: capability == 90)
        launches = layer_launches(x, groups, relu=relu)
        return [
            compile_launch(launch, capability)
            for launch in launches
            if only in kernel_name(launch)
        ]

    return compile_for


NEWTON, TANGENTS = "newton_in_registers", "matrix_gradients"
KERNELS = [
    "moments",
    "merge",
    NEWTON,
    "apply",
    "products",
    "reduce",
    NEWTON,
    TANGENTS,
    "apply_backward",
]


def test_a_kernel_compiles_without_a_gpu(compile_for):
    """The small sample of the tests below."""
    x = torch.empty((16, 256, 50, 84), device="meta").to(
        memory_format=torch.channels_last
    )

    (kernel,) = compile_for(90, x, 64, True, only="moments")

    assert kernel.registers > 16
    assert kernel.stack == 0
    assert kernel.shared <= 227 * 1024


CONTIGUOUS, LAST = torch.contiguous_format, torch.channels_last
MAPS = [((16, 64, 200, 336), CONTIGUOUS), ((16, 256, 7, 7), CONTIGUOUS)]
ON_HOPPER = [*MAPS, ((16, 128, 200, 336), CONTIGUOUS), ((2, 256, 200, 336), LAST)]
COMPILED = [(90, 227, dtype, *row) for dtype in (FP32, BF16) for row in ON_HOPPER]
#: capability and KiB of shared memory, of the CUDA programming guide; float32 takes most
COMPILED += [
    (*gpu, FP32, *row)
    for gpu in ((80, 163), (86, 99), (120, 99))
    for row in (*MAPS, ((16, 256, 7, 7), LAST))
]


@pytest.mark.slow
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(
    ("capability", "shared", "dtype", "shape", "memory_format"), COMPILED, ids=str
)
def test_kernels_keep_to_registers_and_shared_memory(
    compile_for, capability, shared, dtype, shape, memory_format, relu
):
    """With the newest Triton; older ones spill some bytes. Newton's tangents spill up to 512 bytes."""
    x = torch.empty(shape, dtype=dtype, device="meta").to(memory_format=memory_format)
    groups = 128 if shape[1] == 128 else 64
    hopper = capability == 90

    kernels = compile_for(capability, x, groups, relu)

    for kernel in kernels:
        assert kernel.registers > 16, f"{kernel.kernel} was optimized away"
        assert kernel.shared <= shared * 1024, (
            f"{kernel.kernel} takes {kernel.shared} bytes"
        )
    if hopper:
        assert [kernel.kernel for kernel in kernels] == names_of_layer(shape, groups)
        for kernel in kernels:
            spilled = 512 if kernel.kernel == TANGENTS else 0
            assert kernel.stack <= spilled, (
                f"{kernel.kernel} spills {kernel.stack} bytes"
            )
    if hopper and memory_format is LAST:
        launches = layer_launches(x, groups, relu=relu)
        for kernel, launch in zip(kernels, launches, strict=True):
            if kernel.kernel in tiling.Tuning._fields:
                assert_one_wave(kernel, math.prod(launch.grid))


def names_of_layer(shape, groups):
    names = list(KERNELS)
    if shape[0] == 2:  # a few samples: no iteration in backward
        del names[6]
    absent = {NEWTON} if groups > 64 else set()  # torch's products
    if shape[-1] == 7:  # one split
        absent = {"merge"}
    return [name for name in names if name not in absent]


def assert_one_wave(kernel, programs):
    """All programs run at the same time, on 132 multiprocessors."""
    together = math.ceil(programs / 132)
    assert together * (kernel.shared + 1024) <= 228 * 1024
    assert together * 128 * kernel.registers <= 2**16
