"""List the norm layers of a model."""

from collections import Counter
from typing import NamedTuple

from torch import nn

from .names import norm_spec


class NormRow(NamedTuple):
    """One norm layer of a model."""

    layer: str
    spec: str
    channels: int
    groups: int | None
    parameters: int
    frozen: bool


def channels_of(layer: nn.Module) -> int:
    """Return C of a norm layer, 0 of any other module.

    A layer of an unknown class is a norm if the name of its class contains "Norm" and it has a scale of its own.
    ConvNeXt's ``GlobalResponseNorm`` adds to its input and is none.
    """
    known = isinstance(layer, nn.modules.batchnorm._NormBase) or norm_spec(layer) is not None
    weight = {**layer._parameters, **layer._buffers}.get("weight")
    named = "Norm" in type(layer).__name__ and "GlobalResponse" not in type(layer).__name__
    if not known and not (named and weight is not None and weight.dim() == 1):
        return 0
    count = getattr(layer, "num_features", getattr(layer, "num_channels", None))
    return count if isinstance(count, int) else 0 if weight is None else len(weight)


def norm_rows(model: nn.Module) -> list[NormRow]:
    """List in module order the norm layers of a model that have a norm name."""
    rows = []
    for name, module in model.named_modules():
        if spec := norm_spec(module):
            parameters = list(module.parameters())
            size = sum(parameter.numel() for parameter in parameters)
            frozen = not any(parameter.requires_grad for parameter in parameters)
            rows.append(
                NormRow(
                    name,
                    spec,
                    channels_of(module),
                    getattr(module, "num_groups", None),
                    size,
                    frozen,
                )
            )
    return rows


def is_synchronized(layer: nn.Module) -> bool:
    """Return whether a layer computes its batch statistics over all processes."""
    return norm_spec(layer) in ("SyncBN", "naiveSyncBN", "naiveSyncBN_N") or getattr(
        layer, "sync", False
    )


def norm_counts(model: nn.Module) -> dict[str, int]:
    """Count the layers of each norm, the most frequent first."""
    return dict(Counter(row.spec for row in norm_rows(model)).most_common())


def norm_summary(model: nn.Module) -> str:
    """Count the layers of each norm, in one line."""
    return ", ".join(f"{count} {spec}" for spec, count in norm_counts(model).items()) or "none"


def norm_table(model: nn.Module) -> str:
    """Format every norm layer of a model as a text table."""
    from tabulate import tabulate

    rows = [(*row[:-1], "yes" if row.frozen else "no") for row in norm_rows(model)]
    return tabulate(
        rows,
        headers=["layer", "norm", "channels", "groups", "parameters", "frozen"],
        missingval="-",
    )


def evaluation_spec(spec: str) -> str:
    """Reduce a norm name to the options that matter in evaluation.

    Frozen, synchronized and plain batch statistics compute the same there.
    """
    name, _, options = spec.removeprefix("Frozen").partition(":")
    if name == "BRN":  # BN in evaluation; its options belong to training
        return "BN:"
    kept = [
        option for option in options.split(",") if not option.startswith(("momentum=", "sync="))
    ]
    return ":".join(["BN" if "BN" in name else name, ",".join(kept)])
