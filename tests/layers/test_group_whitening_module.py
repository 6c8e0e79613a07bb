"""GroupWhitening2d as a module: errors, checkpoints, copies, compilation, DDP."""

import pickle
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gw_detectron.layers import GroupWhitening2d

from ..ops.cases import build, correlated
from ..ops.oracle import Setting

SOLVERS = ["newton", "zca"]


def features(*shape: int) -> torch.Tensor:
    return torch.from_numpy(correlated(shape)).float()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((64,), torch.float32), ((2, 5, 3, 64), torch.float32), ((2, 64, 5, 3), torch.complex64)],
)
def test_wrong_inputs_are_refused_by_value(shape, dtype):
    with pytest.raises(
        ValueError, match=re.escape(str(shape if dtype == torch.float32 else dtype))
    ):
        GroupWhitening2d(64)(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "memory_format", [torch.contiguous_format, torch.channels_last], ids=str
)
@pytest.mark.parametrize("shape", [(3, 24, 5, 7), (2, 24, 1, 1), (0, 24, 5, 7)], ids=str)
@pytest.mark.parametrize("solver", SOLVERS)
def test_its_relu_is_the_same_as_one_behind_it(solver, shape, memory_format, dtype):
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, *shape, generator=generator).to(dtype)
    results = []
    for relu in (True, False):
        layer = GroupWhitening2d(24, 8, solver=solver)
        with torch.no_grad():
            layer.bias.copy_(torch.linspace(-1, 1, 24))
        leaf = x.clone(memory_format=memory_format).requires_grad_()
        y = layer(leaf, relu=True) if relu else F.relu_(layer(leaf))
        results.append(
            (y.detach(), *torch.autograd.grad(y, (leaf, layer.weight, layer.bias), dy))
        )
    fused, apart = results
    assert torch.equal(fused[0], apart[0])
    for one, other in zip(fused, apart, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("solver", SOLVERS)
def test_copies_compute_the_same(solver):
    layer, x = build(64, Setting(16, 3, 1e-3, solver), torch.float32), features(2, 64, 7, 5)
    assert sorted(layer.state_dict()) == ["bias", "weight"]
    loaded = GroupWhitening2d(64, 16, 3, 1e-3, solver=solver)
    loaded.load_state_dict(layer.state_dict())
    for twin in (loaded, pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))
        assert twin.weight.data_ptr() != layer.weight.data_ptr()


@pytest.mark.parametrize("shape", [(1, 64, 1, 1), (1, 64), (1, 64, 1)], ids=str)
def test_affine_with_broadcast_dimensions_is_loaded(shape):
    model = nn.Sequential(nn.Identity(), build(64, Setting(16), torch.float32))
    values = features(2, 64)
    state = {"1.weight": values[0].reshape(shape), "1.bias": values[1].reshape(shape)}
    result = model.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(model[1].weight, values[0]) and torch.equal(model[1].bias, values[1])
    assert state["1.weight"].shape == shape, "the caller's checkpoint stays as it was"


@pytest.mark.parametrize(
    "shape", [(63,), (1, 128, 1, 1), (64, 1, 1, 1), (8, 8), (1,), ()], ids=str
)
def test_affine_of_another_shape_is_refused(shape):
    layer = GroupWhitening2d(64)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        layer.load_state_dict({"weight": torch.ones(shape), "bias": torch.zeros(64)})


def test_compiled_module_of_another_solver_trains():
    """The aot_eager backend traces forward and backward as inductor does, without its code generation."""
    torch._dynamo.reset()
    layer = build(64, Setting(16, solver="zca"), torch.float32)
    compiled = torch.compile(layer, backend="aot_eager")
    for shape in ((2, 64, 9, 7), (3, 64, 5, 11)):
        x = features(*shape).requires_grad_()
        expected = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight))
        got = torch.autograd.grad(compiled(x).square().sum(), (x, layer.weight))
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo"
)
def test_distributed_training_goes_on_after_an_empty_batch(tmp_path):
    """DDP stops at the second step if a parameter got no gradient in the first: a process without any RoI."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = DistributedDataParallel(
            nn.Sequential(nn.Conv2d(8, 32, 1), GroupWhitening2d(32))
        )
        for batch in (0, 2, 0):
            model.zero_grad()
            model(torch.randn(batch, 8, 7, 7)).sum().backward()
            assert all(
                p.grad is not None and p.grad.isfinite().all() for p in model.parameters()
            )
    finally:
        dist.destroy_process_group()
