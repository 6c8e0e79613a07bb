"""Whether the checkpoint that a run goes on from is one of the very detector that the config builds."""

from typing import Any

from torch import nn

from ..checkpoint import differing_norms
from ..errors import summarize_names
from ..modeling.norm_keys import NORM_KEYS
from .findings import Findings
from .readable import notes_in, shapes_in


def check_resumed(path: str, model: nn.Module, findings: Findings) -> None:
    """Adds what differs between a checkpoint and the detector that goes on from it.

    Args:
        path: of the checkpoint, which can be read.
        model: the detector; only its shapes and norms are used.
        findings: where the problem goes.
    """
    shapes = shapes_in(path)
    wanted: dict[str, Any] = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    differences = {
        "are only in the checkpoint": [name for name in shapes if name not in wanted],
        "are only in the detector of this config": [name for name in wanted if name not in shapes],
        "have another shape": [
            f"{name} {shapes[name]} in the checkpoint, {shape} here"
            for name, shape in wanted.items()
            if name in shapes and shapes[name] != shape
        ],
    }
    found = [f"{len(names)} tensors {what} ({summarize_names(names)})" for what, names in differences.items() if names]
    if norms := differing_norms(notes_in(path), model):
        found.append(f"{len(norms)} norms differ ({summarize_names(norms)})")
    if found:
        findings.problems.append(
            f"--resume goes on from {path}, which is of another detector: {'; '.join(found)}. Set all keys of the "
            f"model as in that run; norms are set by {', '.join(NORM_KEYS)}. To start another run from these weights, "
            "leave out --resume, and give MODEL.WEIGHTS and another OUTPUT_DIR."
        )
