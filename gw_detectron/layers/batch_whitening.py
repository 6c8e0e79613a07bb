"""Batch whitening as a module with running statistics, and a frozen one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from ..ops.arguments import check_flag, check_number, check_tensors
from ..ops.batch_whitening import (
    BatchStatistics,
    batch_statistics,
    effective_width,
    join_matrices,
    split,
    split_matrices,
    to_columns,
    transform,
)
from ..ops.numerics import autocast_off
from ..ops.solvers import Solver

#: running averages for evaluation: of whitening matrices, or of covariances
RUNNING = ("matrix", "covariance")
#: rotations after the whitening
ROTATIONS = ("none", "cayley")


class BatchWhitening2d(nn.Module):
    r"""Batch whitening layer: whiten channel groups over batch and space (BW, DBN).

    .. math:: y = \gamma \, Q \, \psi(\Sigma) X_C + \beta, \quad
        \Sigma = \tfrac{1}{m} X_C X_C^T + \epsilon I

    See :func:`gw_detectron.layers.batch_whiten` for the symbols; Q is the identity or a learnable rotation.

    Training uses the statistics of the batch. Evaluation uses running averages, with momentum
    :math:`\lambda` as in PyTorch, of the mean and

    - ``running="matrix"``: of the whitening matrix,
      :math:`W_E \leftarrow (1 - \lambda) W_E + \lambda \psi(\Sigma)`, initially the identity (DBN; BW
      of the Group Whitening paper). An average of PCA or pivoted_cholesky matrices is meaningless,
      because their rows are permuted from batch to batch.
    - ``running="covariance"``: of :math:`X_C X_C^T / (m - 1)` without eps; evaluation whitens by
      :math:`\psi(\hat\Sigma + \epsilon I)` (``BW_Sigma``). The divisor is m - 1, as in BN's running
      variance. A threshold is applied to the average; Algorithm 5 of the Batch Orthogonalization
      paper averages after its threshold.

    A batch of fewer than two columns has no covariance: the output is ``bias``, and the averages do
    not change.

    ``torch.optim.swa_utils.update_bn`` and Detectron2's precise BN know BN only. After an average of
    weights, run some training batches in training mode instead, so that the running averages fit.

    Args:
        num_channels: C, the size of dimension 1 of the input.
        channels_per_group: k, capped at C; the last group may be smaller.
        solver, num_iters, eps, threshold, corr: see :class:`~gw_detectron.layers.Solver`; ``"zca"``
            is DBN.
        momentum: :math:`\lambda`, the weight of a new batch in the running averages, from 0 to 1.
        running: ``"matrix"`` or ``"covariance"``.
        sync: compute the statistics over all processes of a distributed run.
        affine: learn a per-channel scale and shift, both of shape (C,).
        rotation: ``"none"``, or ``"cayley"`` for a learnable rotation of each group before scale and
            shift.
        device, dtype: of parameters and buffers, as in torch's own layers.

    Shape:
        Input (N, C, *spatial), with zero to three spatial dimensions. Output: the same shape, dtype
        and memory format.

    Raises ValueError or TypeError for a wrong argument.

    Source: Decorrelated Batch Normalization, section 3.3 and Algorithm 1; Group Whitening, sections 2
        and 5.1.1; On Batch Orthogonalization Layers, Table I, Eq. 4, section VI.
    """

    running_mean: Tensor
    running_matrix: Tensor
    running_covariance: Tensor

    def __init__(
        self,
        num_channels: int,
        channels_per_group: int = 64,
        solver: str = "newton",
        num_iters: int = 5,
        eps: float = 1e-5,
        momentum: float = 0.1,
        running: str = "matrix",
        sync: bool = False,
        affine: bool = True,
        *,
        threshold: float = 0.01,
        corr: bool = False,
        rotation: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_number("momentum", momentum, least=0, most=1, example=0.1)
        check_flag("sync", sync)
        check_flag("affine", affine)
        _check_choice("running", running, RUNNING)
        _check_choice("rotation", rotation, ROTATIONS)

        self.num_channels = num_channels
        self.channels_per_group = effective_width(num_channels, channels_per_group)
        self.solver = Solver(solver, num_iters, eps, threshold, corr)
        self.momentum = momentum
        self.running = running
        self.sync = sync
        self.affine = affine
        self.rotation = rotation

        zeros = torch.zeros(num_channels, device=device, dtype=dtype)
        ones = torch.ones_like(zeros)
        self.weight = nn.Parameter(ones) if affine else None
        self.bias = nn.Parameter(zeros.clone()) if affine else None
        self.rotate = None
        if rotation == "cayley":
            self.rotate = GroupRotation(num_channels, self.channels_per_group).to(zeros)
        self.register_buffer("running_mean", zeros)
        self.register_buffer(f"running_{running}", self._diagonal(ones))

    def forward(self, x: Tensor) -> Tensor:
        """Whiten ``x``, and update the running averages in training mode."""
        check_tensors(x, channels=self.num_channels)
        with autocast_off(x.device.type):
            columns = to_columns(x)
            if self.training:
                batch = batch_statistics(columns, self.channels_per_group, self.sync)
                centered = batch.centered
                matrices = [self.solver(covariance) for covariance in batch.covariances]
                self._update(batch, matrices)
            else:
                mean = self.running_mean.to(columns.dtype)
                centered = split(columns - mean[:, None], self.channels_per_group)
                matrices = self.running_matrices(columns.dtype)

            if self.rotate is not None:
                rotations = [rotation.to(columns.dtype) for rotation in self.rotate()]
                matrices = list(map(torch.matmul, rotations, matrices))
            return transform(centered, matrices, self.weight, self.bias, like=x)

    def reset_parameters(self) -> None:
        """Set scale, shift and running averages to a new layer's; a rotation resets its own."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        nn.init.zeros_(self.running_mean)
        self._start_running(torch.ones_like(self.running_mean))

    @torch.no_grad()
    def start_from_variance(self, variance: Tensor, eps: float) -> None:
        r"""Start the running average from the variances of a BN layer, as if its channels were uncorrelated.

        With ``running="matrix"`` it becomes :math:`\mathrm{diag}(\sigma^2 + \epsilon)^{-1/2}`, with which
        evaluation computes BN's function; with ``running="covariance"``
        :math:`\mathrm{diag}(\max(\sigma^2 + \epsilon - e, 0))`, where e is what the solver adds.
        """
        values = variance + eps
        if self.running == "matrix":
            self._start_running(values.rsqrt())
        else:
            values = values - self.solver.added_eps
            self._start_running(values.clamp_min(0))

    def extra_repr(self) -> str:
        text = (
            f"{self.num_channels}, channels={self.channels_per_group}, {self.solver}, "
            f"running={self.running}, momentum={self.momentum:g}"
        )
        if self.sync:
            text += ", sync=true"
        if self.rotation != "none":
            text += f", rotation={self.rotation}"
        return f"{text}, affine={self.affine}"

    def running_matrices(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the whitening matrices of evaluation, before the rotation."""
        running = getattr(self, f"running_{self.running}")
        matrices = split_matrices(running.to(dtype))
        if self.running == "covariance":
            matrices = [self.solver(covariance) for covariance in matrices]
        return matrices

    def _start_running(self, values: Tensor) -> None:
        running = getattr(self, f"running_{self.running}")
        running.copy_(self._diagonal(values))

    def _diagonal(self, values: Tensor) -> Tensor:
        """Return the running average whose matrices have the values, (C,), on their diagonals."""
        width = self.channels_per_group
        diagonals = [torch.diag_embed(group) for group in split(values, width)]
        return join_matrices(diagonals, width)

    @torch.no_grad()
    def _update(self, batch: BatchStatistics, matrices: list[Tensor]) -> None:
        columns = batch.columns
        if self.running == "covariance":
            unbiased = columns / (columns - 1).clamp_min(1)
            matrices = [covariance * unbiased for covariance in batch.covariances]

        weight = self.momentum * (columns > 1).to(columns.dtype)
        running = getattr(self, f"running_{self.running}")
        values = join_matrices(matrices, self.channels_per_group)
        _average(self.running_mean, batch.mean, weight)
        _average(running, values, weight)


def _average(running: Tensor, value: Tensor, weight: Tensor) -> None:
    """Move the average towards a value; with weight 0 not at all, where 0 * inf would be NaN."""
    dtype = running.dtype
    average = running.lerp(value.to(dtype), weight.to(dtype))
    running.copy_(torch.where(weight > 0, average, running))


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"{name} ({value!r}): unknown value. Fix: choose one of {list(choices)}."
        )


class FrozenBatchWhitening2d(BatchWhitening2d):
    """Batch whitening layer with fixed statistics, scale, shift and rotation.

    It is to :class:`BatchWhitening2d`, whose arguments and checkpoints it takes, what FrozenBN is to BN.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._freeze()

    def _freeze(self) -> None:
        for name, parameter in list(self.named_parameters(recurse=False)):
            delattr(self, name)
            self.register_buffer(name, parameter.detach())
        self.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "FrozenBatchWhitening2d":
        """Keep evaluation mode."""
        return super().train(False)

    @classmethod
    def convert(cls, module: nn.Module) -> nn.Module:
        """Freeze each BatchWhitening2d in a module, in place; return the module.

        A subclass is a TypeError: it may compute something else.
        """
        layers = {
            name: layer
            for name, layer in module.named_modules()
            if isinstance(layer, BatchWhitening2d) and not isinstance(layer, cls)
        }
        for name, layer in layers.items():
            if type(layer) is not BatchWhitening2d:
                raise TypeError(
                    f"{name or 'module'} ({type(layer).__name__}): a subclass of "
                    "BatchWhitening2d, which would compute something else when frozen. "
                    "Fix: freeze it by eval() and requires_grad_(False)."
                )

        for layer in layers.values():
            layer.__class__ = cls
            cls._freeze(layer)  # type: ignore[arg-type]
        return module


class GroupRotation(nn.Module):
    r"""Learnable orthogonal matrices, one per group of channels.

    .. math:: Q = (I + S) (I - S)^{-1}, \quad S = -S^T, \quad S = 0 \text{ initially}

    White channels stay white under a rotation, so a network may learn one. S is held by torch's
    orthogonal parametrization: a layer with a rotation can be copied and its state dict saved, but
    not pickled as a whole.

    Source: On Batch Orthogonalization Layers, section VI-B and appendix C. Its Eq. 51 misplaces a
        bracket: the derivative, which torch computes here, is (I + W^T) dW (I - S)^{-T}.
    """

    whole: Tensor
    last: Tensor

    def __init__(self, num_channels: int, channels_per_group: int) -> None:
        super().__init__()
        groups, rest = divmod(num_channels, channels_per_group)
        shapes = {"whole": (groups, channels_per_group)}
        if rest:
            shapes["last"] = (1, rest)

        self._names = list(shapes)
        for name, (count, side) in shapes.items():
            free = torch.zeros(count, side, side)
            self.register_parameter(name, nn.Parameter(free))
            # use_trivialization would store a second matrix, the identity
            orthogonal(self, name, "cayley", use_trivialization=False)

    def reset_parameters(self) -> None:
        """Set the rotations to the identity."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> "GroupRotation":
        """Convert tensors, but stay in float32 or wider: torch.linalg.solve has no half-precision kernel."""
        super()._apply(fn, recurse)
        dtypes = {parameter.dtype for parameter in self.parameters()}
        if dtypes & {torch.float16, torch.bfloat16}:
            super()._apply(Tensor.float, recurse)
        return self

    def forward(self) -> list[Tensor]:
        """Return the rotations: (C // k, k, k), perhaps (1, r, r)."""
        return [getattr(self, name) for name in self._names]
