"""Record the norms and the Weight Standardization of a detector in its checkpoints.

The tensors alone do not tell GN from GW, 64 groups from 32, or raw weights from those that are standardized.
"""

from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor, nn

from ..norms.convs import CONVS, conv_names
from ..norms.norm_listing import evaluation_spec, norm_rows
from .architecture import DETECTOR_PREFIX, Architecture
from .checkpoint_file import Checkpoint
from .norm_inference import norm_key
from .provenance import Provenance
from .weight_notes import NORMS

_MEAN = ".running_mean"


class NormRecord:
    """Record the norms of a model in its checkpoints, ``{layer: norm name}``, and ``{convolution: "WS"}``.

    Add it to Detectron2's ``DetectionCheckpointer`` with ``add_checkpointable(NORMS, NormRecord(model))``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, str]:
        return {row.layer: row.spec for row in norm_rows(self._model)} | conv_names(self._model)

    def load_state_dict(self, recorded: Mapping[str, Any]) -> None:
        """Load nothing: norms come from the config. :func:`norm_differences` compares them."""


def norm_differences(checkpoint: Checkpoint, model: nn.Module) -> list[str]:
    """List the layers whose norm or Weight Standardization differs between a checkpoint and a model.

    Norms that compute the same in evaluation are equal: BN may be synchronized or frozen. Layers that only one side has
    are not listed; their tensors show them. Converted weights record the norms of their backbone; their eps may be
    changed. Without a record, names of tensors tell BN and GN from others.
    """
    tensors, metadata, provenance = checkpoint.tensors, checkpoint.metadata, checkpoint.provenance
    if NORMS not in metadata:
        return _backbone_differences(provenance, model) if provenance else _named_differences(tensors, model)
    recorded, used = metadata[NORMS], NormRecord(model).state_dict()
    stored = {name.rpartition(".")[0] for name in tensors} | recorded.keys()
    differences = []
    for name, _ in model.named_modules():
        theirs = _stored_name(name, stored, matching_heuristics=metadata.get("matching_heuristics", False))
        before, here = recorded.get(theirs, ""), used.get(name, "")
        if theirs is None or before == here:
            continue
        if before in CONVS and here in CONVS:
            differences.append(f"{name} {before or here} {'in the checkpoint' if before else 'here'} only")
        elif before and here and evaluation_spec(before) != evaluation_spec(here):
            differences.append(f"{name} {before} in the checkpoint, {here} here")
    return differences


def _stored_name(name: str, stored: Container[str], *, matching_heuristics: bool) -> str | None:
    """Return the name in a checkpoint of a module, whose tensors load by equal names or by the end of its name."""
    while name not in stored:
        if not (matching_heuristics and "." in name):
            return None
        name = name.partition(".")[2]
    return name


def _backbone_differences(provenance: Provenance, model: nn.Module) -> list[str]:
    """Compare the norms of a ResNet, also where the tensors look alike."""
    rows = {DETECTOR_PREFIX.sub("", row.layer): row for row in norm_rows(model)}
    differences = []
    for layer, spec in provenance.norms.by_layer(Architecture.parse(provenance.architecture)).items():
        row = rows.get(layer.detectron2)
        if row is None or row.channels != layer.channels:  # the tensors show it
            continue
        if norm_key(spec, row.channels) != norm_key(row.spec, row.channels):
            differences.append(f"{row.layer} {spec} in the weights, {row.spec} here")
    return differences


def _named_differences(tensors: Mapping[str, Tensor], model: nn.Module) -> list[str]:
    """Compare the norms of a ResNet with those that the names of tensors prove.

    Caffe2's files have BN's statistics multiplied into its scale, so their tensors fit any norm.
    """
    with_statistics = {DETECTOR_PREFIX.sub("", name[: -len(_MEAN)]) for name in tensors if name.endswith(_MEAN)}
    bn, gn = (any(name.endswith(f"_{kind}_s") for name in tensors) for kind in ("bn", "gn"))
    own, differences = model.state_dict().keys(), []
    for row in norm_rows(model):
        if not DETECTOR_PREFIX.match(row.layer):
            continue
        if f"{row.layer}{_MEAN}" not in own and (bn or DETECTOR_PREFIX.sub("", row.layer) in with_statistics):
            differences.append(f"{row.layer} BN in the weights, {row.spec} here")
        elif gn and not row.spec.startswith("GN"):
            differences.append(f"{row.layer} GN in the weights, {row.spec} here")
    return differences
