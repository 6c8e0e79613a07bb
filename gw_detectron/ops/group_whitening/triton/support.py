"""What device and dtype decide: whether the kernels run, and in which precision they multiply."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from .compiler import VERSION, tl, triton
from .device_functions import INTERPRETED

#: with more groups, the covariance of a program does not fit its registers
MAX_GROUPS = 128
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

#: limit of the distance between two elements of a sample. Kernels compute offsets in 32 bits, also
#: those of masked columns, which lie up to a tile behind the last element.
MAX_EXTENT = 2**31 - 2**16
#: compute capability -> first version of Triton whose code is right. Older ones raise, abort the
#: process, or race: Triton 3.6 on sm_100 (triton-lang/triton#9871). On sm_103, 3.7 still does
#: (#10590), and nobody has run a later one.
_FIRST_VERSION = {(10, 0): (3, 7), (10, 3): (99,), (11, 0): (3, 8), (12, 1): (3, 6)}
#: multiprocessors of a device that is not there (meta tensors): those of an H100
_META_PROCESSORS = 132


def supported(x: Tensor, groups: int) -> bool:
    """Whether the kernels accept the device, dtype, size and groups."""
    return (
        triton is not None
        and (INTERPRETED or compiles_for(x.device))
        and 1 <= groups <= MAX_GROUPS
        and x.dtype in DTYPES
        and prod(x.shape[1:]) < MAX_EXTENT
    )


def compiles_for(device: torch.device) -> bool:
    """Whether this Triton compiles the kernels for a device.

    It must be of NVIDIA from Ampere on, which multiplies tf32.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    # fake tensors may be on a GPU that is not there
    if not torch.cuda.is_available():
        return False

    capability = torch.cuda.get_device_capability(device)
    return capability >= (8, 0) and _FIRST_VERSION.get(capability, VERSION) <= VERSION


def is_hopper(x: Tensor) -> bool:
    """Whether tensor cores read their right operand from shared memory.

    This is assumed without a GPU, too.
    """
    if not x.is_cuda:
        return True
    return torch.cuda.get_device_capability(x.device)[0] == 9


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return _META_PROCESSORS if device.type == "meta" else 1


def input_precision(x: Tensor) -> str:
    """Return PRECISION, the ``input_precision`` of products over columns."""
    if x.dtype != torch.float32:
        return "tf32"

    backend = torch.backends.cuda.matmul
    # newer torch refuses the older name if both have been used
    chosen = getattr(backend, "fp32_precision", None)
    allowed = backend.allow_tf32 if chosen is None else chosen == "tf32"
    return "tf32" if allowed else "tf32x3"


def operand_dtype(x: Tensor) -> Any:
    """Return OPERAND, the dtype of operands (table in ``triton/__init__.py``)."""
    # the interpreter has no bfloat16 products
    return tl.bfloat16 if x.dtype == torch.bfloat16 and not INTERPRETED else tl.float32


def in_halves(x: Tensor, groups: int) -> bool:
    """Whether products with g x g matrices split their operands, float32 values, into two float16.

    These have the accuracy of two tf32, half their bytes, and need no transposed copy in shared
    memory. A single tf32 would take 0.85 of the instructions for float16 input, but lose digits
    where large eigenvalues cancel.
    """
    return groups <= 64 and (x.dtype == torch.float16 or input_precision(x) == "tf32x3")
