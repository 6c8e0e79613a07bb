"""List the normalization layers of a model."""

from collections import Counter
from typing import NamedTuple

from torch import nn

from .installed import CLASSES
from .names import find_norm_spec


class NormRow(NamedTuple):
    """One normalization layer of a model."""

    layer: str
    spec: str
    channels: int
    groups: int | None
    parameters: int
    frozen: bool


def norm_rows(model: nn.Module) -> list[NormRow]:
    """List every normalization layer of a model in module order."""
    rows = []
    for name, module in model.named_modules():
        spec = find_norm_spec(module)
        if spec is not None:
            parameters = list(module.parameters())
            size = sum(parameter.numel() for parameter in parameters)
            # Detectron2's LN has neither attribute; its parameters are scale and shift.
            channels = getattr(module, "num_channels", getattr(module, "num_features", size // 2))
            frozen = not any(parameter.requires_grad for parameter in parameters)
            rows.append(NormRow(name, spec, int(channels), getattr(module, "num_groups", None), size, frozen))
    return rows


def is_synchronized(layer: nn.Module) -> bool:
    """Tell whether a layer computes its batch statistics over all processes."""
    classes = (nn.SyncBatchNorm, CLASSES.get("naiveSyncBN", ()))
    return isinstance(layer, classes) or getattr(layer, "sync", False)


def norm_counts(model: nn.Module) -> dict[str, int]:
    """Count the layers of each norm, the most frequent first."""
    return dict(Counter(row.spec for row in norm_rows(model)).most_common())


def norm_summary(model: nn.Module) -> str:
    """Count the layers of each norm, in one line."""
    return ", ".join(f"{count} {spec}" for spec, count in norm_counts(model).items()) or "none"


def norm_table(model: nn.Module) -> str:
    """Format every normalization layer of a model as a text table."""
    from tabulate import tabulate

    rows = [(*row[:-1], "yes" if row.frozen else "no") for row in norm_rows(model)]
    return tabulate(rows, headers=["layer", "norm", "channels", "groups", "parameters", "frozen"], missingval="-")


def evaluation_spec(spec: str) -> str:
    """Reduce a norm name to the options that matter in evaluation.

    Frozen, synchronized and plain batch statistics compute the same there.
    """
    name, _, options = spec.removeprefix("Frozen").partition(":")
    if name == "BRN":  # BN in evaluation; its options belong to training
        return "BN:"
    kept = [option for option in options.split(",") if not option.startswith(("momentum=", "sync="))]
    return ":".join(["BN" if "BN" in name else name, ",".join(kept)])
