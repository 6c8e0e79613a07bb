"""Converted weights on disk: Detectron2's .pkl or safetensors, with their provenance inside and a yaml beside."""

import dataclasses
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..atomic import atomic_write
from .convert import Conversion, convert, to_torchvision, unwrap
from .provenance import Provenance, tool
from .reading import Contents, WeightsFileError, read_weights_file

SUFFIXES = (".pkl", ".safetensors")
_KEY = "gw_detectron"  # of the provenance in the header of a safetensors file


def convert_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    architecture: str | None = None,
    positions: str | None = None,
    keep_fc: bool = False,
    pool_norm: str | None = None,
    overwrite: bool = False,
) -> Conversion:
    """Converts a file of ImageNet weights; writes the weights and, beside them, the yaml that has to go with them.

    Both files appear whole, or neither does.

    Args:
        source: see :func:`.convert.convert` and :func:`.reading.read_weights_file` for what it may be; or converted
            weights, to be written as the other kind of file.
        target: ends in ``.pkl``, which ``MODEL.WEIGHTS`` takes, or ``.safetensors``, which it takes as
            ``gw://file/<path>``.
        architecture: what it has to be, e.g. ``R-50``; None accepts any.
        positions: where whitening has to stand, e.g. ``S1-B2``; None accepts any.
        keep_fc: keep the classifier, as ``linear``, and the norm before it, as ``avgpool.norm``.
        pool_norm: the name of that norm with its options, which is noted in the file; see :func:`.convert.convert`.
        overwrite: replace files that exist.

    Raises:
        ValueError: the source cannot be converted as asked for.
        FileExistsError: a target exists.
        OSError: a file cannot be read or written.
    """
    target = Path(target)
    fragment = target.with_suffix(".yaml")
    if target.suffix not in SUFFIXES:
        raise ValueError(f"{target}: the name of converted weights ends in {' or '.join(SUFFIXES)}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to write {target.name} to")
    if target.exists() and target.samefile(source):
        raise ValueError(f"{target} is the source itself; give the converted weights another name")
    for path in (target, fragment):
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists; remove it, give another name, or allow overwriting (--force)")
    conversion, provenance = load_weights(
        source, architecture=architecture, positions=positions, keep_fc=keep_fc, pool_norm=pool_norm
    )
    weights = str(target) if target.suffix == ".pkl" else f"gw://file/{target}"
    with atomic_write(fragment) as beside:
        beside.write_text(provenance.fragment(weights))
        write_weights(target, conversion.tensors, provenance)
    return conversion


def load_weights(
    path: str | os.PathLike[str],
    *,
    architecture: str | None = None,
    positions: str | None = None,
    keep_fc: bool | None = None,
    pool_norm: str | None = None,
) -> tuple[Conversion, Provenance]:
    """Reads ImageNet weights, converted already or not, with all checks of :func:`.convert.convert`.

    Args:
        path: a file for :func:`convert_file`, or one of its making.
        architecture: what it has to be, e.g. ``R-50``; None accepts any.
        positions: where whitening has to stand, e.g. ``S1-B2``; None accepts any.
        keep_fc: keep the classifier; None keeps it if there is one.
        pool_norm: the norm before the classifier; None takes the one that converted weights note, and otherwise a
            guess, see :func:`.convert.convert`.

    Returns:
        The weights, and where they come from; for converted weights that is the file they were converted from.

    Raises:
        ValueError: the file is damaged, could run code, or is not what was asked for.
        OSError: the file cannot be read.
    """
    content = read_weights_file(path)
    try:
        tensors = unwrap(content.value)
        names: Mapping[str, str] = {}
        if "stem.conv1.weight" in tensors:
            converted, tensors = tensors, to_torchvision(tensors)
            names = dict(zip(tensors, converted, strict=True))
        if keep_fc is None:
            keep_fc = "fc.weight" in tensors
        noted = _noted(content)
        if pool_norm is None and noted is not None and keep_fc:
            pool_norm = noted.pool_norm
        conversion = convert(
            tensors, architecture=architecture, positions=positions, keep_fc=keep_fc, pool_norm=pool_norm
        )
        if names:
            rows = tuple(row._replace(source=names[row.source]) for row in conversion.rows)
            conversion = dataclasses.replace(conversion, rows=rows)
        # a guess is not noted, so that it stays one for all who read the file
        provenance = dataclasses.replace(noted or Provenance.of(conversion, path), pool_norm=pool_norm)
        return conversion, provenance
    except ValueError as error:
        raise WeightsFileError(f"{path} cannot be used: {error}") from None


def _noted(content: Contents) -> Provenance | None:
    if _KEY in content.metadata:
        return Provenance.from_dict(json.loads(content.metadata[_KEY]))
    noted = content.value.get("provenance") if isinstance(content.value, Mapping) else None
    return Provenance.from_dict(noted) if isinstance(noted, Mapping) else None


def write_weights(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], provenance: Provenance) -> None:
    """Writes tensors of a Detectron2 ResNet; the file appears whole, or not at all.

    Args:
        path: ends in ``.pkl`` or ``.safetensors``.
        tensors: under the names of ``backbone.bottom_up`` without that prefix.
        provenance: goes into the file.

    Raises:
        ValueError: another ending.
        OSError: the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: the name of converted weights ends in {' or '.join(SUFFIXES)}")
    with atomic_write(path) as beside:
        _write(beside, path.suffix, tensors, provenance)


def _write(path: Path, suffix: str, tensors: Mapping[str, Tensor], provenance: Provenance) -> None:
    if suffix == ".safetensors":
        dense = {name: value.contiguous() for name, value in tensors.items()}
        try:
            save_file(dense, path, metadata={"format": "pt", _KEY: json.dumps(provenance.to_dict())})
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from None
        return
    content = {
        "model": {name: np.ascontiguousarray(value.numpy()) for name, value in tensors.items()},
        "__author__": tool(),
        # Detectron2 then finds each tensor's place by the end of its name, so that one file fits a detector with FPN,
        # one without, and a bare backbone
        "matching_heuristics": True,
        "provenance": provenance.to_dict(),
    }
    with open(path, "wb") as file:
        pickle.dump(content, file, protocol=4)
