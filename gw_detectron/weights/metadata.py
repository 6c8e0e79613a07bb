"""Read what a weight file records about its network: norms, preprocessing, provenance."""

import argparse
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import WeightsError
from ..layers import GroupWhitening2d
from ..norms import norm_spec
from .provenance import PROVENANCE, TORCHVISION, Preprocessing, Provenance
from .reading import Contents

#: key of the norm names in a checkpoint and in the header of a safetensors file
NORMS = "norms"
#: further keys in that header: the provenance, and the description of an exported network
HEADER_PROVENANCE, DESCRIPTION = "gw_detectron", "gw_detectron.json"
_HEADER = (NORMS, HEADER_PROVENANCE, DESCRIPTION)
#: the norm layers of an export in torchvision's names; batch normalization is not listed there
NORM_CLASSES: Mapping[str, type[nn.Module]] = {"GroupNorm": nn.GroupNorm, "GroupWhitening2d": GroupWhitening2d}
_STRIDES = {"stem": 4, "res2": 4, "res3": 8, "res4": 16, "res5": 32}


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


def read_notes(contents: Contents) -> Notes:
    """Read what a weight file records about its network.

    Raises:
        WeightsError: a record is damaged, or describes a network that cannot be converted.
    """
    values = contents.value if isinstance(contents.value, Mapping) else {}
    layout = contents.metadata.get("layout", "")
    try:
        texts = {key: contents.metadata.get(key, "") for key in _HEADER}
        header = {key: json.loads(text) for key, text in texts.items() if text.startswith("{")}
        norms, description = header.get(NORMS, values.get(NORMS)), header.get(DESCRIPTION)
        preprocessing = TORCHVISION if values.get("__author__") == "torchvision" else None
        preprocessing = _timm_preprocessing(values.get("args")) or preprocessing
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
    return norm_spec(build_norm(norm)) or ""


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
    """Return the norm name of a model of examples/timm_models.py, from the flags of timm's training script."""
    name, options = (getattr(args, key, None) for key in ("model", "model_kwargs"))
    if not (isinstance(args, argparse.Namespace) and isinstance(name, str) and name.startswith("gw_res")):
        return ""
    norm = options.get("norm", "GW") if isinstance(options, Mapping) else "GW"
    return norm if isinstance(norm, str) else ""


def _timm_preprocessing(args: Any) -> Preprocessing | None:
    """Return the preprocessing in the flags ``--mean`` and ``--std`` of timm's training script, if both are given."""
    given = [getattr(args, key, None) for key in ("mean", "std")]
    if not (isinstance(args, argparse.Namespace) and all(isinstance(values, list | tuple) for values in given)):
        return None
    mean, std = (tuple(255 * float(value) for value in values) for values in given)  # type: ignore[union-attr]
    if len(mean) != 3 or len(std) != 3:
        raise WeightsError(
            f"args of timm's training: mean {given[0]} and std {given[1]} do not have three values each, as RGB images "
            "need. Fix: train with three values each."
        )
    return Preprocessing("RGB", mean, std, False)
