"""Triton kernels of group whitening: tensors as large as the input are read and written as often as by GroupNorm.

Shape shorthand: ``N`` samples, ``C`` channels, ``g`` groups (the side of the covariance matrix), ``cpg = C / g``,
``P`` positions (the product of the spatial sizes), ``M = cpg * P``. Row r of a sample's matrix holds the channels
``r * cpg + j``; a column is a pair (j, p). Statistics, whitening matrices and all sums are float32.

A program works through tiles of all g rows and ``JB * PB`` columns (JB values of j, PB of p; powers of two, masked).
Rows are padded to a power of two with zeros, which no product notices. Programs write partial results that are summed
in a fixed order afterwards, never with atomics: the same input gives the same bits.

Operands of the products that are as long as the input:

============  =========  ==============================================================================================
input         operands   why
============  =========  ==============================================================================================
float32       tf32 x 3   float32's accuracy on tensor cores; plain tf32 where the user allows it for matmuls
float16       tf32       float16's mantissa with float32's range: neither centred values nor whitening matrices overflow
bfloat16      bfloat16   values are centred in float32, then rounded; the covariance itself is taken with tf32
============  =========  ==============================================================================================
"""

from .backward import apply_backward, grad_products
from .forward import apply
from .launch_args import portion, prepare, supported
from .moments import statistics
from .newton_kernel import newton, newton_backward

__all__ = [
    "apply",
    "apply_backward",
    "grad_products",
    "newton",
    "newton_backward",
    "portion",
    "prepare",
    "statistics",
    "supported",
]
