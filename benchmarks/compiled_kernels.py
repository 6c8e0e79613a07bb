"""Registers and shared memory of Triton kernels, also for a GPU that is not there."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gw_detectron.errors import MissingPackageError
from gw_detectron.ops.group_whitening import triton as kernels
from gw_detectron.ops.group_whitening.triton.compiler import triton
from gw_detectron.ops.group_whitening.triton.plans import Launch, recorded

_TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


class CompiledKernel(NamedTuple):
    """What a program of a kernel takes.

    Args:
        kernel: its name.
        registers: of a thread.
        stack: bytes of a thread that did not fit the registers.
        shared: bytes of shared memory.
    """

    kernel: str
    registers: int
    stack: int
    shared: int


def layer_launches(
    x: Tensor, groups: int, *, iters: int = 5, relu: bool = False, execute: bool = True
) -> list[Launch]:
    """Return the launches of a layer with affine parameters, forward and backward, in their order.

    Args:
        x: on a GPU, where they run, or a meta tensor.
        groups: g.
        iters: T.
        relu: whether a ReLU is fused.
        execute: run them; otherwise the tensors between them are not initialized.
    """
    weight = torch.ones(x.shape[1], device=x.device)
    dy = torch.ones_like(x)
    with torch.no_grad(), recorded(execute=execute) as recording:
        solution = kernels.solution_for(x, groups, iters)
        y, mean, sigma = kernels.forward(
            x, weight, weight, groups, iters, 1e-5, relu, solution
        )
        kernels.backward(
            dy, y if relu else None, x, mean, sigma, weight, iters, solution
        )
    return recording.launches


def kernel_name(launch: Launch) -> str:
    """Return the name of a launched kernel."""
    return launch.kernel.fn.__name__.lstrip("_")


def compile_launch(launch: Launch, capability: int) -> CompiledKernel:
    """Compile the kernel of a launch for a compute capability, e.g. 90.

    Raises:
        MissingPackageError: Triton or a tool of its compiler is not installed.
    """
    compiler_tool("ptxas")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        signature[parameter.name] = "i32"
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    binary = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=options
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [str(compiler_tool("cuobjdump")), "--dump-resource-usage", file.name]
        usage = subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (
        int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK")
    )
    return CompiledKernel(kernel_name(launch), registers, stack, binary.metadata.shared)


def compiler_tool(name: str) -> Path:
    """Return the path of a program of CUDA's compiler: the one in Triton's package, or the installed one.

    Raises:
        MissingPackageError: there is none.
    """
    place = (
        Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
        if triton
        else None
    )
    if place is not None and place.exists():
        return place
    found = shutil.which(name)
    if triton is None or found is None:
        raise MissingPackageError(
            f"{name}: not found. Fix: pip install triton, on Linux, or install CUDA's compiler."
        )
    return Path(found)
