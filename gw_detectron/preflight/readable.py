"""Whether a weight file is whole, harmless, and of a kind that Detectron2 loads, found out without a model."""

import functools
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..checkpoint import WeightsFileError, read_weights_file


def read_problem(path: str) -> str:
    """Says what keeps a weight file from being loaded.

    Args:
        path: a ``.pth`` or other file of ``torch.save``, or a ``.pkl`` of Detectron2 or Detectron.

    Returns:
        The end of a sentence whose subject is the file, such as "cannot be read: it is cut off", or "" for a good file.
    """
    if not os.path.isfile(path):
        return "does not exist"
    if path.endswith(".safetensors"):
        return f"is safetensors, which Detectron2 does not load by itself; write it as gw://file/{path}"
    try:
        notes_in(path)
    except (WeightsFileError, OSError) as error:
        return str(error).removeprefix(f"{path} ")
    return ""


def notes_in(path: str) -> Mapping[str, Any]:
    """Returns what a weight file holds beside tensors and the state of a training, such as ``__author__``.

    Raises:
        WeightsFileError: the file is damaged, could run code, or holds no dict.
        OSError: it cannot be opened.
    """
    return _known(path, os.path.getmtime(path)).notes


def shapes_in(path: str) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of the model's tensors in a checkpoint; see :func:`notes_in` for what it raises."""
    return _known(path, os.path.getmtime(path)).shapes


class _Known(NamedTuple):
    notes: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]


@functools.lru_cache(maxsize=4)
def _known(path: str, modified: float) -> _Known:
    content = read_weights_file(path).value
    if not isinstance(content, Mapping):
        raise WeightsFileError(f"{path} holds a {type(content).__name__} instead of a dict of tensors")
    training = ("model", "trainer", "optimizer", "scheduler")
    notes = {key: value for key, value in content.items() if key not in training and not isinstance(value, Tensor)}
    model = content.get("model", content)
    tensors = model.items() if isinstance(model, Mapping) else ()
    return _Known(notes, {name: tuple(value.shape) for name, value in tensors if isinstance(value, Tensor)})
