"""GroupWhitening2d as a module: errors, checkpoints, copies, compilation, DDP."""

import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gw_detectron.layers import GroupWhitening2d

from ..ops.cases import build, features, gradients, randn
from ..ops.oracle import Setting

SOLVERS = ["newton", "zca"]


@pytest.mark.parametrize(
    ("shape", "dtype", "named"),
    [
        ((64,), torch.float32, r"\(64,\)"),
        ((2, 5, 3, 64), torch.float32, r"\(2, 5, 3, 64\)"),
        ((2, 64, 5, 3), torch.complex64, "complex64"),
    ],
)
def test_wrong_inputs_are_refused_by_value(shape, dtype, named):
    with pytest.raises(ValueError, match=named):
        GroupWhitening2d(64)(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last], ids=str
)
@pytest.mark.parametrize(
    "shape", [(3, 24, 5, 7), (2, 24, 1, 1), (0, 24, 5, 7)], ids=str
)
@pytest.mark.parametrize("solver", SOLVERS)
def test_its_relu_is_the_same_as_one_behind_it(solver, shape, memory_format, dtype):
    x, dy = randn(2, *shape).to(dtype)
    leaf = x.clone(memory_format=memory_format).requires_grad_()
    layer = build(24, Setting(8, solver=solver), torch.float32)
    inputs = leaf, layer.weight, layer.bias

    y = layer(leaf, relu=True)
    fused = torch.autograd.grad(y, inputs, dy)

    expected = F.relu_(layer(leaf))
    assert torch.equal(y, expected)
    torch.testing.assert_close(fused, torch.autograd.grad(expected, inputs, dy))


@pytest.mark.parametrize("solver", SOLVERS)
def test_copies_compute_the_same(solver):
    layer = build(64, Setting(16, 3, 1e-3, solver))
    x = features(2, 64, 7, 5)
    loaded = GroupWhitening2d(64, 16, 3, 1e-3, solver=solver).double()

    loaded.load_state_dict(layer.state_dict())
    unpickled = pickle.loads(pickle.dumps(layer))

    assert sorted(layer.state_dict()) == ["bias", "weight"]
    for twin in (loaded, unpickled):
        assert torch.equal(twin(x), layer(x))
        assert twin.weight.data_ptr() != layer.weight.data_ptr()


@pytest.mark.parametrize("shape", [(1, 64, 1, 1), (1, 64), (1, 64, 1)], ids=str)
def test_affine_with_broadcast_dimensions_is_loaded(shape):
    model = nn.Sequential(nn.Identity(), build(64, Setting(16)))
    weight, bias = features(2, 64)
    state = {"1.weight": weight.reshape(shape), "1.bias": bias.reshape(shape)}

    model.load_state_dict(state)

    assert torch.equal(model[1].weight, weight)
    assert torch.equal(model[1].bias, bias)
    assert state["1.weight"].shape == shape, "the caller's checkpoint stays as it was"


@pytest.mark.parametrize(
    "shape", [(63,), (1, 128, 1, 1), (64, 1, 1, 1), (8, 8), (1,), ()], ids=str
)
def test_affine_of_another_shape_is_refused(shape):
    state = {"weight": torch.ones(shape), "bias": torch.zeros(64)}
    with pytest.raises(RuntimeError, match="weight"):
        GroupWhitening2d(64).load_state_dict(state)


def test_compiled_module_of_another_solver_trains():
    """The aot_eager backend traces forward and backward as inductor does, without its code generation."""
    torch._dynamo.reset()
    layer = build(64, Setting(16, solver="zca"))
    compiled = torch.compile(layer, backend="aot_eager")

    for shape in ((2, 64, 9, 7), (3, 64, 5, 11)):
        x = features(*shape).requires_grad_()
        y = compiled(x)
        found = torch.autograd.grad(y, (x, layer.weight, layer.bias), y.detach())

        expected = gradients(layer, x, y.detach())
        torch.testing.assert_close([y, *found], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo"
)
def test_distributed_training_goes_on_after_an_empty_batch(tmp_path):
    """DDP stops at the second step if a parameter got no gradient in the first: a process without any RoI."""
    network = nn.Sequential(nn.Conv2d(8, 32, 1), GroupWhitening2d(32))
    store = f"file://{tmp_path}/store"

    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(network)
        for batch in (0, 2, 0):
            model.zero_grad()
            model(torch.randn(batch, 8, 7, 7)).sum().backward()
            for parameter in model.parameters():
                assert parameter.grad.isfinite().all()
    finally:
        dist.destroy_process_group()
