"""Describe what a checkpoint or weight file records."""

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import yaml
from torch import Tensor

from ..errors import ConfigError, printable
from .network_record import NORMS_KEY, PREPROCESSING_KEY, PROVENANCE_KEY
from .reading import plain_copy, read_weights_file
from .recording import RUN_RECORD_KEY

_SHOWN = ("iteration", RUN_RECORD_KEY, PREPROCESSING_KEY, PROVENANCE_KEY)


def describe_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe any file that :func:`read_weights_file` reads, in plain values.

    What it lacks is left out.
    """
    content = read_weights_file(path)
    values = content.value if isinstance(content.value, Mapping) else {}
    model = values.get("model", values.get("state_dict", values))
    tensors = _values_of(Tensor, model)
    norms = Counter(_values_of(str, values.get(NORMS_KEY)))
    records = {key: values[key] for key in _SHOWN if values.get(key) is not None}

    description: dict[str, Any] = {"file": os.fspath(path), "format": content.format}
    description |= plain_copy(records)
    if norms:
        description["norms"] = dict(norms.most_common())
    description["tensors"] = len(tensors)
    description["values"] = sum(tensor.numel() for tensor in tensors)
    return description


def _values_of(kind: type, mapping: Any) -> list[Any]:
    """Return the values of one type in what may be a mapping."""
    if not isinstance(mapping, Mapping):
        return []
    return [value for value in mapping.values() if isinstance(value, kind)]


def format_description(description: Mapping[str, Any]) -> str:
    """Format the result of :func:`describe_checkpoint` as yaml, without the run's config."""
    shown = dict(description)
    record = shown.get(RUN_RECORD_KEY)
    if isinstance(record, dict):
        shown[RUN_RECORD_KEY] = {key: record[key] for key in record if key != "config"}
    return yaml.safe_dump(shown, sort_keys=False)


def format_config(description: Mapping[str, Any]) -> str:
    """Return the config of the run from a :func:`describe_checkpoint` result, a yaml file.

    Raises:
        ConfigError: the file records none.
    """
    record = description.get(RUN_RECORD_KEY)
    config = record.get("config") if isinstance(record, dict) else None
    if not isinstance(config, str):
        file = description["file"]
        raise ConfigError(
            f"'{file}': records no config. Fix: give a checkpoint of this package's trainer."
        )
    return "\n".join(map(printable, config.splitlines()))
