"""Find the norms of ImageNet weights: by notes in their file, signs in their tensors, or the user's statement.

Options such as the number of groups leave no trace in the tensors, so nothing is guessed.
"""

import functools
import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import UnknownNormError, WeightsError, summarize_names
from ..layers import RUNNING
from ..norms import POSITIONS, build_norm, norm_spec
from ..norms.listing import evaluation_spec
from .architecture import POOL_NORM, Architecture, LayerNames, Norms, norm_layers_at
from .metadata import Notes

_log = logging.getLogger(__name__)
_BN = "BN:"  # evaluation_spec of batch normalization, frozen or not
_STATE_IT = (
    "Fix: state it, e.g. --norm GW (the published setting), --norm GW:groups=32 or --norm GN (in Python, norm=); "
    "gw://file/ takes the converted file."
)


def infer_norms(
    network: Architecture, tensors: Mapping[str, Tensor], notes: Notes, stated: str | None, positions: str | None
) -> Norms:
    """Find the norms of a network, and require that notes, tensors and statement agree.

    Args:
        network: the architecture.
        tensors: with torchvision's names.
        notes: what the file records.
        stated: the user's norm name for all layers without BN's statistics; None to rely on notes and tensors.
        positions: the expected positions; None accepts any.

    Raises:
        UnknownNormError: a norm is not proven.
        WeightsError: notes, tensors and statement disagree, or no positions describe the layers.
        ValueError: a norm name is wrong.
    """
    signs = {layer: _sign(tensors, layer) for layer in network.norm_layers()}
    unproven = [layer for layer, sign in signs.items() if sign != "BN"]
    found = _recorded_norms(network, tensors, notes)
    if stated is not None:
        full_name(stated, max(layer.channels for layer in signs))  # raises for an unknown name
    if found is None:
        if unproven and stated is None:
            raise UnknownNormError(
                f"norms without batch normalization's statistics ({_summary(unproven, signs)}): "
                f"{_meaning({signs[layer] for layer in unproven})}. {_STATE_IT}"
            )
        found = {layer: stated if stated and layer in unproven else "BN" for layer in signs}
        source = "as stated"
    else:
        source = "by the file's notes"
    for layer, spec in found.items():
        if signs[layer] not in _possible_signs(spec, layer):
            raise WeightsError(
                f"{layer.torchvision} ({spec!r} {source}): {_meaning({signs[layer]})}. Fix: give the norm and the "
                "positions of these weights."
            )
    norms = _at_positions(network, found)
    if stated is not None:
        _check_statement(network, norms, stated)
    if positions not in (None, norms.positions):
        raise WeightsError(
            f"positions ({positions!r}): the weights have {norms}. Fix: give {norms.positions!r} or none."
        )
    return norms


def _recorded_norms(network: Architecture, tensors: Mapping[str, Tensor], notes: Notes) -> dict[LayerNames, str] | None:
    """Return the recorded norm name of each norm layer; None without a record."""
    layers, norms = network.norm_layers(), notes.norms
    if notes.provenance is not None:
        return notes.provenance.norms.by_layer(network)
    if norms is not None:
        found = {layer: norms.get(layer.torchvision) or norms.get(layer.detectron2) or notes.others for layer in layers}
        if missing := [layer.torchvision for layer, spec in found.items() if not spec]:
            raise WeightsError(f"norms: the file lists none for {summarize_names(missing)}. Fix: export it again.")
        return found
    if notes.whitening:
        return {layer: "BN" if _sign(tensors, layer) == "BN" else notes.whitening for layer in layers}
    return None


def infer_pool_norm(network: Architecture, tensors: Mapping[str, Tensor], notes: Notes, stated: str | None) -> str:
    """Find the norm between the last pooling and the classifier; "" for none.

    Raises:
        UnknownNormError: it is neither recorded nor proven nor stated.
        WeightsError: the statement contradicts the record.
    """
    provenance = notes.provenance
    recorded = provenance.pool_norm if provenance is not None else None
    if stated is not None:
        if recorded and norm_key(stated, 2048, True) != norm_key(recorded, 2048, True):
            raise WeightsError(f"pool_norm ({stated!r}): the file has {recorded!r}. Fix: give that or none.")
        return stated
    if recorded is not None:
        return recorded
    present = any(name.startswith(f"{POOL_NORM.torchvision}.") for name in tensors)
    if not present or network.name.startswith("X-"):
        return ""
    sign = _sign(tensors, POOL_NORM)
    if sign == "BN":
        return "BN"
    if notes.whitening:  # the authors' script has one norm for all layers
        return notes.whitening
    if provenance is not None and provenance.whiten_norm is None:  # version 0.1.0 assumed it
        assumed = sign or ("GN" if provenance.norm == "GN" else "GW")
        _log.warning("pool_norm (%s): assumed, as by version 0.1.0. Fix: state it by --pool-norm.", assumed)
        return assumed
    example = f"{sign},solver=zca" if ":" in sign else "GW:groups=32"
    raise UnknownNormError(
        f"pool_norm ({POOL_NORM.torchvision}): {_meaning({sign})}. Fix: state it, e.g. --pool-norm {example} "
        '(in Python, pool_norm=), or "" to leave it out.'
    )


