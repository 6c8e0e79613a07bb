"""Describe a checkpoint: its run, norms and tensors."""

import argparse
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from torch import Tensor

from ..errors import ConfigError, printable
from ..weights.reading import check_size, is_finite, read_weights_file
from ..weights.record import NORMS, PREPROCESSING_KEY, PROVENANCE
from .records import RUN_RECORD, config_differences

_DEEPEST = 100  # of nested containers


def describe_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe any file that :func:`read_weights_file` reads.

    Returns:
        Strings, numbers, lists and dicts: ``file``, ``format``, ``iteration``, ``record`` (of the run),
        ``preprocessing`` and ``provenance`` (of converted weights), ``header`` (of a safetensors file), ``norms``
        (number of layers by norm name), ``optimizer_state`` (whether there is one) and ``tensors`` (by entry of the
        file: number, values, bytes, names of non-finite tensors). What the file does not contain is left out.

    Raises:
        UserError: the file cannot be read, see :func:`read_weights_file`.
    """
    contents = read_weights_file(path)
    content = contents.value if isinstance(contents.value, Mapping) else {"tensor": contents.value}
    norms, trainer = content.get(NORMS), content.get("trainer")
    names = [name for name in norms.values() if isinstance(name, str)] if isinstance(norms, Mapping) else []
    entries: dict[str, dict[str, Tensor]] = {}
    for key, value in content.items():  # tensors that are not in a dict form one entry
        name = "tensors" if isinstance(value, Tensor) else str(key)
        entries.setdefault(name, {}).update(_tensors(value, str(key), contents.size, set()))
    description = {
        "file": os.fspath(path),
        "format": contents.format,
        "iteration": content.get("iteration", trainer.get("iteration") if isinstance(trainer, Mapping) else None),
        **{key: content.get(key) for key in (RUN_RECORD, PREPROCESSING_KEY, PROVENANCE)},
        "header": dict(contents.metadata) or None,
        "norms": dict(Counter(names).most_common()) or None,
        "optimizer_state": any("optimizer" in name for key in {*entries} - {"model"} for name in entries[key]),
        "tensors": {key: _summary(tensors) for key, tensors in entries.items() if tensors},
    }
    return {key: _plain(value, set()) for key, value in description.items() if value is not None}


def _tensors(value: Any, name: str, size: int, seen: set[int], depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """List the tensors in nested containers; each container once, for a small file can repeat one 2**40 times."""
    if isinstance(value, Tensor):
        check_size(name, value, size)
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen and depth < _DEEPEST:
        seen.add(id(value))
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(item, f"{name}.{key}", size, seen, depth + 1)


def _plain(value: Any, seen: set[int], depth: int = 0) -> Any:
    """Copy nested containers, each once, with strings for values that JSON does not have."""
    value = vars(value) if isinstance(value, argparse.Namespace) else value
    if isinstance(value, (Mapping, list, tuple)):
        if id(value) in seen or depth == _DEEPEST:
            return "(as above)" if id(value) in seen else "(nested deeply)"
        seen.add(id(value))
        if isinstance(value, Mapping):
            return {str(key): _plain(item, seen, depth + 1) for key, item in value.items()}
        return [_plain(item, seen, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _summary(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        "number": len(tensors),
        "values": sum(tensor.numel() for tensor in tensors.values()),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        "non_finite": [name for name, tensor in tensors.items() if not is_finite(tensor)],
    }


def format_description(description: Mapping[str, Any]) -> str:
    """Format the result of :func:`describe_checkpoint` as yaml, with the number of lines of the run's config."""
    record, end = description.get(RUN_RECORD), ""
    if isinstance(record, dict) and "config" in record:
        config = str(record["config"])
        end = f"config: {len(config.splitlines())} lines, printed with --config"
        record = {key: value for key, value in record.items() if key != "config"}
        if isinstance(parts := record.get("earlier_parts"), list):  # with the keys that have changed since
            record["earlier_parts"] = [
                {**part, "config": {"changed later": [*config_differences(part, config)]}}
                if isinstance(part, dict) and "config" in part
                else part
                for part in parts
            ]
        description = {**description, RUN_RECORD: record}
    return yaml.safe_dump(dict(description), sort_keys=False) + end


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
