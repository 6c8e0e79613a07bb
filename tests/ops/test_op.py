"""The custom operator: choice of the backend, torch's transforms, flops, derivatives."""

import pytest
import torch
from fvcore.nn import FlopCountAnalysis
from torch.autograd import forward_ad

from gw_detectron.errors import ConfigError
from gw_detectron.layers import Solver
from gw_detectron.ops import torch_private
from gw_detectron.ops.group_whitening import op
from gw_detectron.ops.group_whitening.op import ENVIRONMENT_SWITCH, choose_backend, use_backend

from .cases import error, gradients, layer, reference


def test_the_backend_follows_solver_and_size(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_SWITCH, raising=False)
    x = torch.randn(2, 64, 5, 5)
    assert (
        choose_backend(x, 64)
        == choose_backend(x.double(), 64)
        == choose_backend(x.bfloat16(), 64)
        == "matmul"
    )
    assert (
        choose_backend(x[:0], 64) == "matmul"
    )  # torch.compile may not know whether there are any
    assert (
        choose_backend(x, 64, Solver("zca"))
        == choose_backend(x, 64, Solver(corr=True))
        == "reference"
    )
    assert choose_backend(x, 64, Solver(num_iters=8)) == "matmul"
    assert choose_backend(x, 64, Solver(num_iters=9)) == "reference"


def test_a_backend_is_forced_by_the_environment_and_by_the_program(monkeypatch):
    x = torch.randn(2, 64, 5, 5)
    monkeypatch.setenv(ENVIRONMENT_SWITCH, "reference")
    assert choose_backend(x, 64) == "reference"
    monkeypatch.setenv(ENVIRONMENT_SWITCH, "matmul")
    assert (
        choose_backend(x, 64, Solver("zca"))
        == choose_backend(x, 64, Solver(num_iters=9))
        == "reference"
    )
    with use_backend("reference"):
        assert choose_backend(x, 64) == "reference"
    assert choose_backend(x, 64) == "matmul"
    monkeypatch.setenv(ENVIRONMENT_SWITCH, "triton")
    with pytest.raises(
        ConfigError, match=rf"{ENVIRONMENT_SWITCH} \('triton'\): cannot be forced"
    ):
        choose_backend(x, 64)


