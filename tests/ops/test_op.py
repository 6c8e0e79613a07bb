"""The custom operator: choice of the backend, torch's transforms, flops, derivatives."""

import pytest
import torch
from fvcore.nn import FlopCountAnalysis
from torch.autograd import forward_ad

from gw_detectron.errors import ConfigError
from gw_detectron.layers import Solver
from gw_detectron.ops import torch_private
from gw_detectron.ops.group_whitening import op
from gw_detectron.ops.group_whitening.op import (
    ENVIRONMENT_SWITCH,
    choose_backend,
    use_backend,
)

from .cases import assert_errors_below, gradients, layer, randn, reference


def test_the_backend_follows_solver_and_size(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_SWITCH, raising=False)
    x = torch.randn(2, 64, 5, 5)

    for supported in (x, x.double(), x.bfloat16()):
        assert choose_backend(supported, 64) == "matmul"
    # torch.compile may not know whether there are any samples
    assert choose_backend(x[:0], 64) == "matmul"
    assert choose_backend(x, 64, Solver(num_iters=8)) == "matmul"

    for other in (Solver("zca"), Solver(corr=True), Solver(num_iters=9)):
        assert choose_backend(x, 64, other) == "reference"


def test_a_backend_is_forced_by_the_environment_and_by_the_program(monkeypatch):
    x = torch.randn(2, 64, 5, 5)
    monkeypatch.setenv(ENVIRONMENT_SWITCH, "reference")
    assert choose_backend(x, 64) == "reference"

    monkeypatch.setenv(ENVIRONMENT_SWITCH, "matmul")
    assert choose_backend(x, 64) == "matmul"
    assert choose_backend(x, 64, Solver("zca")) == "reference"
    with use_backend("reference"):
        assert choose_backend(x, 64) == "reference"
    assert choose_backend(x, 64) == "matmul"

    monkeypatch.setenv(ENVIRONMENT_SWITCH, "triton")
    with pytest.raises(ConfigError, match=rf"{ENVIRONMENT_SWITCH} \('triton'\)"):
        choose_backend(x, 64)
    with (
        pytest.raises(ConfigError, match=r"use_backend \('fast'\)"),
        use_backend("fast"),
    ):
        choose_backend(x, 64)