def _sign(tensors: Mapping[str, Tensor], layer: LayerNames) -> str:
    """Return the norm that a layer's tensors prove: ``BN``, ``BW:...``, ``GW`` (the authors' shape), or "".

    A proof of BW or GW leaves options open.
    """
    fields = {name: tensors.get(f"{layer.torchvision}.{name}") for name in ("weight", "running_mean", "running_var")}
    for running in RUNNING:
        matrix = tensors.get(f"{layer.torchvision}.running_{running}")
        if matrix is not None and matrix.dim():
            return f"BW:channels={matrix.shape[-1]},running={running}"
    if fields["running_mean"] is not None or fields["running_var"] is not None:
        return "BN"
    return "GW" if fields["weight"] is not None and fields["weight"].dim() > 1 else ""


def _meaning(signs: set[str]) -> str:
    """Explain the signs of layers."""
    known = {
        "": "the tensors are those of GN or GW alike",
        "GW": "the shape of the scale is that of the authors' whitening layer, whose groups, iterations and solver the "
        "tensors do not show",
        "BN": "the tensors are those of batch normalization",
    }
    whitening = "the tensors are those of {}, whose solver, iterations and eps they do not show"
    return "; ".join(known.get(sign) or whitening.format(sign) for sign in sorted(signs))


def _possible_signs(spec: str, layer: LayerNames) -> tuple[str, ...]:
    name = evaluation_name(spec, layer.channels).partition(":")[0]
    if evaluation_name(spec, layer.channels) == _BN:
        return ("BN",)
    if name in ("BN", "BW"):  # a rotated BN has BW's statistics
        options = dict(item.split("=") for item in full_name(spec, layer.channels).partition(":")[2].split(","))
        running = options.get("running", "covariance")
        return (f"BW:channels={options['channels']},running={running}",)
    return ("", "GW") if name == "GW" else ("",)


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


def evaluation_name(spec: str, channels: int) -> str:
    """Return the norm name of a layer without options that evaluation does not read."""
    return evaluation_spec(full_name(spec, channels))


def _at_positions(network: Architecture, found: Mapping[LayerNames, str]) -> Norms:
    """Express norms of layers as positions."""
    if len(set(found.values())) == 1 or _one_norm(found):
        spec = _widest(found)
        return Norms("BN", spec, "ALL") if spec.startswith(("GW", "BW")) else Norms(spec)
    possible = [positions for positions in POSITIONS[1:-1] if network.bottleneck or positions != "S1-B3"]
    for positions in possible:
        whitened = norm_layers_at(network, positions)
        inside = {layer: spec for layer, spec in found.items() if layer in whitened}
        outside = {layer: spec for layer, spec in found.items() if layer not in whitened}
        if outside and _one_norm(inside) and _one_norm(outside):
            return Norms(_widest(outside), _widest(inside), positions)
    others = [layer for layer, spec in found.items() if evaluation_name(spec, layer.channels) != _BN]
    raise WeightsError(
        f"norms other than BN ({_summary(others, found)}): together they are none of the positions "
        f"{', '.join(possible)}. Fix: give weights with one norm at one of them."
    )


def _one_norm(found: Mapping[LayerNames, str]) -> bool:
    """Tell whether one norm name makes all layers."""
    spec = _widest(found)
    return all(evaluation_name(spec, m.channels) == evaluation_name(own, m.channels) for m, own in found.items())


def _widest(found: Mapping[LayerNames, str]) -> str:
    """Return the norm name of the layer with the most channels, where groups are capped least."""
    layer = max(found, key=lambda layer: layer.channels)
    if evaluation_name(found[layer], layer.channels) == _BN:
        return "BN"
    spec = full_name(found[layer], layer.channels)
    return "GN" if spec == full_name("GN", layer.channels) else spec


def _check_statement(network: Architecture, norms: Norms, stated: str) -> None:
    """Require that the stated norm is the network's; eps only if the statement has it."""
    channels = max(layer.channels for layer in network.norm_layers())
    used = norms.whiten_norm or norms.norm
    if norm_key(stated, channels, "eps=" in stated) != norm_key(used, channels, "eps=" in stated):
        raise WeightsError(f"norm ({stated!r}): the weights have {norms}. Fix: give {used!r} or none.")


def norm_key(spec: str, channels: int, with_eps: bool = False) -> list[str]:
    """Return the options of a norm that must be equal in two names of the same norm."""
    name, _, options = evaluation_name(spec, channels).partition(":")
    return [name, *(option for option in options.split(",") if with_eps or not option.startswith("eps="))]


def _summary(layers: list[LayerNames], among: Mapping[LayerNames, str]) -> str:
    return f"{len(layers)} of {len(among)}: {summarize_names(layer.torchvision for layer in layers)}"
