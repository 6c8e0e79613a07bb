"""Check pickled layers."""

from collections.abc import Mapping
from typing import Any

from ..ops.solvers import Solver


def check_pickled_solver(layer: str, state: Mapping[str, Any]) -> None:
    """Refuse the pickled state of a layer of version 0.1.0.

    There the ReLU behind a norm was part of the norm, so that the whole model would compute another function.
    """
    if not isinstance(state.get("solver"), Solver):
        raise ValueError(
            f"{layer} (pickled by version 0.1.0): whole models of that version cannot be loaded. Fix: save the "
            "state_dict with 0.1.0, build the model anew and load it."
        )
