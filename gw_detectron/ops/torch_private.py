"""Private torch APIs of the operator, tested with torch 2.14.1; where torch lacks one, its function falls back."""

import functools
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import forward_ad

_EXPORTING_FLAG = hasattr(torch.compiler, "_is_exporting_flag")
_TRANSFORMS_ACTIVE = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: False
)
_ACTIVE_MODES = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_BATCHED = [
    getattr(torch._C._functorch, name, lambda x: False)
    for name in ("is_batchedtensor", "is_legacy_batchedtensor")
]
_PLAIN = (Tensor, torch.nn.Parameter, type(None))
#: matrices whose shortest or longest side is below these are multiplied faster by torch.matmul
_SHORTEST, _LONGEST = 32, 2048
_CPU_INFO = Path("/proc/cpuinfo")


def needs_plain_operations() -> bool:
    """Whether torch exports, transforms or traces the caller.

    The custom operator has no rule for ``torch.func``, forward-mode AD and fvcore's FLOP counts.
    """
    if torch.jit.is_tracing() or _is_exporting():  # type: ignore[attr-defined]
        return True
    if torch.compiler.is_compiling():
        return False
    return _TRANSFORMS_ACTIVE() or getattr(forward_ad, "_current_level", -1) >= 0


def is_dispatched(*tensors: Tensor | None) -> bool:
    """Whether the dispatcher must see an operation.

    It must for tensor subclasses, and for modes such as FLOP counters.
    """
    return _ACTIVE_MODES() > 0 or any(type(tensor) not in _PLAIN for tensor in tensors)


def is_batched(x: Tensor) -> bool:
    """Whether ``x`` is an argument of vmap, for which custom operators have no rule."""
    return any(check(x) for check in _BATCHED)


def _is_exporting() -> bool:
    # the flag, since up to torch 2.10 is_exporting() is also true inside torch.compile
    if _EXPORTING_FLAG:
        return torch.compiler._is_exporting_flag
    return torch.compiler.is_exporting()


@functools.cache
def onednn_available() -> bool:
    """Whether torch has the operator, on Linux, on a processor with AVX-512 that is not Intel's."""
    if not torch.backends.mkldnn.is_available() or not _CPU_INFO.is_file():
        return False
    return (
        torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and "GenuineIntel" not in _CPU_INFO.read_text()
    )


def onednn_is_faster(like: Tensor, shortest: int, longest: int) -> bool:
    """Whether oneDNN beats ``torch.matmul``.

    That calls MKL, which uses half the width of AVX-512 outside Intel's processors.
    """
    return (
        like.dtype == torch.float32
        and like.device.type == "cpu"
        and shortest >= _SHORTEST
        and longest >= _LONGEST
        and onednn_available()
        and bool(torch.backends.mkldnn.enabled)
    )


def onednn_matmul(a: Tensor, b: Tensor, plus: Tensor | None = None) -> Tensor:
    """Return ``a @ b``, or ``a @ b + plus``, by oneDNN; ``b`` or its transpose should be contiguous."""
    if plus is not None:
        return torch.ops.mkldnn._linear_pointwise.binary(a, plus, b.mT, None, "add")
    return torch.ops.mkldnn._linear_pointwise(a, b.mT, None, "none", [], "")
