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
from ..ops.cases import bw, correlated


def batches(
    count: int = 3, channels: int = 7, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    return [
        torch.from_numpy(correlated((4, channels, 5, 3), seed)).to(dtype)
        for seed in range(count)
    ]


def trained(
    channels: int = 7, width: int = 3, dtype: torch.dtype = torch.float64, **options
) -> BatchWhitening2d:
    """Return a layer after three batches, with random scale, shift and, if any, rotation."""
    layer = BatchWhitening2d(channels, width, **options).to(dtype)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=rng) + 0.5)
    for x in batches(channels=channels, dtype=dtype):
        layer(x)
    return layer


@pytest.mark.parametrize("running", ["matrix", "covariance"])
@pytest.mark.parametrize("solver", ["newton", "zca", "zca_max", "pivoted_cholesky"])
def test_evaluation_uses_the_averages_of_the_batches(solver, running):
    layer = BatchWhitening2d(7, 3, solver, 3, 1e-2, 0.3, running, affine=False).double()
    mean = np.zeros(7)
    averages = [np.eye(3), np.eye(3), np.eye(1)]
    for x in batches():
        layer(x)
        mean = 0.7 * mean + 0.3 * oracle.batch_moments(x.numpy())[0]
        for index, first in enumerate((0, 3, 6)):
            covariance = oracle.batch_moments(x.numpy()[:, first : first + 3])[1]
            unbiased = covariance * 60 / 59
            value = (
                oracle.whitening(solver, covariance, 3, 1e-2)
                if running == "matrix"
                else unbiased
            )
            averages[index] = 0.7 * averages[index] + 0.3 * value

    x = batches(4)[3]
    y = layer.eval()(x).numpy()

    for average, first in zip(averages, (0, 3, 6), strict=True):
        w = average if running == "matrix" else oracle.whitening(solver, average, 3, 1e-2)
        centered = x.numpy()[:, first : first + 3] - mean[first : first + 3, None, None]
        np.testing.assert_allclose(
            y[:, first : first + 3], np.einsum("ij,njhw->nihw", w, centered), rtol=0, atol=1e-10
        )
    assert torch.equal(layer(x), layer(x)), "evaluation leaves the averages alone"


@pytest.mark.parametrize("shape", [(0, 7, 5, 3), (1, 7, 1, 1), (1, 7)], ids=str)
@pytest.mark.parametrize("running", ["matrix", "covariance"])
def test_a_batch_without_covariance_leaves_the_averages_as_they_are(running, shape):
    layer = trained(running=running)
    before = copy.deepcopy(dict(layer.named_buffers()))
    y = layer(torch.ones(shape, dtype=torch.float64))
    assert torch.equal(y, layer.bias.reshape(1, -1, *[1] * (len(shape) - 2)).expand(shape))
    assert all(torch.equal(value, before[name]) for name, value in layer.named_buffers())


OPTIONS = [
    {},
    {"running": "covariance", "solver": "zca_max", "threshold": 0.2},
    {"rotation": "cayley", "corr": True},
]


class TestRotation:
    def test_it_is_the_cayley_map_before_scale_and_shift(self):
        layer, x = trained(solver="zca", rotation="cayley"), batches()[0]
        rotations = layer.rotate()
        assert [tuple(q.shape) for q in rotations] == [(2, 3, 3), (1, 1, 1)]
        for q in rotations:
            torch.testing.assert_close(
                q @ q.mT, torch.eye(q.shape[-1]).double().expand_as(q), rtol=0, atol=1e-12
            )
        free = layer.rotate.parametrizations["whole"].original.detach().tril(-1)
        half, identity = 0.5 * (free - free.mT), torch.eye(3, dtype=free.dtype)
        expected = (identity + half) @ torch.linalg.inv(identity - half)
        torch.testing.assert_close(rotations[0], expected, rtol=0, atol=1e-12)
        assert (expected - identity).abs().max() > 0.1
        white = bw(x, 3, solver="zca")
        turned = torch.einsum(
            "gij,ngjhw->ngihw", expected, white[:, :6].unflatten(1, (2, 3))
        ).flatten(1, 2)
        expected = (
            torch.cat((turned, white[:, 6:]), 1) * layer.weight[:, None, None]
            + layer.bias[:, None, None]
        )
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


