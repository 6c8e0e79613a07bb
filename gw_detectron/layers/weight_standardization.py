"""Weight Standardization of the convolutions of a built model."""

import fnmatch
import functools
from typing import Any

import torch
from torch import Tensor, nn

EPS = 1e-5


def standardize_weight(weight: Tensor) -> Tensor:
    r"""Standardize each filter of a convolution.

    .. math:: \hat W_i = \frac{W_i - \mu_i}{\sigma_i + \epsilon}, \quad
        \sigma_i^2 = \tfrac{1}{I - 1} \sum_j (W_{ij} - \mu_i)^2, \quad \epsilon = 10^{-5}

    This is the authors' code for detection and classification, which pretrained weights depend on:
    the deviation has the divisor I - 1, and epsilon is added to it. The paper has the divisor I, as
    timm's ``StdConv2d``, which adds 1e-6 to the variance.

    ``weight`` is (C, ...), one filter of I values per output channel.

    Source: Micro-Batch Training with Batch-Channel Normalization and Weight Standardization (arXiv
        1903.10520).
    """
    of_filter = list(range(1, weight.dim()))
    deviation, mean = torch.std_mean(weight, of_filter, keepdim=True)
    return (weight - mean) / (deviation + EPS)


class WeightStandardized(nn.Module):
    """Mixin for a convolution: its weight is standardized at each access.

    ``torch.nn.utils.parametrize`` would rename the parameters, which pretrained weights name.

    Parameters and state dict contain the weight itself; writing into the computed one has no effect.
    So initialize before, or by ``reset_parameters``, fold no BN into it (``fuse_conv_bn_eval``), and
    do not shard it by ``fully_shard`` (FSDP2), which would train the computed one. ``torch.export`` of
    torch 2.7 takes the weight itself unless ``strict=False``.
    """

    @property
    def weight(self) -> Tensor:
        """The standardized weight."""
        return standardize_weight(self._parameters["weight"])  # type: ignore[arg-type]

    @weight.setter
    def weight(self, value: Tensor) -> None:
        """Set the weight of a replica of ``nn.DataParallel``, which has no parameters.

        In others torch refuses it.
        """
        self._parameters["weight"] = value  # type: ignore[assignment]

    def reset_parameters(self) -> None:
        """Draw the weight itself anew."""
        standardized = type(self)
        self.__class__ = standardized.__bases__[1]
        try:
            self.reset_parameters()
        finally:
            self.__class__ = standardized

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, type(self).__bases__[1:], self.__dict__


def standardize_weights(model: nn.Module, pattern: str = "*") -> list[str]:
    """Standardize the weights of a model's convolutions, in place.

    Names of parameters, their values, norms, activations and frozen state stay. Only convolutions
    before a norm should be standardized: a Detectron2 convolution whose ``norm`` is None does not
    change, nor do transposed ones.

    Returns the names of those that fit ``pattern``, a glob of module names. If there is none, or a
    filter has a single value, it raises ValueError and the model is unchanged.

    Source: arXiv 1903.10520; https://github.com/joe-siyuan-qiao/WeightStandardization.
    """
    convolutions = {
        name: module
        for name, module in model.named_modules()
        if fnmatch.fnmatchcase(name, pattern) and _is_convolution_before_norm(module)
    }
    if not convolutions:
        raise ValueError(
            f"no convolution before a norm fits {pattern!r}. "
            "Fix: set a norm, or leave the weights as they are."
        )
    for name, module in convolutions.items():
        if module._parameters["weight"][0].numel() < 2:
            raise ValueError(
                f"{name}: a filter of one value has no deviation. "
                "Fix: leave this convolution out."
            )

    for module in convolutions.values():
        if not isinstance(module, WeightStandardized):
            module.__class__ = _standardized(type(module))  # type: ignore[arg-type]
    return list(convolutions)


def _is_convolution_before_norm(module: nn.Module) -> bool:
    """Return whether a module is a convolution, and if it is Detectron2's, has a norm."""
    weight = module._parameters.get("weight")
    # not a convolution, or its weight is computed, as by torch.nn.utils.weight_norm
    if weight is None:
        return False
    if hasattr(module, "norm"):  # Detectron2's, some of which are not torch's
        return module.norm is not None and weight.dim() == 4
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))


@functools.cache
def _standardized(base: Any) -> type[nn.Module]:
    # torch.fx traces into modules that are not of torch.nn, and would make the computed weight a constant
    return type(
        f"WeightStandardized{base.__name__}",
        (WeightStandardized, base),
        {"__module__": base.__module__},
    )


def _empty(base: Any) -> nn.Module:
    """Make the module that pickle fills; it does not find classes that are made at run time."""
    cls = _standardized(base)
    return cls.__new__(cls)
