"""BatchWhitening2d: running statistics, evaluation, the frozen layer, rotations, checkpoints, tracing, compilation."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from gw_detectron.layers import SOLVERS, BatchWhitening2d, FrozenBatchWhitening2d

from ..ops import cases
from ..ops import solver_oracle as oracle
from ..ops.cases import assert_close, bw, features

GROUPS = (slice(0, 3), slice(3, 6), slice(6, 7))


def batch(seed: int, channels: int = 7) -> torch.Tensor:
    return features(4, channels, 5, 3, seed=seed)


def trained(
    channels: int = 7, width: int = 3, dtype: torch.dtype = torch.float64, **options
) -> BatchWhitening2d:
    """Return a layer after three batches, with random scale, shift and, if any, rotation."""
    layer = BatchWhitening2d(channels, width, **options).to(dtype)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=rng) + 0.5)
    for seed in range(3):
        layer(batch(seed, channels).to(dtype))
    return layer


@pytest.mark.parametrize("running", ["matrix", "covariance"])
@pytest.mark.parametrize("solver", ["newton", "zca", "zca_max", "pivoted_cholesky"])
def test_evaluation_uses_the_averages_of_the_batches(solver, running):
    layer = BatchWhitening2d(7, 3, solver, 3, 1e-2, 0.3, running, affine=False).double()
    mean = np.zeros(7)
    averages = [np.eye(3), np.eye(3), np.eye(1)]
    for seed in range(3):
        x = batch(seed)
        layer(x)
        mean = 0.7 * mean + 0.3 * oracle.batch_moments(x.numpy())[0]
        for index, group in enumerate(GROUPS):
            _, covariance = oracle.batch_moments(x.numpy()[:, group])
            value = covariance * 60 / 59
            if running == "matrix":
                value = oracle.whitening(solver, covariance, 3, 1e-2)
            averages[index] = 0.7 * averages[index] + 0.3 * value
    x = batch(3)

    y = layer.eval()(x)

    centered = x.numpy() - mean[:, None, None]
    for average, group in zip(averages, GROUPS, strict=True):
        w = (
            average
            if running == "matrix"
            else oracle.whitening(solver, average, 3, 1e-2)
        )
        assert_close(y[:, group], np.einsum("ij,njhw->nihw", w, centered[:, group]))
    assert torch.equal(layer(x), y), "evaluation leaves the averages alone"


@pytest.mark.parametrize("shape", [(0, 7, 5, 3), (1, 7, 1, 1), (1, 7)], ids=str)
@pytest.mark.parametrize("running", ["matrix", "covariance"])
def test_a_batch_without_covariance_leaves_the_averages_as_they_are(running, shape):
    layer = trained(running=running)
    before = copy.deepcopy(list(layer.buffers()))

    y = layer(torch.ones(shape, dtype=torch.float64))

    spatial = [1] * (len(shape) - 2)
    assert torch.equal(y, layer.bias.reshape(-1, *spatial).expand(shape))
    assert all(map(torch.equal, layer.buffers(), before))


OPTIONS = [
    {},
    {"running": "covariance", "solver": "zca_max", "threshold": 0.2},
    {"rotation": "cayley", "corr": True},
]


def test_a_rotation_is_the_cayley_map_before_scale_and_shift():
    layer = trained(solver="zca", rotation="cayley")
    x = batch(0)
    free = layer.rotate.parametrizations["whole"].original.detach().tril(-1)
    half = 0.5 * (free - free.mT)
    identity = torch.eye(3).double()

    whole, last = layer.rotate()
    y = layer(x)

    expected = (identity + half) @ torch.linalg.inv(identity - half)
    assert_close(whole, expected, 1e-12)
    assert_close(whole @ whole.mT, identity.expand(2, 3, 3), 1e-12)
    assert (whole - identity).abs().max() > 0.1
    assert torch.equal(last, torch.ones(1, 1, 1).double())

    white = bw(x, 3, solver="zca")
    groups = white[:, :6].unflatten(1, (2, 3))
    turned = torch.einsum("gij,ngjhw->ngihw", expected, groups).flatten(1, 2)
    turned = torch.cat((turned, white[:, 6:]), 1)
    scale, shift = layer.weight[:, None, None], layer.bias[:, None, None]
    assert_close(y, turned * scale + shift, 1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_frozen_layer_computes_what_the_layer_does_in_evaluation(options):
    layer = trained(**options)
    expected = copy.deepcopy(layer).eval()
    model = nn.Sequential(nn.ReLU(), nn.Sequential(layer))
    x = batch(1).relu()

    assert FrozenBatchWhitening2d.convert(model) is model

    assert isinstance(model[1][0], FrozenBatchWhitening2d)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for mode in (True, False):
        assert torch.equal(model.train(mode)(x), expected(x))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_state_dicts_of_frozen_and_trained_layers_are_the_same(options):
    layer = trained(**options)
    state = copy.deepcopy(layer.state_dict())
    frozen = FrozenBatchWhitening2d.convert(copy.deepcopy(layer))
    loaded = FrozenBatchWhitening2d(7, 3, **options).double()
    thawed = BatchWhitening2d(7, 3, **options).double()
    x = batch(1)

    loaded.load_state_dict(frozen.state_dict())
    thawed.load_state_dict(frozen.state_dict())

    assert frozen.state_dict().keys() == state.keys()
    for name, value in frozen.state_dict().items():
        assert torch.equal(value, state[name])
    assert torch.equal(loaded(x), frozen(x))
    assert torch.equal(thawed.eval()(x), frozen(x))
    assert torch.equal(thawed.train()(x), layer(x))


def test_freezing_refuses_a_layer_that_computes_something_else():
    class Doubled(BatchWhitening2d):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(BatchWhitening2d(8), Doubled(8))
    parametrized = BatchWhitening2d(8)
    parametrize.register_parametrization(parametrized, "weight", nn.Identity())

    with pytest.raises(TypeError, match=r"1 \(Doubled\)"):
        FrozenBatchWhitening2d.convert(model)
    with pytest.raises(TypeError, match=r"module \(ParametrizedBatchWhitening2d\)"):
        FrozenBatchWhitening2d.convert(parametrized)
    assert type(model[0]) is BatchWhitening2d


@pytest.mark.parametrize("solver", sorted(SOLVERS))
@pytest.mark.parametrize("running", ["matrix", "covariance", None])
def test_exported_program_serves_other_sizes(running, solver):
    """Also of group whitening, which has no running statistics."""
    layer = cases.layer(12, 4, solver=solver)
    if running:
        layer = trained(12, 5, torch.float32, solver=solver, running=running).eval()
    sizes = {
        0: torch.export.Dim("n"),
        2: torch.export.Dim("h"),
        3: torch.export.Dim("w"),
    }
    example = (torch.randn(2, 12, 9, 7),)

    program = torch.export.export(layer, example, dynamic_shapes=(sizes,)).module()

    for shape in ((2, 12, 9, 7), (3, 12, 13, 11)):
        x = torch.randn(shape)
        torch.testing.assert_close(program(x), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("running", ["matrix", "covariance"])
@pytest.mark.parametrize(
    "solver", ["zca", "cholesky", "standardize", "pivoted_cholesky"]
)
def test_it_starts_with_the_variances_of_batch_norm(solver, running):
    layer = BatchWhitening2d(
        4, 2, solver, eps=1e-4, running=running, affine=False
    ).double()
    # pivoted_cholesky would reorder others
    variance = torch.tensor([0.5, 0.1, 3.0, 2.0]).double()
    x = batch(0, channels=4)

    layer.start_from_variance(variance, 0.1)
    deviation = (variance + 0.1).sqrt()
    assert_close(layer.eval()(x), x / deviation[:, None, None])

    layer.reset_parameters()
    identities = torch.eye(2).double().repeat(2, 1)
    assert torch.equal(layer.get_buffer(f"running_{running}"), identities)


@pytest.mark.parametrize("solver", ["newton", "zca", "zca_max", "zca_entropy"])
def test_compiled_module_trains(solver):
    torch._dynamo.reset()
    layer = trained(dtype=torch.float32, solver=solver)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)

    for height in (5, 6):
        x = features(3, 7, height, 4).float().requires_grad_()
        assert_close(compiled(x), layer(x).detach(), 1e-3)

    assert_close(compiled.running_matrix, layer.running_matrix, 1e-3)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_channels": 0}, r"num_channels \(0\)"),
        ({"channels_per_group": -1}, r"channels_per_group \(-1\)"),
        ({"momentum": 1.5}, r"momentum \(1.5\): .* from 0 to 1"),
        ({"sync": "yes"}, r"sync \('yes'\)"),
        (
            {"running": "variance"},
            r"running \('variance'\): .* \['matrix', 'covariance'\]",
        ),
        ({"rotation": "givens"}, r"rotation \('givens'\): .* \['none', 'cayley'\]"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_by_value(arguments, named):
    with pytest.raises((ValueError, TypeError), match=named):
        BatchWhitening2d(**{"num_channels": 8, **arguments})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("converted", [True, False])
def test_a_rotation_in_half_precision_stays_in_float32(dtype, converted):
    x = torch.randn(4, 8, 5, 5).to(dtype)
    if converted:
        layer = BatchWhitening2d(8, rotation="cayley").to(dtype)
    else:
        layer = BatchWhitening2d(8, rotation="cayley", dtype=dtype)

    y = layer(x)
    y.sum().backward()

    assert y.dtype == dtype
    assert y.isfinite().all()
    assert {parameter.dtype for parameter in layer.rotate.parameters()} == {
        torch.float32
    }
    assert {parameter.dtype for parameter in layer.double().parameters()} == {
        torch.float64
    }
