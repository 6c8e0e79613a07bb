"""Find the norms of ImageNet weights: recorded in their file, proven by their tensors, or stated by the user.

Conversion never guesses: options such as the number of groups leave no trace in the tensors.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UnknownNormError, WeightsError, summarize_names
from ..norms import POSITIONS, build_norm, evaluation_spec, norm_spec, norms_at
from .architecture import Architecture, detectron2_name
from .record import Record

_BN = "BN:"  # evaluation_spec of batch normalization, frozen or not


class Positions(NamedTuple):
    """The norms of a network as config keys: one at ``positions``, one everywhere else."""

    norm: str
    whiten_norm: str
    positions: str

    def __str__(self) -> str:
        if self.positions == "ALL":
            return f"{self.whiten_norm} at ALL"
        return f"{self.norm}, {self.whiten_norm} at {self.positions}" if self.positions else self.norm


def infer_norms(
    network: Architecture, tensors: Mapping[str, Tensor], record: Record, stated: str | None
) -> dict[str, str]:
    """Find the norm of each layer; require that the record and the statement agree.

    Args:
        network: the architecture.
        tensors: with torchvision's names.
        record: what the file records.
        stated: the user's norm name for all layers without BN's statistics; None to rely on record and tensors.

    Returns:
        Full norm names by torchvision's layer names. The tensors are still to be compared with them.

    Raises:
        UnknownNormError: a norm is not proven.
        WeightsError: record and statement disagree, or the record lacks a layer.
        ValueError: a norm name is wrong.
    """
    layers = network.norm_layers
    unproven = [layer for layer in layers if not _has_batch_statistics(tensors, layer)]
    if (recorded := record.norms) is not None:
        norms = {layer: recorded.get(layer) or recorded.get(detectron2_name(layer), "") for layer in layers}
        norms |= {layer: "BN" for layer, spec in norms.items() if not spec and layer not in unproven}
        if missing := [layer for layer, spec in norms.items() if not spec]:
            raise WeightsError(f"norms: the file lists none for {summarize_names(missing)}. Fix: write it again.")
    elif unproven and not (record.flag or stated):
        if stated == "":
            raise WeightsError("norm (''): names no norm. Fix: give a norm name such as GW.")
        raise UnknownNormError(
            f"Cannot tell GN from GW for {len(unproven)} of {len(layers)} norm layers ({summarize_names(unproven)}): "
            "their tensors look the same, and show no options. Fix: pass --norm GW (the paper's setting), --norm GN or "
            "another norm name (in Python, norm=)."
        )
    else:
        norms = {layer: (record.flag or stated or "") if layer in unproven else "BN" for layer in layers}
    norms = {layer: full_name(spec, layers[layer]) for layer, spec in norms.items()}
    if stated is not None:
        others = [layer for layer, spec in norms.items() if evaluation_spec(spec) != _BN] or list(norms)
        for layer in others:
            if not is_same_norm(full_name(stated, layers[layer]), norms[layer], with_eps="eps=" in stated):
                raise WeightsError(
                    f"norm ({stated!r}): the weights have {norms[layer]} at {layer}. Fix: give that norm, or none."
                )
    return norms


def _has_batch_statistics(tensors: Mapping[str, Tensor], layer: str) -> bool:
    """Return whether the tensors of a layer prove batch normalization."""
    fields = {name.removeprefix(f"{layer}.") for name in tensors if name.startswith(f"{layer}.")}
    statistics = {"running_mean", "running_var"}
    return bool(fields & statistics) and fields <= statistics | {"weight", "bias", "num_batches_tracked"}


@functools.cache
def full_name(spec: str, channels: int) -> str:
    """Return the norm name with all options of a layer of so many channels, which may cap its groups.

    Frozen norms get the name of the norm itself.

    Raises:
        ValueError: the norm name is wrong, or names no norm.
    """
    with torch.device("meta"):
        layer = build_norm(spec.removeprefix("Frozen"), channels)
    if layer is None:
        raise WeightsError("norm (''): names no norm. Fix: give a norm name such as GW.")
    return norm_spec(layer) or spec


def is_same_norm(first: str, second: str, *, with_eps: bool = True) -> bool:
    """Return whether two full norm names compute the same in evaluation, apart from eps if wanted."""
    names = [evaluation_spec(spec) for spec in (first, second)]
    if not with_eps:
        names = [",".join(part for part in name.split(",") if not part.startswith("eps=")) for name in names]
    return names[0] == names[1]


def positions_of(network: Architecture, norms: Mapping[str, str]) -> Positions:
    """Express the norms of layers as config keys.

    Raises:
        WeightsError: together they are none of the paper's positions.
    """
    layers = network.norm_layers
    if _one_norm(network, norms):
        spec = _widest(network, norms)
        return Positions("BN", spec, "ALL") if spec.startswith(("GW", "BW")) else Positions(spec, "", "")
    names = {detectron2_name(layer): layer for layer in layers}
    possible = [positions for positions in POSITIONS[1:-1] if network.bottleneck or positions != "S1-B3"]
    for positions in possible:
        whitened = {names[name] for name in norms_at(positions, names)}
        inside = {layer: spec for layer, spec in norms.items() if layer in whitened}
        outside = {layer: spec for layer, spec in norms.items() if layer not in whitened}
        if outside and _one_norm(network, inside) and _one_norm(network, outside):
            return Positions(_widest(network, outside), _widest(network, inside), positions)
    others = [layer for layer, spec in norms.items() if evaluation_spec(spec) != _BN]
    raise WeightsError(
        f"norms other than BN ({summarize_names(others)}): together they are none of the positions "
        f"{', '.join(possible)}. Fix: give weights with one norm at one of them."
    )


def _one_norm(network: Architecture, norms: Mapping[str, str]) -> bool:
    """Return whether one norm name makes all layers."""
    spec, layers = _widest(network, norms), network.norm_layers
    return all(is_same_norm(full_name(spec, layers[layer]), own) for layer, own in norms.items())


def _widest(network: Architecture, norms: Mapping[str, str]) -> str:
    """Return the norm name of the layer with the most channels, where groups are capped least."""
    spec = norms[max(norms, key=lambda layer: network.norm_layers[layer])]
    return "BN" if evaluation_spec(spec) == _BN else spec
