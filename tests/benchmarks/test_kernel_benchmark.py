"""Benchmark of the kernels: what is compiled and timed, bytes, refused settings."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import command as benchmark
from benchmarks import compiled_kernels, kernel_benchmark
from benchmarks.compiled_kernels import CompiledKernel, compiler_tool, kernel_name, layer_launches
from benchmarks.kernel_benchmark import KernelSettings, moved_bytes, plan_kernels, run_kernels
from benchmarks.table import plot, read_csv, summary, write_csv
from gw_detectron.errors import ConfigError, MissingPackageError, UserError
from gw_detectron.ops.group_whitening.triton import launch
from gw_detectron.ops.group_whitening.triton.compiler import triton

META = torch.device("meta")
SHAPE = (2, 128, 20, 24)
MIB = 2**20
needs_triton = pytest.mark.skipif(triton is None, reason="Triton 3.3 or newer is not installed")


def settings(**changes):
    return KernelSettings(META, 90, **{"shapes": (SHAPE,), "dtypes": ("fp32",), **changes})


@pytest.fixture
def compiled(monkeypatch):
    """Do not compile; one of the settings cannot be compiled."""

    def compile_launch(launch, capability):
        assert capability == 90
        if launch.stages == 4:
            raise RuntimeError("too many stages\nand more")
        return CompiledKernel(kernel_name(launch), 99, 8 * (launch.warps == 2), 4096)

    monkeypatch.setattr(kernel_benchmark, "compile_launch", compile_launch)


@needs_triton
@pytest.mark.parametrize("relu", [False, True])
def test_bytes_of_a_layer_are_those_of_group_normalization_and_small_matrices(relu):
    x = torch.empty((16, 64, 200, 336), device=META)
    launches = layer_launches(x, 64, relu=relu)
    names = ["moments", "merge", "newton", "apply", "products", "newton", "apply_backward"]
    assert [kernel_name(launch) for launch in launches] == names
    passes = [1, 0, 0, 2, 4 if relu else 2, 0, 3]
    assert launches[-1].arguments["IN_PLACE"] is relu  # the masked gradient is in the memory of dx
    for made, count in zip(launches, passes, strict=True):
        small = moved_bytes(made) - count * 4 * x.numel()
        assert 0 <= small < 10 * MIB, kernel_name(made)


@needs_triton
def test_a_program_of_the_statistics_has_at_most_64_tiles():
    """Tensor cores round its sums toward zero."""
    moments, merge, *_ = layer_launches(torch.empty((64, 64, 200, 336), device=META), 64)
    splits = moments.grid[1]
    assert moments.arguments["per_split"] == 64 and merge.arguments["splits"] == splits
    assert (splits - 1) * 64 < moments.arguments["tiles"] <= splits * 64


@needs_triton
def test_a_grid_is_not_larger_than_cuda_allows():
    for made in layer_launches(torch.empty((1, 256, 1500, 1500), device=META), 1):
        assert made.grid[1] <= 65535, kernel_name(made)


@needs_triton
def test_launches_can_be_collected_without_running_them(monkeypatch):
    monkeypatch.setattr(launch.Launch, "run", lambda launch: pytest.fail("ran"))
    monkeypatch.setattr(torch.Tensor, "is_meta", False)
    assert len(layer_launches(torch.empty(SHAPE, device=META), 64, execute=False)) == 9


@needs_triton
def test_a_layer_takes_few_other_operations():
    """Each is a launch on a GPU; docs/performance.md counts them."""

    class Count(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            allocates = "empty" in func.__name__ or "ones" in func.__name__ or "unsafe_view" in func.__name__
            self.found += not (func.is_view or allocates)
            return func(*args, **(kwargs or {}))

    for channels, groups, samples, most in (
        (64, 64, 16, 12),
        (256, 64, 16, 15),
        (2048, 64, 16, 15),
        (256, 1, 16, 15),
        (256, 64, 512, 17),
    ):
        with Count() as count:
            layer_launches(torch.empty((samples, channels, 50, 84), device=META), groups)
        assert count.found <= most


@needs_triton
def test_compiling_alone(compiled, tmp_path):
    table = run_kernels(settings(sweep=True), "the command")
    assert table.header["machine"] == "none, compiled for sm_90" and table.header["command"] == "the command"
    first = table.rows[0]
    assert (first["kernel"], first["setting"], first["registers"], first["stack"]) == ("1 moments", "", 99, 0)
    assert first["shared_kib"] == 4 and "median_ms" not in first
    by_setting = {row["setting"]: row for row in table.rows if row["kernel"] == "1 moments"}
    assert {"tile_bytes=16384", "min_tiles=8", "warps=2", "warps=8", "stages=1"} <= by_setting.keys()
    assert "warps=4" not in by_setting  # the one of the code
    assert by_setting["stages=4"]["note"] == "RuntimeError: too many stages"
    assert by_setting["min_tiles=8"]["programs"] < first["programs"]
    write_csv(table, tmp_path / "t.csv")
    assert len(read_csv(tmp_path / "t.csv").rows) == len(table.rows) == len(plan_kernels(settings(sweep=True)).rows)
    plot(table, tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 5000
    assert "too many stages" in summary(table)
    assert launch._tuning is None


@needs_triton
def test_settings_are_timed_beside_a_copy_of_as_many_bytes(compiled, monkeypatch):
    """The kernels are stood in for by functions of the CPU."""
    from triton.runtime.errors import OutOfResources  # no RuntimeError

    launched = []

    class Kernel:
        def __init__(self, kernel):
            self.fn = kernel.fn

        def __getitem__(self, grid):
            def run(num_warps, num_stages, **arguments):
                if num_warps == 8 and "newton" not in self.fn.__name__:
                    raise OutOfResources(120_000, 101_376, "shared memory")
                launched.append((self.fn.__name__, num_warps, num_stages))

            return run

    def launches(x, groups, iters, execute=True):
        found = layer_launches(x.to(META), groups, iters=iters)
        return [launch._replace(kernel=Kernel(launch.kernel), like=x) for launch in found]

    monkeypatch.setattr(kernel_benchmark, "layer_launches", launches)
    monkeypatch.setattr(kernel_benchmark, "supported", lambda x, groups: True)
    settings = KernelSettings(torch.device("cpu"), 90, (SHAPE,), ("fp32",), repeats=3, sweep=True)
    table = run_kernels(settings)
    rows = {(row["kernel"], row["setting"]): row for row in table.rows}
    assert rows["4 apply", ""]["to_copy"] > 0 and rows["4 apply", ""]["repeats"] == 3
    assert rows["4 apply", "warps=8"]["note"].startswith("OutOfResources: out of resource: shared memory")
    assert "to_copy" not in rows["4 apply", "warps=8"] and "to_copy" not in rows["4 apply", "stages=4"]
    assert ("_apply", 2, 2) in launched and ("_apply", 4, 3) in launched


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cpu"], r"--device \('cpu'\): the kernels need an NVIDIA GPU .* Fix: give --compile-only 90"),
        (["--compile-only", "90", "--groups", "48"], r"--groups \(48\): does not divide 64 channels"),
        (["--compile-only", "90", "--repeats", "0"], r"--repeats \(0\)"),
        (["--compile-only", "9"], r"--compile-only \(9\): too small. Fix: give 70 or more"),
    ],
)
def test_bad_flags_are_refused(words, message, tmp_path):
    args = benchmark.get_parser().parse_args(["kernels", *words, "--output", str(tmp_path / "x")])
    with pytest.raises(ConfigError, match=message):
        benchmark.main(args)
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_is_not_there(monkeypatch):
    monkeypatch.setattr(compiled_kernels, "triton", None)
    with pytest.raises(MissingPackageError, match=r"ptxas: not found\. Fix: pip install triton"):
        compiler_tool("ptxas")
    assert issubclass(MissingPackageError, UserError)


@needs_triton
def test_the_command_compiles_for_a_gpu_that_is_not_there(tmp_path, capsys, monkeypatch):
    try:
        compiler_tool("ptxas"), compiler_tool("cuobjdump")
    except MissingPackageError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "kernels"])
    flags = ["--compile-only", "90", "--shapes", "2x64x16x16", "--dtypes", "fp32", "--output", str(tmp_path / "k")]
    benchmark.main(benchmark.get_parser().parse_args(["kernels", *flags]))
    rows = read_csv(tmp_path / "k.csv").rows
    assert len(rows) == 7 and all(row["registers"] > 16 and row["stack"] == 0 for row in rows)
    assert "7 apply_backward" in capsys.readouterr().out