def test_functional_transforms_and_forward_mode():
    made = layer(16, 4).double()
    x, tangent = torch.randn(2, 3, 16, 5, 5, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(made, x)
    expected = (jacobian * tangent).sum((-4, -3, -2, -1))

    _, by_jvp = torch.func.jvp(made, (x,), (tangent,))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(made(forward_ad.make_dual(x, tangent)))
    vectorized = torch.autograd.functional.jacobian(made, x, vectorize=True)
    mapped = torch.func.vmap(made)(x[:, None])[:, 0]

    torch.testing.assert_close(by_jvp, expected)
    torch.testing.assert_close(dual.tangent, expected)
    torch.testing.assert_close(torch.func.jacrev(made)(x), jacobian)
    torch.testing.assert_close(vectorized, jacobian)
    torch.testing.assert_close(mapped, made(x))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_the_operator_keeps_torchs_rules(affine, channels_last, relu):
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(2, 12, 4, 5).to(memory_format=memory_format).requires_grad_()
    weight = torch.rand(12, requires_grad=True) if affine else None
    bias = torch.rand(12, requires_grad=True) if affine else None
    settings = 4, 5, 1e-5, relu, "matmul"
    forward = torch.ops.gw_detectron.group_whiten
    backward = torch.ops.gw_detectron.group_whiten_backward

    torch.library.opcheck(forward, (x, weight, bias, *settings))

    # the backward operator, which has no derivative, also with an empty batch
    with torch.no_grad():
        y, mean, sigma = forward(x, weight, bias, *settings)
    dy = torch.randn_like(x)
    x = x.detach()
    weight = None if weight is None else weight.detach()
    for samples in (2, 0):
        tensors = [tensor[:samples] for tensor in (dy, y, x, mean, sigma)]
        if not relu:
            tensors[1] = None
        torch.library.opcheck(
            backward,
            (*tensors, weight, 5, "matmul"),
            test_utils=("test_schema", "test_faketensor"),
        )


@pytest.mark.parametrize("relu", [True, False])
def test_compiles_in_one_graph(relu):
    made = layer(64, 16)
    x, dy = torch.randn(2, 3, 64, 6, 7)
    leaf = x.clone().requires_grad_()

    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    y = compiled(leaf, relu=relu)
    (dx,) = torch.autograd.grad(y, leaf, dy)

    expected = gradients(made, x, dy, relu=relu)
    assert torch.equal(y, expected[0])
    assert torch.equal(dx, expected[1])


@pytest.mark.slow
@torch._inductor.config.patch(force_disable_caches=True)
def test_a_compiled_network_does_not_copy_activations_for_it(monkeypatch):
    """Inductor makes convolutions channels_last."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("then convolutions keep their memory format")
    activations = []

    def recorded(original):
        def record(*arguments):
            tensors = filter(torch.is_tensor, arguments)
            activations.extend(tensor for tensor in tensors if tensor.dim() == 4)
            return original(*arguments)

        return record

    monkeypatch.setattr(op.matmul, "forward", recorded(op.matmul.forward))
    monkeypatch.setattr(op.matmul, "backward", recorded(op.matmul.backward))
    net = torch.nn.Sequential(
        torch.nn.Conv2d(16, 32, 3), layer(32, 16), torch.nn.Conv2d(32, 8, 3)
    )

    torch.compile(net, fullgraph=True)(torch.randn(2, 16, 12, 10)).sum().backward()

    assert len(activations) == 3
    for activation in activations:
        assert activation.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("chosen", [[1, 0, 1], [0, 0, 0]], ids=str)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compiles_in_one_graph_where_the_batch_depends_on_data(chosen):
    """Like the RoIs of a detector, of which there may be none."""
    made = layer(64, 16)

    def chosen_samples(x, which):
        return made(x[which.nonzero()[:, 0]]).square().sum()

    x = torch.randn(3, 64, 6, 7, requires_grad=True)
    which = torch.tensor(chosen)
    inputs = x, made.weight, made.bias

    compiled = torch.compile(chosen_samples, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x, which), inputs)

    expected = torch.autograd.grad(chosen_samples(x, which), inputs)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("flag", [True, False])
def test_an_export_is_recognized_with_and_without_torchs_private_flag(
    flag, monkeypatch
):
    if flag and not torch_private._EXPORTING_FLAG:
        pytest.skip("this torch has no torch.compiler._is_exporting_flag")
    monkeypatch.setattr(torch_private, "_EXPORTING_FLAG", flag)

    program = torch.export.export(layer(8, 4), (torch.randn(2, 8, 3, 3),))

    assert "gw_detectron" not in str(program.graph)


def test_fvcore_counts_the_products():
    """fvcore traces the reference and counts multiplications."""
    x = torch.randn(3, 64, 10, 11)
    g = 16

    counted = FlopCountAnalysis(layer(64, g), x).unsupported_ops_warnings(False)

    assert counted.total() == 2 * g * x.numel() + 10 * g**3 * 3


@pytest.mark.parametrize("relu", [True, False])
def test_gradients_that_are_differentiated_again_stop_at_the_layer(relu):
    """Weight and input may depend on each other: in a layer used twice, or with parameters computed from the input."""
    tensors = randn(2, 4, 5), *randn(2, 4, seed=1)
    tensors = [tensor.double().requires_grad_() for tensor in tensors]

    def whiten(x, weight, bias):
        return op.group_whiten(x, 2, weight, bias, relu=relu)

    def twice(x, weight, bias):
        return whiten(whiten(x, weight, bias).sin(), weight, bias).pow(3).sum()

    def made_of_the_input(x, weight, bias):
        return (
            whiten(x, weight + x.mean((0, 2)).exp(), bias + x.sum((0, 2))).pow(3).sum()
        )

    for function in (twice, made_of_the_input):
        expected = torch.autograd.grad(function(*tensors), tensors)
        found = torch.autograd.grad(function(*tensors), tensors, create_graph=True)
        assert_errors_below(1e-12, found, expected)
        assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("bias",), ("x", "bias")])
def test_only_some_gradients_are_wanted(wanted):
    made = layer(32, 8).double()
    x, dy = torch.randn(2, 3, 32, 5, 5, dtype=torch.float64)
    _, *expected = reference(made, x, dy)
    expected = dict(zip(("x", "weight", "bias"), expected, strict=True))
    tensors = {"x": x, "weight": made.weight, "bias": made.bias}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in wanted)

    found = torch.autograd.grad(made(x), [tensors[name] for name in wanted], dy)

    assert_errors_below(1e-12, found, [expected[name] for name in wanted])
