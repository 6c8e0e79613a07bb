"""Triton where it is installed, else None."""

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # a platform without Triton, like macOS
    triton = tl = constexpr = None
    VERSION: tuple[int, ...] = ()
    ERRORS: tuple[type[Exception], ...] = (RuntimeError,)
else:
    from triton.errors import TritonError

    VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
    # of compiling or launching a kernel that does not fit the device
    ERRORS = (RuntimeError, TritonError)
    if VERSION < (3, 3):
        triton = None  # its compiler aborts the process at float16 on Ampere

__all__ = ["ERRORS", "VERSION", "constexpr", "jit", "tl", "triton"]


def jit(kernel: Callable) -> Any:
    """Compile a kernel once for all sizes of the same alignment, which VECTOR tells."""
    if triton is None:
        return kernel
    code = kernel.__code__
    arguments = code.co_varnames[: code.co_argcount]
    sizes = [
        name
        for name in arguments
        if name not in kernel.__annotations__ and not name.endswith("_ptr")
    ]
    return triton.jit(kernel, do_not_specialize=sizes)
