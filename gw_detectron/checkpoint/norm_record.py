"""Record the norms of a detector in its checkpoints.

The tensors alone do not tell GN from GW, or 64 groups from 32.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..modeling.norm_table import evaluation_spec, norm_rows
from .architecture import Architecture
from .norm_inference import NORMS, norm_key
from .provenance import Provenance

_BATCH_NORM = ["BN", ""]


class NormRecord:
    """Record the norms of a model in its checkpoints, ``{layer: norm name}``.

    Add it to Detectron2's ``DetectionCheckpointer`` with ``add_checkpointable(NORMS, NormRecord(model))``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, str]:
        return {row.layer: row.spec for row in norm_rows(self._model)}

    def load_state_dict(self, recorded: Mapping[str, Any]) -> None:
        """Load nothing: norms come from the config. :func:`norm_differences` compares them."""


def check_norm_record(metadata: Mapping[str, Any]) -> None:
    """Raise ValueError unless the recorded norms, if any, are names by layer."""
    recorded = metadata.get(NORMS, {})
    if not (isinstance(recorded, Mapping) and all(isinstance(word, str) for pair in recorded.items() for word in pair)):
        raise ValueError(f"{NORMS}: a {type(recorded).__name__} that is not norm names by layer. Fix: remove the key.")


def norm_differences(metadata: Mapping[str, Any], model: nn.Module) -> list[str]:
    """List the layers whose norm differs between a checkpoint and a model.

    Norms that compute the same in evaluation are equal: BN may be synchronized or frozen. Layers that only one side has
    are not listed; their tensors show them. Converted weights record the norms of their backbone; their eps may be
    changed.

    Args:
        metadata: the checkpoint's content beside tensors; without a record of norms nothing differs.
        model: the detector.
    """
    if NORMS not in metadata and "provenance" in metadata:
        return _backbone_differences(Provenance.from_dict(metadata["provenance"]), model)
    recorded = metadata.get(NORMS, {})
    return [
        f"{row.layer} {recorded[row.layer]} in the checkpoint, {row.spec} here"
        for row in norm_rows(model)
        if row.layer in recorded and evaluation_spec(recorded[row.layer]) != evaluation_spec(row.spec)
    ]


def _backbone_differences(provenance: Provenance, model: nn.Module) -> list[str]:
    """Compare norms that look alike in the tensors: GN, and whitening with any options."""
    if provenance.whiten_norm is None:  # version 0.1.0 assumed GW
        return []
    rows = {row.layer.removeprefix("backbone.").removeprefix("bottom_up."): row for row in norm_rows(model)}
    differences = []
    for layer, spec in provenance.norms.by_layer(Architecture.parse(provenance.architecture)).items():
        row = rows.get(layer.detectron2)
        if row is None or row.channels != layer.channels:
            continue
        recorded, here = norm_key(spec, row.channels), norm_key(row.spec, row.channels)
        if recorded != here and _BATCH_NORM not in (recorded, here):
            differences.append(f"{row.layer} {spec} in the weights, {row.spec} here")
    return differences
