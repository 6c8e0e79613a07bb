"""The oracle is checked before it judges: its backward against finite differences of its forward."""

import numpy as np
import pytest

from . import oracle
from .oracle import Setting

SETTINGS = [Setting(g, t, 1e-2) for g in (1, 3, 6) for t in (0, 1, 5)] + [
    Setting(g, eps=1e-2, solver="zca") for g in (1, 3, 6)
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_closed_form_backward_is_the_derivative(setting):
    rng = np.random.default_rng(0)
    x, grad = rng.normal(size=(2, 6, 5, 3)), rng.normal(size=(2, 6, 5, 3))
    weight, step = rng.normal(size=6), 1e-5
    grad_x, grad_weight, grad_bias = oracle.group_whiten_backward(x, grad, setting, weight)

    def loss(x, weight, bias):
        return (grad * oracle.group_whiten(x, setting, weight, bias)).sum()

    bias = rng.normal(size=6)
    for direction in (rng.normal(size=x.shape) for _ in range(4)):
        slope = (loss(x + step * direction, weight, bias) - loss(x - step * direction, weight, bias)) / (2 * step)
        assert slope == pytest.approx((grad_x * direction).sum(), rel=1e-6)
    direction = rng.normal(size=6)
    slope = loss(x, weight + direction, bias) - loss(x, weight, bias)
    assert slope == pytest.approx((grad_weight * direction).sum(), rel=1e-9)
    slope = loss(x, weight, bias + direction) - loss(x, weight, bias)
    assert slope == pytest.approx((grad_bias * direction).sum(), rel=1e-9)


def test_the_two_zca_backwards_agree_for_distinct_eigenvalues():
    rng = np.random.default_rng(1)
    a, grad = rng.normal(size=(5, 9)), rng.normal(size=(5, 5))
    by_gaps = oracle.zca_backward(grad, a @ a.T / 9)
    by_system = oracle.lyapunov_backward(grad, a @ a.T / 9)
    np.testing.assert_allclose(by_gaps + by_gaps.T, by_system + by_system.T, rtol=1e-9, atol=1e-9)


def test_newton_iteration_reaches_the_inverse_square_root():
    a = np.random.default_rng(2).normal(size=(6, 50))
    sigma = a @ a.T / 50
    np.testing.assert_allclose(oracle.newton(sigma, 25), oracle.zca(sigma), atol=1e-10)
