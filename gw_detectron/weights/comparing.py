"""Compare the norms of a checkpoint with those of a model."""

import re
from collections.abc import Collection, Mapping

from detectron2.checkpoint.c2_model_loading import convert_c2_detectron_names
from torch import Size, Tensor, nn

from ..norms import CONVS, can_start_from, is_same_norm, norm_rows
from .network_record import norm_record
from .opening import Checkpoint

_MEAN = ".running_mean"
#: what stands before the names that all detectors with a ResNet share
_DETECTOR_PREFIX = re.compile(r"^.*?\b(?=stem\.|res[2-5]\.\d)")


def norm_differences(
    checkpoint: Checkpoint, model: nn.Module, *, resumed: bool = False
) -> list[str]:
    """List the layers whose norm or Weight Standardization differs from a model's.

    Norms that compute the same in evaluation are equal: BN may be synchronized or frozen. Layers
    that only one side has are not listed; their tensors show them. The eps of converted weights
    may be changed. Without a record, names of tensors tell BN and GN from others. A model with MixGW or
    MixBN may start from BN, unless it is to be ``resumed``.
    """
    if checkpoint.network.norms is None:
        return _differences_by_names(checkpoint.tensors, model)

    used = norm_record(model)
    is_converted = checkpoint.network.provenance is not None
    differences = []
    for name, before in recorded_norms(checkpoint, model).items():
        here = used.get(name, "")
        is_start = not resumed and can_start_from(here, before)
        if before == here or is_start:
            continue
        if before in CONVS and here in CONVS:
            if not is_converted:  # the values of raw and standardized weights agree
                side = "in the checkpoint" if before else "here"
                differences.append(f"{name} {before or here} {side} only")
        elif (
            before
            and here
            and not is_same_norm(before, here, with_eps=not is_converted)
        ):
            differences.append(f"{name} {before} in the checkpoint, {here} here")
    return differences


def recorded_norms(checkpoint: Checkpoint, model: nn.Module) -> dict[str, str]:
    """Return the recorded norm, or "", of each module of a model that the checkpoint contains.

    Names are the model's.
    """
    norms = checkpoint.network.norms or {}
    # loading strips the prefix of parallel models
    recorded = {name.removeprefix("module."): spec for name, spec in norms.items()}
    stored = {
        name.removeprefix("module.").rpartition(".")[0] for name in checkpoint.tensors
    }
    stored |= recorded.keys()
    by_ending = checkpoint.metadata.get("matching_heuristics", False)

    by_name = {}
    for name, _ in model.named_modules():
        theirs = _ending_in(stored, name) if by_ending else name
        if theirs in stored:
            by_name[name] = recorded.get(theirs, "")
    return by_name


def stored_shapes(checkpoint: Checkpoint, model: nn.Module) -> dict[str, Size]:
    """Return the shapes that a checkpoint has for tensors, under the names of a model where these are known."""
    tensors = checkpoint.tensors
    if checkpoint.metadata.get("__author__") == "Caffe2":
        tensors, _ = convert_c2_detectron_names(tensors)
    shapes = {
        name.removeprefix("module."): value.shape for name, value in tensors.items()
    }
    if not checkpoint.metadata.get("matching_heuristics"):
        return shapes

    endings = {name: _ending_in(shapes, name) for name in model.state_dict()}
    return {name: shapes[ending] for name, ending in endings.items() if ending}


def _ending_in(names: Collection[str], name: str) -> str:
    """Return the longest ending of a dotted name among names, or ""."""
    while name and name not in names:
        name = name.partition(".")[2]
    return name


def _differences_by_names(tensors: Mapping[str, Tensor], model: nn.Module) -> list[str]:
    """Compare norms with those that the names of tensors prove.

    Caffe2's files, of ResNets, have BN's statistics multiplied into its scale, so their tensors
    fit any norm.
    """
    proven = {
        _DETECTOR_PREFIX.sub("", name.removesuffix(_MEAN)): "BN"
        for name in tensors
        if name.endswith(_MEAN)
    }
    # Caffe2's names; those of GN may be of FPN and heads
    endings = {name[-5:] for name in tensors}
    in_resnet = ""
    if "_bn_s" in endings:
        in_resnet = "BN"
    elif "_gn_s" in endings:
        in_resnet = "GN"

    own = model.state_dict()
    differences = []
    for row in norm_rows(model):
        before = proven.get(_DETECTOR_PREFIX.sub("", row.layer), "")
        if _DETECTOR_PREFIX.match(row.layer):
            before = before or in_resnet
        here = "BN" if f"{row.layer}{_MEAN}" in own else row.spec.partition(":")[0]
        if before and before != here:
            differences.append(
                f"{row.layer} {before} in the checkpoint, {row.spec} here"
            )
    return differences
