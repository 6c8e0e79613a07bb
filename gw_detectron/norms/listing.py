"""List the norm layers of a model, and compare norm names."""

import re
from collections import Counter
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

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
    if isinstance(layer, _NormBase):
        return layer.num_features

    is_known = norm_spec(layer) is not None
    scale = scale_of(layer)
    if scale is None:  # such as of GW or GN without scale and shift
        return int(getattr(layer, "num_channels", 0)) if is_known else 0

    class_name = type(layer).__name__
    looks_like_norm = "Norm" in class_name and "GlobalResponse" not in class_name
    if is_known or (looks_like_norm and scale.dim() == 1):
        return len(scale)
    return 0


def is_norm(layer: nn.Module) -> bool:
    """Return whether a module is a norm layer, also of an unknown class; see :func:`channels_of`."""
    return channels_of(layer) > 0


def scale_of(layer: nn.Module) -> Tensor | None:
    """Return a module's own parameter or buffer ``weight``; an attribute may be of something else."""
    return (layer._parameters | layer._buffers).get("weight")


def norm_rows(model: nn.Module) -> list[NormRow]:
    """List in module order the norm layers of a model that have a norm name."""
    rows = []
    for name, module in model.named_modules():
        spec = norm_spec(module)
        if not spec:
            continue

        parameters = list(module.parameters())
        row = NormRow(
            layer=name,
            spec=spec,
            channels=channels_of(module),
            groups=getattr(module, "num_groups", None),
            parameters=sum(parameter.numel() for parameter in parameters),
            frozen=not any(parameter.requires_grad for parameter in parameters),
        )
        rows.append(row)
    return rows


def is_synchronized(layer: nn.Module) -> bool:
    """Return whether a layer computes its batch statistics over all processes."""
    if norm_spec(layer) in ("SyncBN", "naiveSyncBN", "naiveSyncBN_N"):
        return True
    return getattr(layer, "sync", False)


def norm_counts(model: nn.Module) -> dict[str, int]:
    """Count the layers of each norm, the most frequent first."""
    return dict(Counter(row.spec for row in norm_rows(model)).most_common())


def norm_summary(model: nn.Module) -> str:
    """Count the layers of each norm, in one line."""
    counts = norm_counts(model)
    return ", ".join(f"{count} {spec}" for spec, count in counts.items()) or "none"


def norm_table(model: nn.Module) -> str:
    """Format every norm layer of a model as a text table."""
    from tabulate import tabulate

    rows = []
    for row in norm_rows(model):
        frozen = "yes" if row.frozen else "no"
        rows.append([*row[:-1], frozen])
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
    if "BN" in name and name != "MixBN":
        name = "BN"
    kept = [
        text
        for text in options.split(",")
        if not text.startswith(("momentum=", "sync="))
    ]
    return f"{name}:{','.join(kept)}"


def is_same_norm(first: str, second: str, *, with_eps: bool = True) -> bool:
    """Return whether two full norm names compute the same in evaluation."""
    names = {evaluation_spec(first), evaluation_spec(second)}
    if not with_eps:
        names = {re.sub(r"\beps=[^,]*", "", name) for name in names}
    return len(names) == 1


def can_start_from(spec: str, before: str) -> bool:
    """Return whether a norm takes the weights of another one: MixGW and MixBN take BN's, with its statistics."""
    return spec.startswith("Mix") and evaluation_spec(before) == "BN:"
