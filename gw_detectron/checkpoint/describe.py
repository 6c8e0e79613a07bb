"""Describe a checkpoint: its run, norms and tensors."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import yaml
from torch import Tensor

from ..errors import ConfigError, printable
from ..weights.network import NORMS, PREPROCESSING_KEY, PROVENANCE
from ..weights.reading import read_weights_file
from .records import RUN_RECORD


def describe_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe any file that :func:`read_weights_file` reads.

    Returns:
        Plain values: ``file``, ``format``, ``iteration``, ``record`` (of the run), ``preprocessing`` and ``provenance``
        (of converted weights), ``header`` (of a safetensors file), ``norms`` (number of layers by norm name),
        ``tensors`` (number) and ``values`` (of the model). What the file does not contain is left out.

    Raises:
        UserError: the file cannot be read, see :func:`read_weights_file`.
    """
    contents = read_weights_file(path)
    content = contents.value if isinstance(contents.value, Mapping) else {}
    model, norms = content.get("model", content), content.get(NORMS)
    tensors = [each for each in model.values() if isinstance(each, Tensor)] if isinstance(model, Mapping) else []
    names = [name for name in norms.values() if isinstance(name, str)] if isinstance(norms, Mapping) else []
    description = {
        "file": os.fspath(path),
        "format": contents.format,
        **{key: content.get(key) for key in ("iteration", RUN_RECORD, PREPROCESSING_KEY, PROVENANCE)},
        "header": dict(contents.metadata) or None,
        "norms": dict(Counter(names).most_common()) or None,
        "tensors": len(tensors),
        "values": sum(tensor.numel() for tensor in tensors),
    }
    plain = json.dumps({key: value for key, value in description.items() if value is not None}, default=str)
    return json.loads(plain)


def format_description(description: Mapping[str, Any]) -> str:
    """Format the result of :func:`describe_checkpoint` as yaml, without the run's config."""
    record = description.get(RUN_RECORD)
    if isinstance(record, dict):
        record = {key: value for key, value in record.items() if key != "config"}
        description = {**description, RUN_RECORD: record}
    return yaml.safe_dump(dict(description), sort_keys=False)


def format_config(description: Mapping[str, Any]) -> str:
    """Return the config of the run from the result of :func:`describe_checkpoint`, a yaml file.

    Raises:
        ConfigError: the file records none.
    """
    record = description.get(RUN_RECORD)
    config = record.get("config") if isinstance(record, dict) else None
    if not isinstance(config, str):
        file = description["file"]
        raise ConfigError(f"'{file}': records no config. Fix: give a checkpoint of this package's trainer.")
    return "\n".join(map(printable, config.splitlines()))
