"""The custom operator on a CUDA device: the proofs of ``test_op`` and ``test_matmul``, and those that need a GPU."""

import pytest
import torch

from benchmarks.layer_benchmark import SHAPES
from gw_detectron.layers import group_whiten
from gw_detectron.ops.group_whitening import triton as triton_kernels
from gw_detectron.ops.group_whitening.op import choose_backend

from .cases import error, gradients, layer, reference

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
    generator = torch.Generator().manual_seed(0)
    pair = (
        torch.randn(shape, generator=generator) * 2 + 1,
        torch.randn(shape, generator=generator),
    )
    return [tensor.to(DEVICE, dtype, memory_format=memory_format) for tensor in pair]


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
    found = gradients(made, x, dy)
    assert found[0].is_contiguous(memory_format=memory_format)
    for value, expected in zip(found, reference(made, x, dy), strict=True):
        assert error(value, expected) < limit


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
def test_its_relu_is_the_same_as_one_behind_it(shape, groups, dtype, tolerance, memory_format):
    """Also with few positions, where a tile is smaller than a program, and with dx written in place of dy."""
    x, dy = inputs(shape, dtype, memory_format)
    fused = gradients(on_device(shape[1], groups), x, dy, relu=True)
    plain = on_device(shape[1], groups)
    y = plain(x)
    assert torch.equal(fused[0], y.relu())
    for value, expected in zip(fused[1:], gradients(plain, x, dy * (y > 0))[1:], strict=True):
        assert error(value, expected.double()) < tolerance


@pytest.mark.parametrize("size", [(400, 672), (800, 1344)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str
)
def test_autocast_and_a_gradient_scaler_on_large_maps(dtype, tolerance, size):
    """A sum over so many positions leaves float16's range: the statistics must be computed in float32."""
    conv, made = torch.nn.Conv2d(3, 64, 3, padding=1).to(DEVICE), on_device(64)
    image = inputs((1, 3, *size))[0] * 20
    optimizer = torch.optim.SGD([*conv.parameters(), *made.parameters()], 0.1)
    scaler = torch.amp.GradScaler(DEVICE)
    before = made.weight.detach().clone()
    with torch.autocast(DEVICE, dtype):
        x = conv(image)
        y = made(x)
        loss = y.float().square().mean()
    assert x.dtype == y.dtype == dtype
    with torch.no_grad():
        expected = group_whiten(
            x.double(), 64, weight=made.weight.double(), bias=made.bias.double()
        )
    assert error(y, expected) < tolerance
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    assert (
        scaler.get_scale() >= scale
    )  # no gradient was infinite or NaN, which would halve it and skip the step
    assert not torch.equal(made.weight, before)


def test_same_bits_twice():
    x, dy = inputs((2, 256, 50, 84))
    made = on_device(256)
    torch.use_deterministic_algorithms(True)
    try:
        for first, second in zip(gradients(made, x, dy), gradients(made, x, dy), strict=True):
            assert torch.equal(first, second)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_cuda_graph_replays_forward_and_backward():
    x, dy = inputs((2, 128, 50, 84))
    made, x = on_device(128), x.requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # Triton compiles, and gradients exist before they are captured
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
    expected = gradients(made, x.detach(), dy)
    for value, wanted in zip(
        (y, x.grad, made.weight.grad, made.bias.grad), expected, strict=True
    ):
        assert torch.equal(value, wanted)


def test_compiles_in_one_graph():
    x, dy = inputs((2, 64, 30, 40))
    made = on_device(64)
    compiled = torch.compile(made, fullgraph=True)
    leaf = x.clone().requires_grad_()
    y = compiled(leaf)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    for value, expected in zip((y, dx), gradients(made, x, dy), strict=False):
        assert error(value, expected) < 1e-6
