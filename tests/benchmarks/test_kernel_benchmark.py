"""Benchmark of the kernels: what is compiled and timed, bytes, refused settings."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import command as benchmark
from benchmarks import kernel_benchmark
from benchmarks.compiled_kernels import (
    CompiledKernel,
    compiler_tool,
    kernel_name,
    layer_launches,
)
from benchmarks.kernel_benchmark import measure_kernels, moved_bytes
from gw_detectron.errors import MissingPackageError
from gw_detectron.ops.group_whitening.triton import tiling
from gw_detectron.ops.group_whitening.triton.compiler import triton

from .csv_files import read_rows

META = torch.device("meta")
SHAPE = (2, 128, 20, 24)
MIB = 2**20
needs_triton = pytest.mark.skipif(
    triton is None, reason="Triton 3.3 or newer is not installed"
)


@pytest.fixture
def compiled(monkeypatch):
    """Do not compile; one of the settings cannot be compiled."""

    def compile_launch(launch, capability):
        assert capability == 90
        if launch.stages == 1 and "newton" not in kernel_name(launch):
            raise RuntimeError("too few stages\nand more")
        return CompiledKernel(kernel_name(launch), 99, 8 * (launch.warps == 2), 4096)

    monkeypatch.setattr(kernel_benchmark, "compile_launch", compile_launch)


@needs_triton
@pytest.mark.parametrize("relu", [False, True])
def test_bytes_of_a_layer_are_those_of_group_normalization_and_small_matrices(relu):
    x = torch.empty((16, 64, 200, 336), device=META)
    launches = layer_launches(x, 64, relu=relu)
    # the others move small matrices
    passes = {
        "moments": 1,
        "apply": 2,
        "products": 4 if relu else 2,
        "apply_backward": 3,
    }
    assert passes.keys() < {kernel_name(launch) for launch in launches}
    # the masked gradient is in the memory of dx
    assert launches[-1].arguments["IN_PLACE"] is relu
    for launch in launches:
        name = kernel_name(launch)
        activations = passes.get(name, 0) * 4 * x.numel()
        assert 0 <= moved_bytes(launch) - activations < 10 * MIB, name


@needs_triton
def test_a_program_of_the_statistics_has_at_most_64_tiles():
    """Tensor cores round its sums toward zero."""
    moments, merge, *_ = layer_launches(
        torch.empty((64, 64, 200, 336), device=META), 64
    )

    _, splits = moments.grid
    assert moments.arguments["per_split"] == 64
    assert merge.arguments["splits"] == splits
    assert (splits - 1) * 64 < moments.arguments["tiles"] <= splits * 64


@needs_triton
def test_a_grid_is_not_larger_than_cuda_allows():
    for launch in layer_launches(torch.empty((1, 256, 1500, 1500), device=META), 1):
        assert launch.grid[1] <= 65535, kernel_name(launch)


@needs_triton
def test_a_layer_takes_few_other_operations():
    """Each is a launch on a GPU; docs/performance.md counts them."""

    class Count(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            allocates = re.search("empty|ones|unsafe_view", func.__name__)
            if not func.is_view and not allocates:
                self.operations += 1
            return func(*args, **(kwargs or {}))

    sizes = (
        (64, 64, 16, 12),
        (256, 64, 16, 15),
        (2048, 64, 16, 15),
        (256, 1, 16, 15),
        (256, 64, 512, 17),
    )
    for channels, groups, samples, most in sizes:
        with Count() as count:
            layer_launches(
                torch.empty((samples, channels, 50, 84), device=META), groups
            )
        assert count.operations <= most


@needs_triton
def test_compiling_alone_tells_registers_spills_and_settings(compiled):
    rows = list(measure_kernels([SHAPE], ["fp32"], 64, 5, 20, META, 90, tune=True))

    first = rows[0]
    assert first["kernel"] == "1 moments"
    assert first["setting"] == ""
    assert first["registers"] == 99
    assert first["stack"] == 0
    assert first["shared_kib"] == 4
    assert "median_ms" not in first
    by_setting = {row["setting"]: row for row in rows if row["kernel"] == "1 moments"}
    assert {"min_tiles=8", "warps=2", "warps=8", "stages=1"} <= by_setting.keys()
    assert "warps=4" not in by_setting  # the one of the code
    assert by_setting["stages=1"]["note"] == "RuntimeError: too few stages"
    assert by_setting["min_tiles=8"]["programs"] < first["programs"]
    assert tiling._tuning is None


@needs_triton
def test_the_command_compiles_for_a_gpu_that_is_not_there(tmp_path, capsys):
    try:
        compiler_tool("ptxas"), compiler_tool("cuobjdump")
    except MissingPackageError as error:
        pytest.skip(str(error))
    flags = [
        "--compile-only",
        "90",
        "--shapes",
        "2x64x16x16",
        "--dtypes",
        "fp32",
        "--output",
        str(tmp_path / "k"),
    ]

    benchmark.main(benchmark.get_parser().parse_args(["kernels", *flags]))

    rows = read_rows(tmp_path / "k.csv")
    for row in rows:
        assert float(row["registers"]) > 16
        assert float(row["stack"]) >= 0
    assert rows[-1]["kernel"].endswith("apply_backward")
    assert "apply_backward" in capsys.readouterr().out
