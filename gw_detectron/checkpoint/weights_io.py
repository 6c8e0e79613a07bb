"""Read and write converted weights with their provenance.

The file is Detectron2's .pkl or .safetensors; a yaml beside it holds the config keys.
"""

import dataclasses
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save

from ..atomic import atomic_write
from ..errors import MissingFileError, UserError
from .architecture import WeightsError
from .convert import Conversion, convert, to_torchvision, unwrap
from .provenance import Provenance, sha256_of, tool
from .reading import Contents, WeightsFileError, read_weights_file

SUFFIXES = (".pkl", ".safetensors")
_KEY = "gw_detectron"  # of the provenance in the header of a safetensors file


class WeightsExistError(UserError, FileExistsError):
    """A file would be overwritten."""


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
    """Convert a file of ImageNet weights; write weights and their config yaml.

    Each file is written atomically.

    Args:
        source: see :func:`.reading.read_weights_file` and :func:`.convert.convert`; or converted weights, to write them
            in the other format.
        target: ends in ``.pkl``, for ``MODEL.WEIGHTS``, or in ``.safetensors``, for ``MODEL.WEIGHTS`` as
            ``gw://file/<path>``.
        architecture, positions, keep_fc, pool_norm: see :func:`.convert.convert`.
        overwrite: replace existing files.

    Raises:
        WeightsError: the target has a wrong name.
        WeightsFileError: the source cannot be converted as requested.
        WeightsExistError: a target exists.
        OSError: a file cannot be read or written.
    """
    target = Path(target)
    _check_suffix(target)
    config = target.with_suffix(".yaml")
    if not target.parent.is_dir():
        raise MissingFileError(f"target ({str(target)!r}): folder not found. Fix: create {str(target.parent)!r}.")
    if target.exists() and target.samefile(source):
        raise WeightsError(f"target ({str(target)!r}): is the source itself. Fix: give another name.")
    for path in (target, config):
        if path.exists() and not overwrite:
            raise WeightsExistError(f"target ({str(path)!r}): exists. Fix: give another name or --force.")
    conversion = load_weights(
        source, architecture=architecture, positions=positions, keep_fc=keep_fc, pool_norm=pool_norm
    )
    weights = str(target) if target.suffix == ".pkl" else f"gw://file/{target}"
    with atomic_write(config) as temporary:
        temporary.write_text(conversion.provenance.config_yaml(weights))
        write_weights(target, conversion)
    return conversion


def load_weights(
    path: str | os.PathLike[str],
    *,
    architecture: str | None = None,
    positions: str | None = None,
    keep_fc: bool | None = None,
    pool_norm: str | None = None,
) -> Conversion:
    """Read and check ImageNet weights, converted or not.

    Args:
        path: a source or target of :func:`convert_file`.
        architecture, positions, pool_norm: see :func:`.convert.convert`. None takes the positions and the norm stored
            in converted weights.
        keep_fc: keep the classifier; None keeps it if there is one.

    Returns:
        The weights. The provenance of converted weights names the file they were converted from.

    Raises:
        WeightsFileError: the file is damaged, could run code, or is not as expected.
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
        stored = _stored_provenance(content)
        if stored is not None:
            positions = stored.positions if positions is None else positions
            pool_norm = stored.pool_norm if pool_norm is None and keep_fc else pool_norm
        conversion = convert(
            tensors, architecture=architecture, positions=positions, keep_fc=keep_fc, pool_norm=pool_norm
        )
    except ValueError as error:
        raise WeightsFileError(f"weights ({os.fspath(path)!r}): {error}") from None
    origin: dict[str, Any]
    if stored is None:
        origin = {"source": os.path.basename(path), "source_sha256": sha256_of(path)}
    else:
        origin = {name: getattr(stored, name) for name in ("tool", "source", "source_sha256", "preprocessing")}
    provenance = dataclasses.replace(conversion.provenance, **origin)
    rows = tuple(row._replace(source=names.get(row.source, row.source)) for row in conversion.rows)
    return dataclasses.replace(conversion, rows=rows, provenance=provenance)


def _stored_provenance(content: Contents) -> Provenance | None:
    if _KEY in content.metadata:
        return Provenance.from_dict(json.loads(content.metadata[_KEY]))
    stored = content.value.get("provenance") if isinstance(content.value, Mapping) else None
    return Provenance.from_dict(stored) if isinstance(stored, Mapping) else None


def write_weights(path: str | os.PathLike[str], conversion: Conversion) -> None:
    """Write converted weights and their provenance atomically.

    Args:
        path: ends in ``.pkl`` or ``.safetensors``.
        conversion: the weights.

    Raises:
        WeightsError: the path has another suffix.
        OSError: the file cannot be written.
    """
    path = Path(path)
    _check_suffix(path)
    provenance = dataclasses.asdict(conversion.provenance)
    with atomic_write(path) as temporary:
        if path.suffix == ".safetensors":
            dense = {name: value.contiguous() for name, value in conversion.tensors.items()}
            temporary.write_bytes(save(dense, {"format": "pt", _KEY: json.dumps(provenance)}))
        else:
            content = {
                "model": {name: np.ascontiguousarray(value.numpy()) for name, value in conversion.tensors.items()},
                "__author__": tool(),
                # Detectron2 then matches tensors by the end of their names, so that one file fits detectors with and
                # without FPN and bare backbones
                "matching_heuristics": True,
                "provenance": provenance,
            }
            with open(temporary, "wb") as file:
                pickle.dump(content, file, protocol=4)


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise WeightsError(f"target ({str(path)!r}): wrong suffix. Fix: end the name in {' or '.join(SUFFIXES)}.")
