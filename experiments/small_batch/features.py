r"""Features of a trained backbone: their conditioning, and how far BN's batch statistics are from its running ones.

- kappa: of the inputs x of each convolution, :math:`\kappa_{90\%}` of :math:`E[x x^T]` over images and places, see
  :mod:`experiments.conditioning`. An input follows the norm and the ReLU, for every norm.
- gap: of each BN layer, the root mean square, over channels and batches, of the difference between its output with
  batch statistics :math:`\mu_B, \sigma_B` and with running statistics :math:`\mu, \sigma`, before scale and shift:
  :math:`(1 - \sigma_B / \sigma)^2 + ((\mu_B - \mu) / \sigma)^2`. The output itself has variance 1.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..analysis_result import short_name
from ..conditioning import condition_numbers

_PERCENT = 90


@torch.no_grad()
def feature_statistics(
    model: nn.Module, batches: Iterable[Sequence[dict[str, Any]]]
) -> dict[str, dict[str, float | None]]:
    """Return "kappa" and "gap" by the short names of convolutions and of BN layers; None where infinite.

    Args:
        model: a detector with an FPN on a ResNet. Its running statistics stay as they are.
        batches: of training data, of the batch size whose gap is measured.
    """
    backbone = model.backbone.bottom_up
    images = [model.preprocess_image(batch).tensor for batch in batches]
    convs = {name: layer for name, layer in backbone.named_modules() if isinstance(layer, nn.Conv2d)}
    norms = {name: layer for name, layer in backbone.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    moments: dict[str, list[Tensor]] = {name: [] for name in convs}
    gaps: dict[str, list[Tensor]] = {name: [] for name in norms}
    with contextlib.ExitStack() as hooks:
        for name, layer in convs.items():
            hooks.enter_context(layer.register_forward_pre_hook(_observer(moments[name], _moment)))
        backbone.eval()
        for x in images:
            backbone(x)
    with contextlib.ExitStack() as hooks:
        for name, layer in norms.items():
            hooks.enter_context(layer.register_forward_pre_hook(_observer(gaps[name], _squared_gap)))
            hooks.callback(setattr, layer, "momentum", layer.momentum)
            layer.momentum = 0.0
        backbone.train()
        for x in images:
            backbone(x)
    kappas = {name: condition_numbers(torch.stack(found).mean(0), [_PERCENT])[0] for name, found in moments.items()}
    return {
        "kappa": {short_name(name): value if value < float("inf") else None for name, value in kappas.items()},
        "gap": {short_name(name): float(torch.stack(found).mean().sqrt()) for name, found in gaps.items()},
    }


def _observer(found: list[Tensor], measure: Callable[[nn.Module, Tensor], Tensor]) -> Callable[..., None]:
    def observe(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append(measure(layer, args[0].double()))

    return observe


def _moment(layer: nn.Module, x: Tensor) -> Tensor:
    columns = x.transpose(0, 1).flatten(1)
    return columns @ columns.T / columns.shape[1]


def _squared_gap(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the squared gap of one batch, averaged over channels."""
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    running = (layer.running_var.double() + layer.eps).sqrt()
    ratio = (variance + layer.eps).sqrt() / running
    return ((1 - ratio) ** 2 + ((mean - layer.running_mean) / running) ** 2).mean()