def test_functional_transforms_and_forward_mode():
    made = layer(16, 4).double()
    x, tangent = torch.randn(2, 3, 16, 5, 5, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(made, x)
    expected = (jacobian * tangent).sum((-4, -3, -2, -1))
    torch.testing.assert_close(torch.func.jvp(made, (x,), (tangent,))[1], expected)
    torch.testing.assert_close(torch.func.jacrev(made)(x), jacobian)
    torch.testing.assert_close(torch.func.vmap(made)(x[:, None])[:, 0], made(x))
    torch.testing.assert_close(
        torch.autograd.functional.jacobian(made, x, vectorize=True), jacobian
    )
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(made(forward_ad.make_dual(x, tangent)))
    torch.testing.assert_close(dual.tangent, expected)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_the_operator_keeps_torchs_rules(affine, channels_last, relu):
    x = torch.randn(2, 12, 4, 5, requires_grad=True)
    if channels_last:
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    weight, bias = (torch.rand(12, requires_grad=True) if affine else None for _ in range(2))
    torch.library.opcheck(
        torch.ops.gw_detectron.group_whiten, (x, weight, bias, 4, 5, 1e-5, relu, "matmul")
    )
    # the backward operator, which has no derivative, also with an empty batch
    x, weight = (None if tensor is None else tensor.detach() for tensor in (x, weight))
    y, mean, sigma = torch.ops.gw_detectron.group_whiten(
        x, weight, bias, 4, 5, 1e-5, relu, "matmul"
    )
    y = y.detach() if relu else None
    arguments = (torch.randn_like(x), y, x, mean.detach(), sigma.detach(), weight, 5, "matmul")
    for part in (
        arguments,
        [each[:0] if i < 5 and each is not None else each for i, each in enumerate(arguments)],
    ):
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(
            torch.ops.gw_detectron.group_whiten_backward, tuple(part), test_utils=checks
        )


@pytest.mark.parametrize("relu", [True, False])
def test_compiles_in_one_graph(relu):
    made = layer(64, 16)
    x, dy = torch.randn(2, 3, 64, 6, 7)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    x_compiled = x.clone().requires_grad_()
    y = compiled(x_compiled, relu=relu)
    (dx,) = torch.autograd.grad(y, x_compiled, dy)
    expected = gradients(made, x, dy, relu=relu)
    assert torch.equal(y, expected[0]) and torch.equal(dx, expected[1])


@pytest.mark.slow
@torch._inductor.config.patch(force_disable_caches=True)
def test_a_compiled_network_does_not_copy_activations_for_it(monkeypatch):
    """Inductor makes convolutions channels_last."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("then convolutions keep their memory format")
    taken = []
    for name in ("forward", "backward"):
        original = getattr(op.matmul, name)

        def record(*arguments, original=original):
            taken.extend(t for t in arguments if torch.is_tensor(t) and t.dim() == 4)
            return original(*arguments)

        monkeypatch.setattr(op.matmul, name, record)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(16, 32, 3), layer(32, 16), torch.nn.Conv2d(32, 8, 3)
    )
    torch.compile(net, fullgraph=True)(torch.randn(2, 16, 12, 10)).sum().backward()
    assert len(taken) == 3 and all(
        t.is_contiguous(memory_format=torch.channels_last) for t in taken
    )


@pytest.mark.parametrize("chosen", [[1, 0, 1], [0, 0, 0]], ids=str)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compiles_in_one_graph_where_the_batch_depends_on_data(chosen):
    """Like the RoIs of a detector, of which there may be none."""
    made = layer(64, 16)

    def chosen_samples(x, which):
        return made(x[which.nonzero()[:, 0]]).square().sum()

    x = torch.randn(3, 64, 6, 7, requires_grad=True)
    compiled = torch.compile(chosen_samples, fullgraph=True, backend="aot_eager")
    results = [
        torch.autograd.grad(function(x, torch.tensor(chosen)), (x, made.weight, made.bias))
        for function in (compiled, chosen_samples)
    ]
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("flag", [True, False])
def test_an_export_is_recognized_with_and_without_torchs_private_flag(flag, monkeypatch):
    if flag and not torch_private._EXPORTING_FLAG:
        pytest.skip("this torch has no torch.compiler._is_exporting_flag")
    monkeypatch.setattr(torch_private, "_EXPORTING_FLAG", flag)
    program = torch.export.export(layer(8, 4), (torch.randn(2, 8, 3, 3),))
    assert not any("gw_detectron" in str(node.target) for node in program.graph.nodes)


def test_fvcore_counts_the_products():
    """fvcore traces the reference and counts multiplications."""
    x, g = torch.randn(3, 64, 10, 11), 16
    counted = FlopCountAnalysis(layer(64, g), x).unsupported_ops_warnings(False)
    assert counted.total() == 2 * g * x.numel() + 10 * g**3 * 3


@pytest.mark.parametrize("relu", [True, False])
def test_gradients_that_are_differentiated_again_stop_at_the_layer(relu):
    """Weight and input may depend on each other: in a layer used twice, or with parameters computed from the input."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(2, 4, 5, generator=generator),
        *torch.randn(2, 4, generator=generator),
    ]
    tensors = [tensor.double().requires_grad_() for tensor in tensors]

    def whiten(x, weight, bias):
        return op.group_whiten(x, 2, weight, bias, relu=relu)

    def twice(x, weight, bias):
        return whiten(whiten(x, weight, bias).sin(), weight, bias).pow(3).sum()

    def made_of_the_input(x, weight, bias):
        return whiten(x, weight + x.mean((0, 2)).exp(), bias + x.sum((0, 2))).pow(3).sum()

    for function in (twice, made_of_the_input):
        expected = torch.autograd.grad(function(*tensors), tensors)
        found = torch.autograd.grad(function(*tensors), tensors, create_graph=True)
        for one, other in zip(found, expected, strict=True):
            assert error(one.detach(), other) < 1e-12
        assert torch.autograd.gradgradcheck(function, tensors, fast_mode=True)


@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("bias",), ("x", "bias")])
def test_only_some_gradients_are_wanted(wanted):
    made = layer(32, 8).double()
    x, dy = torch.randn(2, 3, 32, 5, 5, dtype=torch.float64)
    expected = dict(zip(("x", "weight", "bias"), reference(made, x, dy)[1:], strict=True))
    x.requires_grad_("x" in wanted)
    made.weight.requires_grad_("weight" in wanted)
    made.bias.requires_grad_("bias" in wanted)
    tensors = {"x": x, "weight": made.weight, "bias": made.bias}
    for name, value in zip(
        wanted, torch.autograd.grad(made(x), [tensors[n] for n in wanted], dy), strict=True
    ):
        assert error(value, expected[name]) < 1e-12
