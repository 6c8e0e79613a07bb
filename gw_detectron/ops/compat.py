"""Products of large float32 matrices on a CPU by oneDNN.

``torch.matmul`` multiplies float32 by MKL, which leaves half of the width of AVX-512 unused on processors that are not
Intel's. The operator that ``torch.compile`` makes of linear layers takes the kernels of oneDNN, which use all of it.
"""

import functools

import torch
from torch import Tensor

#: where the shortest or the longest side of the matrices is below these, a call costs more than it gains
_SHORTEST, _LONGEST = 32, 2048


def suits(like: Tensor, shortest: int, longest: int) -> bool:
    """Whether :func:`product` is faster than ``torch.matmul`` for matrices of this dtype, device and range of sides."""
    return (
        like.dtype == torch.float32
        and like.device.type == "cpu"
        and shortest >= _SHORTEST
        and longest >= _LONGEST
        and available()
        and bool(torch.backends.mkldnn.enabled)
    )


@functools.cache
def available() -> bool:
    """Whether this torch has the operator and this processor AVX-512."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of two matrices, as a new tensor; of a ``b`` that is not dense, transposed or not, it is very slow."""
    return torch.ops.mkldnn._linear_pointwise(a, b.mT, None, "none", [], "")
