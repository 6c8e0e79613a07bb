"""The triton backend: no more passes over activations than GroupNorm.

Shapes: ``N`` samples, ``C`` channels, ``g`` groups (the side of the covariance matrix), ``cpg = C / g``, ``P``
positions (the product of the spatial sizes), ``M = cpg * P``. Row r of a sample's matrix holds the channels
``r * cpg + j``; a column is a pair (j, p). Statistics, whitening matrices and all sums are float32.

A program loops over tiles of all g rows and ``JB * PB`` columns (JB values of j, PB of p; powers of two, masked). Rows
are padded with zeros to a power of two, which changes no product. Programs write partial results, which are summed in a
fixed order afterwards, never with atomics: the same input gives the same bits.

Operands of the products over columns:

============  =========  ===========================================================================================
input         operands   why
============  =========  ===========================================================================================
float32       tf32 x 3   float32's accuracy on tensor cores; plain tf32 where the user allows it for matmuls
float16       tf32       float16's mantissa, float32's range: neither centered values nor whitening matrices overflow
bfloat16      bfloat16   values are centered in float32, then rounded; the covariance itself is computed with tf32
============  =========  ===========================================================================================
"""

from torch import Tensor

from .backward import apply_backward as apply_backward
from .backward import grad_products as grad_products
from .forward import apply as apply
from .launch_args import prepare as prepare
from .launch_args import samples_per_pass as samples_per_pass
from .launch_args import supported as supported
from .moments import statistics as statistics
from .newton_kernel import newton as newton
from .newton_kernel import newton_backward as newton_backward


def large_means(mean: Tensor, variances: Tensor) -> None:
    """Return None: the kernels subtract the means themselves."""
