"""Find the norms of ImageNet weights: by notes in their file, signs in their tensors, or the user's statement.

Options such as the number of groups leave no trace in the tensors, so nothing is guessed.
"""

import argparse
import functools
import json
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from detectron2.layers import get_norm
from torch import Tensor, nn

from ..errors import UnknownNormError, WeightsError, summarize_names
from ..layers import RUNNING, GroupWhitening2d
from ..norms import POSITIONS, norm_spec, resolve_norm
from ..norms.norm_listing import evaluation_spec
from .architecture import POOL_NORM, Architecture, LayerNames, Norms, norm_layers_at
from .provenance import PROVENANCE, TORCHVISION, Preprocessing, Provenance
from .reading import Contents

_log = logging.getLogger(__name__)

#: key of the norm names in a checkpoint and in the header of a safetensors file
NORMS = "norms"
#: further keys in that header: the provenance, and the description of an exported network
HEADER_PROVENANCE, DESCRIPTION = "gw_detectron", "gw_detectron.json"
#: the norm layers of an export in torchvision's names; batch normalization is not listed there
NORM_CLASSES: Mapping[str, type[nn.Module]] = {"GroupNorm": nn.GroupNorm, "GroupWhitening2d": GroupWhitening2d}
_STRIDES = {"stem": 4, "res2": 4, "res3": 8, "res4": 16, "res5": 32}
_BN = "BN:"  # evaluation_spec of batch normalization, frozen or not
_STATE_IT = (
    "Fix: state it, e.g. --norm GW (the published setting), --norm GW:groups=32 or --norm GN (in Python, norm=); "
    "gw://file/ takes the converted file."
)


class Notes(NamedTuple):
    """Norms and preprocessing that a weight file records.

    Args:
        provenance: of converted weights.
        norms: norm name of each layer, by torchvision's or Detectron2's names.
        others: norm name of layers that ``norms`` does not list; "" if all must be listed.
        whitening: norm name of the layers without batch statistics, from the flags of the authors' training script or
            of timm's.
        preprocessing: of the images.
    """

    provenance: Provenance | None = None
    norms: Mapping[str, str] | None = None
    others: str = ""
    whitening: str = ""
    preprocessing: Preprocessing | None = None

    def by_layer(self, network: Architecture, tensors: Mapping[str, Tensor]) -> dict[LayerNames, str] | None:
        """Return the recorded norm name of each norm layer; None without a record."""
        layers = network.norm_layers()
        if self.provenance is not None:
            return self.provenance.norms.by_layer(network)
        if self.norms is not None:
            found = {m: self.norms.get(m.torchvision) or self.norms.get(m.detectron2) or self.others for m in layers}
            if missing := [layer.torchvision for layer, spec in found.items() if not spec]:
                raise WeightsError(f"norms: the file lists none for {summarize_names(missing)}. Fix: export it again.")
            return found
        if self.whitening:
            return {layer: "BN" if _sign(tensors, layer) == "BN" else self.whitening for layer in layers}
        return None


