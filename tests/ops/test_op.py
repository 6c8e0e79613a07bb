"""The custom operator: accuracy, memory, choice of the backend, and torch's transforms."""

import copy
import logging
import threading

import pytest
import torch
from fvcore.nn import FlopCountAnalysis
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.layer_benchmark import SHAPES
from benchmarks.memory import saved_bytes
from gw_detectron.layers import GroupWhitening2d, Solver
from gw_detectron.ops import compat
from gw_detectron.ops.group_whitening import matmul, op
from gw_detectron.ops.group_whitening.op import ENVIRONMENT_SWITCH, choose_backend, use_backend
from gw_detectron.ops.group_whitening.reference import group_whiten_reference


def layer(channels: int, groups: int = 64, **options) -> GroupWhitening2d:
    made = GroupWhitening2d(channels, groups, **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        made.weight.uniform_(0.5, 1.5, generator=generator)
        made.bias.normal_(generator=generator)
    return made


def gradients(module: nn.Module, x: torch.Tensor, dy: torch.Tensor, **options) -> list[torch.Tensor]:
    """Return y and the gradients of x, weight and bias."""
    x = x.clone().requires_grad_()
    y = module(x, **options)
    return [y.detach(), *torch.autograd.grad(y, (x, module.weight, module.bias), dy.to(y.dtype))]


def reference(module: GroupWhitening2d, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Compute the same in float64 by the reference."""
    x = x.double().requires_grad_()
    weight, bias = (p.detach().double().requires_grad_() for p in (module.weight, module.bias))
    y = group_whiten_reference(x, module.num_groups, weight, bias, solver=module.solver)
    return [y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy.double())]


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return ((value.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_is_within_2e_5_of_float64(shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * 2 + 1
    dy = torch.randn(shape, generator=generator)
    made = layer(shape[1])
    for value, expected in zip(gradients(made, x, dy), reference(made, x, dy), strict=True):
        assert error(value, expected) < 2e-5


def test_float32_without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    x, dy = torch.randn(2, 3, 128, 50, 84, generator=torch.Generator().manual_seed(0))
    made = layer(128)
    for value, expected in zip(gradients(made, x, dy), reference(made, x, dy), strict=True):
        assert error(value, expected) < 2e-5


@pytest.mark.parametrize("size", [(40, 50), (160, 200)], ids=["one block", "several blocks"])
def test_a_mean_of_ten_thousand_deviations_costs_three_digits(size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 64, *size, generator=generator) + 1e4 * torch.randn(1, 64, 1, 1, generator=generator).sign()
    dy = torch.randn(x.shape, generator=generator)
    made = layer(64)
    for value, expected in zip(gradients(made, x, dy), reference(made, x, dy), strict=True):
        assert error(value, expected) < 1e-3


#: y and dx are rounded to the dtype (half a unit in the last place, about eps / 4 in the mean square); the sums are not
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
@pytest.mark.parametrize("shape", [(2, 128, 20, 24), (40, 256, 7, 7)], ids=str)
def test_half_precision_input_costs_no_more_than_its_own_rounding(shape, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 2 + 1).to(dtype)
    dy = torch.randn(shape, generator=generator).to(dtype)
    made = layer(shape[1])
    for i, (value, expected) in enumerate(zip(gradients(made, x, dy), reference(made, x, dy), strict=True)):
        assert value.dtype == (dtype if i < 2 else torch.float32)
        assert error(value, expected) < (tolerance if i < 2 else 2e-5)


def test_parameters_in_half_precision_are_converted_before_they_multiply():
    made = layer(64).half()
    with torch.no_grad():
        made.weight.fill_(2)
    generator = torch.Generator().manual_seed(0)
    x, sign = torch.randn(2, 2, 64, 9, 9, generator=generator).half()
    dy = sign.sign() * 4e4  # which times the weight is beyond float16, unlike its gradient
    for value, expected in zip(gradients(made, 8 * x, dy)[:2], reference(made, 8 * x, dy)[:2], strict=True):
        assert error(value, expected) < 1e-3


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_autocast_on_large_maps_loses_what_half_precision_loses(dtype, tolerance):
    """A sum over 200 x 336 positions leaves float16's range: the statistics must be computed in float32."""
    conv, made = nn.Conv2d(3, 64, 3, padding=1), layer(64)
    generator = torch.Generator().manual_seed(0)
    image, dy = torch.randn(1, 3, 200, 336, generator=generator) * 20, torch.randn(1, 64, 200, 336, generator=generator)
    with torch.autocast("cpu", dtype):
        x = conv(image)
        x.retain_grad()
        y = made(x)
    assert x.dtype == y.dtype == dtype
    (y.float() * dy).sum().backward()
    found = [y.detach(), x.grad, made.weight.grad, made.bias.grad]
    for value, expected in zip(found, reference(made, x.detach(), dy.to(dtype)), strict=True):
        assert error(value, expected) < tolerance
    assert conv.weight.grad.isfinite().all()


def test_gradient_scaler_keeps_gradients_that_float16_would_lose():
    """Gradients of 1e-8 are zero in float16, whose smallest number is 6e-8; the scaler's factor preserves them."""
    made = layer(64)
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, 2, 64, 9, 9, generator=generator).half()
    dy, tiny = dy.float(), 1e-8
    optimizer = torch.optim.SGD(made.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1 / tiny)
    with torch.autocast("cpu", torch.float16):
        loss = (made(x) * (dy * tiny)).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for value, expected in zip((made.weight.grad, made.bias.grad), reference(made, x, dy.half())[2:], strict=True):
        assert error(value / tiny, expected) < 1e-3


@pytest.mark.parametrize("block", [1, 100, 1000, 10**7])
@pytest.mark.parametrize("shape", [(5, 24, 6, 7), (2, 8, 31), (37, 16, 3, 3), (1, 32, 5)], ids=str)
def test_however_the_input_is_cut_into_blocks(shape, block, monkeypatch):
    monkeypatch.setattr(matmul, "_BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    made = layer(shape[1], 8).double()
    for value, expected in zip(gradients(made, x, dy), reference(made, x, dy), strict=True):
        assert error(value, expected) < 1e-12


@pytest.mark.skipif(not compat.onednn_available(), reason="this processor has no AVX-512, or torch no oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [100, 1000, 10**7])
def test_however_onednn_multiplies_blocks(block, dtype, monkeypatch):
    """The limits are lowered: by default oneDNN does not multiply matrices as small as these."""
    monkeypatch.setattr(matmul, "_BLOCK", block)
    monkeypatch.setattr(compat, "_SHORTEST", 1)
    monkeypatch.setattr(compat, "_LONGEST", 1)
    for shape in ((5, 24, 6, 7), (2, 8, 31), (37, 16, 3, 3), (1, 32, 5)):
        x, dy = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        made = layer(shape[1], 8)
        for value, expected in zip(gradients(made, x, dy), reference(made, x, dy), strict=True):
            assert error(value, expected) < (2e-5 if value.dtype == torch.float32 else 4e-3)


def test_an_expanded_gradient_and_a_sliced_input():
    x = torch.randn(4, 40, 6, 7, dtype=torch.float64)[::2, 3:35, :, 1:]
    made = layer(32, 8).double()
    dy = torch.ones((), dtype=torch.float64).expand(x.shape)
    for value, expected in zip(gradients(made, x, dy), reference(made, x, dy), strict=True):
        assert error(value, expected) < 1e-12


def test_same_bits_twice():
    x, dy = torch.randn(2, 3, 128, 30, 41)
    made = layer(128)
    for first, second in zip(gradients(made, x, dy), gradients(made, x, dy), strict=True):
        assert torch.equal(first, second)


def test_threads_do_not_share_buffers():
    inputs = [torch.randn(2, 64, 20, 20 + i) for i in range(4)]
    made = layer(64)
    expected = [made(x).detach() for x in inputs]
    wrong = []

    def work(i: int) -> None:
        for _ in range(10):
            if not torch.equal(made(inputs[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# memory


@pytest.mark.parametrize(
    ("shape", "limit"), [((2, 64, 100, 168), 1.1), ((2, 512, 25, 42), 1.1), ((512, 256, 7, 7), 1.6)], ids=str
)
def test_little_more_is_kept_for_backward_than_by_group_norm(shape, limit):
    x = torch.randn(shape, requires_grad=True)
    ours, group_norm = layer(shape[1]), nn.GroupNorm(32, shape[1])
    assert 0 < saved_bytes(lambda: ours(x), ours) <= limit * saved_bytes(lambda: group_norm(x), group_norm)


def test_a_relu_keeps_what_it_would_keep_by_itself():
    x = torch.randn(2, 64, 100, 168, requires_grad=True)
    fused, apart = layer(64), nn.Sequential(layer(64), nn.ReLU(inplace=True))
    assert saved_bytes(lambda: fused(x, relu=True), fused) == saved_bytes(lambda: apart(x), apart)


# choice of the backend


def test_the_backend_follows_solver_and_size(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT_SWITCH, raising=False)
    x = torch.randn(2, 64, 5, 5)
    assert choose_backend(x, 64) == choose_backend(x.double(), 64) == choose_backend(x.bfloat16(), 64) == "matmul"
    assert choose_backend(x[:0], 64) == "matmul"  # torch.compile may not know whether there are any
    assert choose_backend(x, 64, Solver("zca")) == choose_backend(x, 64, Solver(corr=True)) == "reference"


def test_inference_mode_leaves_nothing_behind():
    made = layer(64)
    for size in (9, 5, 12):
        x = torch.randn(2, 64, size, size)
        with torch.inference_mode():
            inferred = made(x)
        y = made(x.requires_grad_())
        y.sum().backward()
        assert torch.equal(y.detach(), inferred)


def test_functional_transforms_and_forward_mode():
    made = layer(16, 4).double()
    x, tangent = torch.randn(2, 3, 16, 5, 5, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(made, x)
    expected = (jacobian * tangent).sum((-4, -3, -2, -1))
    torch.testing.assert_close(torch.func.jvp(made, (x,), (tangent,))[1], expected)
    torch.testing.assert_close(torch.func.jacrev(made)(x), jacobian)
    torch.testing.assert_close(torch.func.vmap(made)(x[:, None])[:, 0], made(x))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(made(forward_ad.make_dual(x, tangent)))
    torch.testing.assert_close(dual.tangent, expected)


def test_the_shift_may_change_before_the_backward_pass():
    made = layer(16, 4)
    y = made(torch.randn(2, 16, 5, 5))
    with torch.no_grad():
        made.bias.add_(1)
    y.sum().backward()
    assert made.bias.grad.eq(50).all()


def test_an_output_that_is_not_used_has_no_gradient():
    made = layer(16, 4)
    x = torch.randn(2, 16, 5, 5, requires_grad=True)
    grads = torch.autograd.grad(Undefined.apply(made(x)), (x, made.weight), allow_unused=True)
    assert grads == (None, None)


class Undefined(torch.autograd.Function):
    """A result that does not depend on the input."""

    @staticmethod
    def forward(ctx, y):
        return y.sum()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_the_environment_forces_a_backend(monkeypatch):
    x = torch.randn(2, 64, 5, 5)
    monkeypatch.setenv(ENVIRONMENT_SWITCH, "reference")
    assert choose_backend(x, 64) == "reference"
    monkeypatch.setenv(ENVIRONMENT_SWITCH, "matmul")
    assert choose_backend(x, 64) == "matmul"
    assert choose_backend(x, 64, Solver("zca")) == "reference"


def test_a_choice_in_the_program_overrules_the_environment(monkeypatch):
    x = torch.randn(2, 64, 5, 5)
    monkeypatch.setenv(ENVIRONMENT_SWITCH, "matmul")
    with use_backend("reference"):
        assert choose_backend(x, 64) == "reference"
    assert choose_backend(x, 64) == "matmul"


@pytest.mark.parametrize("value", ["fast", "triton"])
def test_a_backend_that_cannot_be_forced_is_an_error(value, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_SWITCH, value)
    with pytest.raises(
        ValueError, match=f"{ENVIRONMENT_SWITCH} .'{value}'.: not a backend to force. Fix: unset it, or use"
    ):
        layer(64)(torch.randn(2, 64, 5, 5))


def test_the_backend_is_logged_once(caplog):
    op._log.cache_clear()
    with caplog.at_level(logging.DEBUG, "gw_detectron.layers"):
        made = layer(24, 8)
        for size in (5, 7):
            made(torch.randn(2, 24, size, size))
    lines = [record.getMessage() for record in caplog.records if "24 channels" in record.getMessage()]
    assert len(lines) == 1 and "backend matmul" in lines[0]


# torch's transforms


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_the_operator_keeps_torchs_rules(affine, channels_last, relu):
    x = torch.randn(2, 12, 4, 5, requires_grad=True)
    if channels_last:
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    weight, bias = (torch.rand(12, requires_grad=True) if affine else None for _ in range(2))
    torch.library.opcheck(torch.ops.gw_detectron.group_whiten, (x, weight, bias, 4, 5, 1e-5, relu, "matmul"))
    # the backward operator, which has no derivative, also with an empty batch
    x, weight = (None if tensor is None else tensor.detach() for tensor in (x, weight))
    y, mean, sigma = torch.ops.gw_detectron.group_whiten(x, weight, bias, 4, 5, 1e-5, relu, "matmul")
    y = y.detach() if relu else None
    arguments = (torch.randn_like(x), y, x, mean.detach(), sigma.detach(), weight, 5, "matmul")
    for part in (arguments, [each[:0] if i < 5 and each is not None else each for i, each in enumerate(arguments)]):
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.gw_detectron.group_whiten_backward, tuple(part), test_utils=checks)


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


def test_an_export_needs_no_operator_of_this_package():
    made = layer(64, 16).eval()
    x = torch.randn(2, 64, 6, 7)
    program = torch.export.export(made, (x,))
    assert not any("gw_detectron" in str(node.target) for node in program.graph.nodes)
    assert torch.allclose(program.module()(x), made(x), atol=1e-5)


def test_fake_and_meta_tensors_have_the_right_shape():
    made = layer(64, 16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = made(torch.empty(2, 64, 6, 7, dtype=torch.bfloat16, requires_grad=True))
        assert y.shape == (2, 64, 6, 7) and y.dtype == torch.bfloat16 and y.requires_grad
    assert made.to("meta")(torch.empty(2, 64, 6, 7, device="meta")).shape == (2, 64, 6, 7)


def test_flops_are_those_of_the_products():
    """Two products of depth g per element forward and three backward, plus the g x g products of the iteration."""
    x = torch.randn(3, 64, 10, 11, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(64, 16)(x).sum().backward()
    g, elements = 16, x.numel()
    assert counter.get_total_flops() == 5 * 2 * g * elements + (10 + 10 + 14) * 2 * g**3 * 3


def test_fvcore_counts_the_products():
    """fvcore traces the reference and counts multiplications: 3 products in each step but the first."""
    x, g = torch.randn(3, 64, 10, 11), 16
    counted = FlopCountAnalysis(layer(64, g), x).unsupported_ops_warnings(False)
    assert counted.total() == 2 * g * x.numel() + 4 * 3 * g**3 * 3


@pytest.mark.parametrize("relu", [True, False])
def test_second_derivatives_are_right(relu):
    made = layer(4, 2).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 5, dtype=torch.float64, generator=generator).requires_grad_()

    def whiten(*tensors):
        return op.group_whiten(tensors[0], 2, *tensors[1:], relu=relu)

    assert torch.autograd.gradcheck(whiten, (x, made.weight, made.bias))
    assert torch.autograd.gradgradcheck(whiten, (x, made.weight, made.bias))


@pytest.mark.parametrize("relu", [True, False])
def test_gradients_that_are_differentiated_again_stop_at_the_layer(relu):
    """Weight and input may depend on each other: in a layer used twice, or with parameters computed from the input."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 4, 5, generator=generator), *torch.randn(2, 4, generator=generator)]
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


def test_gradients_that_are_differentiated_again_under_autocast():
    made = layer(32, 8)
    x, dy = torch.randn(2, 2, 32, 5, 5)
    expected = reference(made, x, dy)[1]
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = torch.autograd.grad(made(x.requires_grad_()), x, dy, create_graph=True)
    assert error(found.detach(), expected) < 2e-5


@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("bias",), ("x", "bias")])
def test_only_some_gradients_are_wanted(wanted):
    made = layer(32, 8).double()
    x, dy = torch.randn(2, 3, 32, 5, 5, dtype=torch.float64)
    expected = dict(zip(("x", "weight", "bias"), reference(made, x, dy)[1:], strict=True))
    x.requires_grad_("x" in wanted)
    made.weight.requires_grad_("weight" in wanted)
    made.bias.requires_grad_("bias" in wanted)
    tensors = {"x": x, "weight": made.weight, "bias": made.bias}
    for name, value in zip(wanted, torch.autograd.grad(made(x), [tensors[n] for n in wanted], dy), strict=True):
        assert error(value, expected[name]) < 1e-12


def test_a_copied_layer_computes_the_same():
    made = layer(64)
    x = torch.randn(2, 64, 5, 5)
    assert torch.equal(copy.deepcopy(made)(x), made(x))
