"""Describe a checkpoint: its run, norms and tensors."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from .norm_record import NORMS
from .reading import read_weights_file
from .run_record import RECORD


def describe_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe any file that :func:`read_weights_file` reads.

    Returns:
        Strings, numbers, lists and dicts: ``file``, ``format``, ``iteration``, ``record``, ``provenance``, ``norms``
        (number of layers by norm name), ``tensors`` (by entry of the file: number, values, bytes and the names of
        non-finite tensors) and ``optimizer_state``. What the file does not contain is None.

    Raises:
        UserError: the file cannot be read, see :func:`read_weights_file`.
    """
    contents = read_weights_file(path)
    content = contents.value if isinstance(contents.value, Mapping) else {"": contents.value}
    norms, trainer = content.get(NORMS), content.get("trainer")
    sections: dict[str, list[tuple[str, Tensor]]] = {}
    for key, value in content.items():
        # bare tensors are one section
        sections.setdefault("" if isinstance(value, Tensor) else str(key), []).extend(_tensors(value, str(key), set()))
    plain = {key: content.get(key) for key in (RECORD, "provenance")}
    return {
        "file": os.fspath(path),
        "format": contents.format,
        "iteration": content.get("iteration", trainer.get("iteration") if isinstance(trainer, Mapping) else None),
        **{key: value if isinstance(value, Mapping) else None for key, value in plain.items()},
        "header": dict(contents.metadata) or None,
        "norms": dict(Counter(map(str, norms.values())).most_common()) if isinstance(norms, Mapping) else None,
        "tensors": {key: _summary(tensors) for key, tensors in sections.items() if tensors},
        "optimizer_state": any(key != "model" and "optimizer" in name for key in sections for name, _ in sections[key]),
    }


def _tensors(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """List the tensors in nested containers; each container once, for a file may share one 2**40 times."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(item, f"{name}.{key}", seen)


def _summary(tensors: list[tuple[str, Tensor]]) -> dict[str, Any]:
    return {
        "tensors": len(tensors),
        "values": sum(tensor.numel() for _, tensor in tensors),
        "bytes": sum(tensor.numel() * tensor.element_size() for _, tensor in tensors),
        "non_finite": [name for name, tensor in tensors if not torch.isfinite(tensor).all()],
    }


def format_description(description: Mapping[str, Any]) -> str:
    """Format the result of :func:`describe_checkpoint` as text; the config comes last."""
    record = dict(description[RECORD] or {})
    config = record.pop("config", None)
    plain = {**{key: description[key] for key in ("file", "format", "iteration", "optimizer_state")}, **record}
    rows = list(_rows({**plain, "provenance": description["provenance"], "header": description["header"]}))
    rows += [["norm", f"{count} {norm}"] for norm, count in (description["norms"] or {}).items()]
    for key, part in description["tensors"].items():
        size = f"{part['tensors']} tensors, {part['values']} values, {part['bytes'] / 2**20:.1f} MiB"
        rows.append([f"tensors: {key or 'all'}", size])
        if bad := part["non_finite"]:
            rows.append(["", f"NaN or infinite: {', '.join(bad[:4])}{f' and {len(bad) - 4} more' if bad[4:] else ''}"])
    text = tabulate(rows, tablefmt="plain", disable_numparse=True)
    return f"{text}\n\nconfig:\n{config}" if config else text


def _rows(value: Mapping[str, Any], prefix: str = "") -> Iterator[list[str]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _rows(item, f"{prefix}{key}: ")
        elif item is not None:
            yield [f"{prefix}{key}", str(item)]
