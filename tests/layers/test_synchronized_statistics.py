"""Batch whitening over two processes equals batch whitening of the joint batch."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gw_detectron.layers import BatchWhitening2d

from ..ops.cases import correlated

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")

#: number of the five samples in the first process
SHARES = [2, 0, 5]
OPTIONS = [
    {},
    {"solver": "zca", "running": "covariance", "corr": True},
    {"solver": "cholesky"},
    {"rotation": "cayley", "solver": "zca_max"},
]


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return five samples, whose mean is several deviations, and a weighting of the output."""
    return torch.from_numpy(correlated((5, 7, 5, 3))).float() + 3, torch.from_numpy(correlated((5, 7, 5, 3), 1)).float()


def layers() -> list[BatchWhitening2d]:
    made = [BatchWhitening2d(7, 3, sync=True, eps=1e-3, **options) for options in OPTIONS]
    rng = torch.Generator().manual_seed(0)
    for layer in made:
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=rng) + 0.5)
    return made


def step(layer: BatchWhitening2d, x: torch.Tensor, weighting: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return output, gradients and averages after a step."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * weighting).sum().backward()
    found = {"output": y.detach(), "input": x.grad}
    found |= {f"gradient of {name}": parameter.grad for name, parameter in layer.named_parameters()}
    return found | dict(layer.named_buffers())


def one_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        x, weighting = samples()
        found = []
        for share in SHARES:
            mine = slice(0, share) if rank == 0 else slice(share, None)
            found += [step(layer, x[mine], weighting[mine]) for layer in layers()]
        # evaluation and sync=False do not wait for other processes
        if rank == 0:
            BatchWhitening2d(7, 3)(x)
            BatchWhitening2d(7, 3, sync=True).eval()(x)
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    mp.start_processes(one_process, (str(folder),), nprocs=2, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_two_processes_are_one_with_the_joint_batch(two_processes, share, options):
    index = SHARES.index(share) * len(OPTIONS) + OPTIONS.index(options)
    first, second = (found[index] for found in two_processes)
    expected = step(copy.deepcopy(layers()[OPTIONS.index(options)]), *samples())
    for name, value in expected.items():
        if name in ("output", "input"):
            found = torch.cat((first[name], second[name]))
        elif name.startswith("gradient"):
            found = first[name] + second[name]  # the gradient of the joint loss; DDP takes the average instead
        else:
            found = first[name]
            assert torch.equal(found, second[name]), "the averages of both processes are the same"
        difference = (found - value).abs().max() / value.abs().max().clamp_min(1e-3)
        assert difference < 1e-5, f"{name} is off by {difference:.1e} of its largest value"
