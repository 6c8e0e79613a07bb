"""The norms of a detector, noted in its checkpoints: tensors do not tell GN from GW, or 64 groups from 32."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..modeling.norm_table import in_evaluation, norm_rows

#: the key of the note in a checkpoint
NORMS = "norms"


class NormMismatchError(ValueError):
    """Weights were trained with other norms than those they are given to."""


class NoteOfNorms:
    """Writes the norms of a model into its checkpoints, ``{layer: norm name}``.

    An object for the ``add_checkpointable`` of Detectron2's ``DetectionCheckpointer``, under the key :data:`NORMS`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, str]:
        return {row.layer: row.spec for row in norm_rows(self._model)}

    def load_state_dict(self, noted: Mapping[str, Any]) -> None:
        """Loads nothing, for norms come from the config; whether they are the same is said by those who load."""


def differing_norms(notes: Mapping[str, Any], model: nn.Module) -> list[str]:
    """The layers of a model that a checkpoint has with another norm.

    Norms that compute the same in evaluation are the same: BN may be synchronised, or frozen. Layers that only one of
    both has show by their tensors.

    Args:
        notes: what the checkpoint holds beside tensors; without a note of norms nothing is known to differ.
        model: the detector.
    """
    noted = notes.get(NORMS)
    if not isinstance(noted, Mapping):
        return []
    return [
        f"{row.layer} {noted[row.layer]} in the checkpoint, {row.spec} here"
        for row in norm_rows(model)
        if row.layer in noted and in_evaluation(str(noted[row.layer])) != in_evaluation(row.spec)
    ]