def read_notes(contents: Contents) -> Notes:
    """Read what a weight file records about its network.

    Raises:
        WeightsError: a record is damaged, or describes a network that cannot be converted.
    """
    values = contents.value if isinstance(contents.value, Mapping) else {}
    layout = contents.metadata.get("layout", "")
    try:
        header = {key: json.loads(text) for key, text in contents.metadata.items() if text.startswith("{")}
        norms, description = header.get(NORMS, values.get(NORMS)), header.get(DESCRIPTION)
        preprocessing = TORCHVISION if values.get("__author__") == "torchvision" else None
        if description is not None:
            preprocessing = _exported_preprocessing(description, contents.metadata, layout)
        if norms is not None:
            norms = {name.removeprefix("backbone.").removeprefix("bottom_up."): norms[name] for name in norms}
            norms = {name: _recorded(norm) for name, norm in norms.items()}
    except WeightsError:
        raise
    except (ArithmeticError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise WeightsError(f"notes of the file: damaged ({error!r}). Fix: write the file again.") from None
    provenance: Any = header.get(HEADER_PROVENANCE, values.get(PROVENANCE))
    if provenance is not None or HEADER_PROVENANCE in contents.metadata:
        restored = Provenance.from_dict(provenance)
        return Notes(restored, preprocessing=restored.preprocessing)
    others = "BN" if layout in ("torchvision", "timm") else ""
    whitening = _authors_norm(values.get("cfg")) or _timm_norm(values.get("args"))
    return Notes(None, norms, others, whitening, preprocessing)


def _recorded(norm: Any) -> str:
    """Return the norm name of a recorded layer: a norm name, or a class with its arguments."""
    if isinstance(norm, str):
        return norm
    return norm_spec(build_norm(norm))


def build_norm(description: Mapping[str, Any]) -> nn.Module:
    """Build a norm layer on the meta device from its ``class`` in :data:`NORM_CLASSES` and its arguments."""
    arguments = dict(description)
    with torch.device("meta"):
        return NORM_CLASSES[arguments.pop("class")](**arguments)


def _exported_preprocessing(
    description: Mapping[str, Any], header: Mapping[str, str], layout: str
) -> Preprocessing | None:
    given = description["input"]
    for name, output in description["outputs"].items():
        if output["stride"] != _STRIDES.get(name, output["stride"]):
            raise WeightsError(
                f"{name} (stride {output['stride']}): the network is dilated, which conversion does not support. "
                "Fix: load the weights with the config of the exported model."
            )
    stride = header.get("stride_in_1x1", "" if layout == "detectron2" else "false")
    if not stride:  # exports of version 0.1.0
        return None
    mean, std = (tuple(float(value) for value in given[key]) for key in ("pixel_mean", "pixel_std"))
    return Preprocessing(str(given["channels"]), mean, std, stride == "true")  # type: ignore[arg-type]


def _authors_norm(cfg: Any) -> str:
    """Translate the flags ``--norm`` and ``--norm-cfg`` of the authors' training script to a norm name.

    Their Newton layer takes ``eps`` and does not use it.

    Source: the authors' repository, classification/extension/normalization.
    """
    name, options = (getattr(cfg, key, None) for key in ("norm", "norm_cfg"))
    if not (isinstance(cfg, argparse.Namespace) and isinstance(name, str) and isinstance(options, Mapping)):
        return ""
    if not all(isinstance(value, str | float | int | None) for value in options.values()):  # their text may be endless
        return ""
    groups, eps = options.get("num_groups", 32), options.get("eps", 1e-5)
    specs = {
        "BN": "BN",
        "GN": f"GN:groups={groups},eps={eps}",
        "IGWItN": f"GW:groups={groups},iters={options.get('T', 5)},eps=0",
        "IGWSVD": f"GW:groups={groups},eps={eps},solver=zca",
    }
    if name in ("IGWItN", "IGWSVD") and options.get("num_channels"):
        raise WeightsError(
            f"cfg.norm_cfg ({options}): num_channels gives each layer another number of groups, which no norm name "
            "does. Fix: train with num_groups."
        )
    return specs.get(name, "")


def _timm_norm(args: Any) -> str:
    """Return the norm name of a model of :mod:`gw_detectron.timm_models`, from the flags of timm's training script."""
    name, options = (getattr(args, key, None) for key in ("model", "model_kwargs"))
    if not (isinstance(args, argparse.Namespace) and isinstance(name, str) and name.startswith("gw_res")):
        return ""
    norm = options.get("norm", "GW") if isinstance(options, Mapping) else "GW"
    return norm if isinstance(norm, str) else ""


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
    found = notes.by_layer(network, tensors)
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
    norm = resolve_norm(spec.removeprefix("Frozen"), where="norm", channels=[channels])
    if not norm:
        raise WeightsError("norm (''): names no norm. Fix: give a norm name such as GW.")
    with torch.device("meta"):
        return norm_spec(get_norm(norm, channels))


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