class TestFrozen:
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_it_computes_what_the_layer_does_in_evaluation_and_their_state_dicts_bring_everything(
        self, options
    ):
        model = nn.Sequential(nn.ReLU(), nn.Sequential(trained(**options)))
        expected, state = copy.deepcopy(model).eval(), copy.deepcopy(model.state_dict())
        assert FrozenBatchWhitening2d.convert(model) is model
        frozen, x = model[1][0], batches()[1]
        loaded, thawed = (
            cls(7, 3, **options).double() for cls in (FrozenBatchWhitening2d, BatchWhitening2d)
        )
        for twin in (loaded, thawed):
            twin.load_state_dict(frozen.state_dict())
            assert torch.equal(twin.eval()(x), expected[1](x))
        assert isinstance(frozen, FrozenBatchWhitening2d)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        for mode in (True, False):
            assert torch.equal(model.train(mode)(x), expected(x))
        assert model.state_dict().keys() == state.keys()
        assert all(
            torch.equal(value, state[name]) for name, value in model.state_dict().items()
        )
        assert torch.equal(thawed.train()(x), expected[1].train()(x))

    def test_a_layer_that_computes_something_else_is_refused(self):
        class Doubled(BatchWhitening2d):
            def forward(self, x):
                return 2 * super().forward(x)

        model = nn.Sequential(BatchWhitening2d(8), Doubled(8))
        with pytest.raises(
            TypeError,
            match=r"1 \(Doubled\): a subclass of BatchWhitening2d.* Fix: freeze it by eval",
        ):
            FrozenBatchWhitening2d.convert(model)
        assert type(model[0]) is BatchWhitening2d
        parametrized = parametrize.register_parametrization(
            BatchWhitening2d(8), "weight", nn.Identity()
        )
        with pytest.raises(TypeError, match=r"module \(ParametrizedBatchWhitening2d\)"):
            FrozenBatchWhitening2d.convert(parametrized)


@pytest.mark.parametrize("solver", sorted(SOLVERS))
@pytest.mark.parametrize("running", ["matrix", "covariance", None])
def test_exported_program_serves_other_sizes(running, solver):
    """Also of group whitening, which has no running statistics."""
    layer = cases.layer(12, 4, solver=solver)
    if running:
        layer = trained(12, 5, torch.float32, solver=solver, running=running).eval()
    sizes = {0: torch.export.Dim("n"), 2: torch.export.Dim("h"), 3: torch.export.Dim("w")}
    program = torch.export.export(
        layer, (torch.randn(2, 12, 9, 7),), dynamic_shapes=(sizes,)
    ).module()
    for shape in ((2, 12, 9, 7), (3, 12, 13, 11)):
        x = torch.randn(shape)
        torch.testing.assert_close(program(x), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("running", ["matrix", "covariance"])
@pytest.mark.parametrize("solver", ["zca", "cholesky", "standardize", "pivoted_cholesky"])
def test_it_starts_with_the_variances_of_batch_norm(solver, running):
    layer = BatchWhitening2d(4, 2, solver, eps=1e-4, running=running, affine=False).double()
    variance = torch.tensor(
        [0.5, 0.1, 3.0, 2.0]
    ).double()  # pivoted_cholesky would reorder others
    layer.start_from_variance(variance, 0.1)
    x = batches(channels=4)[0]
    torch.testing.assert_close(
        layer.eval()(x), x / (variance + 0.1).sqrt()[:, None, None], rtol=0, atol=1e-10
    )
    layer.reset_parameters()
    assert torch.equal(
        layer.state_dict()[f"running_{running}"], torch.eye(2).double().repeat(2, 1)
    )


@pytest.mark.parametrize("solver", ["newton", "zca", "zca_max", "zca_entropy"])
def test_compiled_module_trains(solver):
    torch._dynamo.reset()
    layer = trained(dtype=torch.float32, solver=solver)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    for seed in range(2):
        x = torch.from_numpy(correlated((3, 7, 5 + seed, 4), seed)).float().requires_grad_()
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        compiled.running_matrix, layer.running_matrix, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_channels": 0}, r"num_channels \(0\)"),
        ({"channels_per_group": -1}, r"channels_per_group \(-1\)"),
        ({"momentum": 1.5}, r"momentum \(1.5\): expected a finite number from 0 to 1"),
        ({"sync": "yes"}, r"sync \('yes'\): expected a bool"),
        ({"running": "variance"}, r"running \('variance'\): .* \['matrix', 'covariance'\]"),
        ({"rotation": "givens"}, r"rotation \('givens'\): .* \['none', 'cayley'\]"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_by_value(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        BatchWhitening2d(**{"num_channels": 8, **arguments})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rotation_in_half_precision(dtype):
    made, converted = (
        BatchWhitening2d(8, rotation="cayley", dtype=dtype),
        BatchWhitening2d(8, rotation="cayley").to(dtype),
    )
    x = torch.randn(4, 8, 5, 5).to(dtype)
    for layer in (made, converted):
        y = layer(x)
        y.sum().backward()
        assert y.dtype == dtype and y.isfinite().all()
        assert {parameter.dtype for parameter in layer.rotate.parameters()} == {torch.float32}
    assert {
        p.dtype for p in BatchWhitening2d(8, rotation="cayley").double().rotate.parameters()
    } == {torch.float64}
