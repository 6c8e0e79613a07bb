"""The custom operator on a CUDA device: the proofs of ``test_op`` and ``test_matmul``, and those that need a GPU."""

import pytest
import torch

from benchmarks.layer_benchmark import SHAPES
from gw_detectron.layers import group_whiten
from gw_detectron.ops.group_whitening import triton as triton_kernels
from gw_detectron.ops.group_whitening.op import choose_backend

from .cases import assert_errors_below, error, gradients, layer, randn, reference

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available()
        or not triton_kernels.supported(torch.empty(1, 8, 2, 2, device=DEVICE), 8),
        reason="there is no NVIDIA GPU from Ampere on, or no Triton",
    ),
]


@pytest.fixture(autouse=True)
def float32_is_float32():
    """Disallow tf32, which some containers allow for all products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def inputs(shape, dtype=torch.float32, memory_format=torch.contiguous_format):
    """Return x, with a mean, and dy."""
    x = randn(*shape) * 2 + 1
    dy = randn(*shape, seed=1)
    return [tensor.to(DEVICE, dtype, memory_format=memory_format) for tensor in (x, dy)]


def on_device(channels, groups=64, **options):
    return layer(channels, groups, **options).to(DEVICE)


@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last], ids=str
)
@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float32, 2e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_y_and_gradients_are_those_of_float64(shape, dtype, limit, memory_format):
    x, dy = inputs(shape, dtype, memory_format)
    made = on_device(shape[1])
    assert choose_backend(x, 64) == "triton"

    values = gradients(made, x, dy)

    assert values[0].is_contiguous(memory_format=memory_format)
    assert_errors_below(limit, values, reference(made, x, dy))


@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last], ids=str
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
    ids=str,
)
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((2, 256, 50, 84), 64),
        ((256, 256, 7, 7), 64),
        ((512, 128, 3, 5), 128),
        ((512, 130, 1, 2), 65),
    ],
    ids=str,
)
def test_its_relu_is_the_same_as_one_behind_it(
    shape, groups, dtype, tolerance, memory_format
):
    """Also with few positions, where a tile is smaller than a program, and with dx written in place of dy."""
    x, dy = inputs(shape, dtype, memory_format)
    made = on_device(shape[1], groups)
    y = made(x)
    _, *expected = gradients(made, x, dy * (y > 0))

    fused, *found = gradients(made, x, dy, relu=True)

    assert torch.equal(fused, y.relu())
    assert_errors_below(tolerance, found, expected)


@pytest.mark.parametrize("size", [(400, 672), (800, 1344)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str
)
def test_autocast_and_a_gradient_scaler_on_large_maps(dtype, tolerance, size):
    """A sum over so many positions leaves float16's range: the statistics must be computed in float32."""
    conv = torch.nn.Conv2d(3, 64, 3, padding=1).to(DEVICE)
    made = on_device(64)
    image, _ = inputs((1, 3, *size))
    optimizer = torch.optim.SGD([*conv.parameters(), *made.parameters()], 0.1)
    scaler = torch.amp.GradScaler(DEVICE)
    before = made.weight.detach().clone()

    with torch.autocast(DEVICE, dtype):
        x = conv(20 * image)
        y = made(x)
        loss = y.float().square().mean()

    assert x.dtype == y.dtype == dtype
    with torch.no_grad():
        expected = group_whiten(
            x.double(), 64, made.weight.double(), made.bias.double()
        )
    assert error(y, expected) < tolerance

    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    # no gradient was infinite or NaN, which would halve it and skip the step
    assert scaler.get_scale() >= scale
    assert not torch.equal(made.weight, before)


def test_same_bits_twice():
    x, dy = inputs((2, 256, 50, 84))
    made = on_device(256)
    torch.use_deterministic_algorithms(True)
    try:
        first = gradients(made, x, dy)
        second = gradients(made, x, dy)
    finally:
        torch.use_deterministic_algorithms(False)

    assert all(map(torch.equal, first, second))


def test_a_cuda_graph_replays_forward_and_backward():
    x, dy = inputs((2, 128, 50, 84))
    x.requires_grad_()
    made = on_device(128)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # Triton compiles, and gradients exist before they are captured
        for _ in range(3):
            made(x).backward(dy)
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    made.zero_grad(set_to_none=True)
    x.grad = None
    with torch.cuda.graph(graph):
        y = made(x)
        y.backward(dy)
    with torch.no_grad():
        x.copy_(3 * x.flip(0) - 1)
    graph.replay()

    results = y, x.grad, made.weight.grad, made.bias.grad
    assert all(map(torch.equal, results, gradients(made, x.detach(), dy)))


def test_compiles_in_one_graph():
    x, dy = inputs((2, 64, 30, 40))
    made = on_device(64)
    leaf = x.clone().requires_grad_()

    y = torch.compile(made, fullgraph=True)(leaf)
    (dx,) = torch.autograd.grad(y, leaf, dy)

    assert_errors_below(1e-6, (y, dx), gradients(made, x, dy)[:2])
