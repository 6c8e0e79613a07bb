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

from ..atomic import atomic_write, remove_unfinished
from ..errors import (
    MissingFileError,
    UnknownNormError,
    WeightsError,
    WeightsExistError,
    WeightsFileError,
)
from .conversion import Conversion, convert, to_torchvision, unwrap
from .metadata import HEADER_PROVENANCE, Notes, read_notes
from .provenance import PREPROCESSING, PROVENANCE, TORCHVISION, Preprocessing, tool
from .reading import read_weights_file

SUFFIXES = (".pkl", ".safetensors")


def convert_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    keep_fc: bool = False,
    overwrite: bool = False,
    **options: Any,
) -> Conversion:
    """Convert a file of ImageNet weights; write weights and their config yaml.

    Each file is written atomically.

    Args:
        source: see :func:`.reading.read_weights_file` and :func:`.conversion.convert`; or converted weights, to
            write them in the other format.
        target: ends in ``.pkl``, for ``MODEL.WEIGHTS``, or in ``.safetensors``, for ``MODEL.WEIGHTS`` as
            ``gw://file/<path>``.
        keep_fc: keep the classifier.
        overwrite: replace existing files.
        options: ``architecture``, ``positions``, ``norm``, ``pool_norm``, ``preprocessing`` and ``sha256`` of
            :func:`load_weights`.

    Raises:
        WeightsError: the target has a wrong name.
        UnknownNormError: the source does not prove a norm.
        WeightsFileError: the source cannot be converted as requested.
        WeightsExistError: a target exists.
        OSError: a file cannot be read or written.
    """
    target = Path(target)
    if target.suffix not in SUFFIXES:
        raise WeightsError(f"target ({str(target)!r}): wrong suffix. Fix: end the name in {' or '.join(SUFFIXES)}.")
    config = target.with_suffix(".yaml")
    if not target.parent.is_dir():
        raise MissingFileError(f"target ({str(target)!r}): folder not found. Fix: create {str(target.parent)!r}.")
    if target.exists() and os.path.exists(source) and target.samefile(source):
        raise WeightsError(f"target ({str(target)!r}): is the source itself. Fix: give another name.")
    for path in (target, config):
        if path.exists() and not overwrite:
            raise WeightsExistError(f"target ({str(path)!r}): exists. Fix: give another name or --force.")
    remove_unfinished(target.parent)
    conversion = load_weights(source, keep_fc=keep_fc, **options)
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
    norm: str | None = None,
    keep_fc: bool | None = None,
    pool_norm: str | None = None,
    preprocessing: str | None = None,
    sha256: str | None = None,
) -> Conversion:
    """Read and check ImageNet weights, converted or not.

    Args:
        path: a source or target of :func:`convert_file`.
        architecture, positions, norm, pool_norm: see :func:`.conversion.convert`.
        keep_fc: keep the classifier; None keeps it if there is one.
        preprocessing: a name in :data:`.provenance.PREPROCESSING`; None if recorded, or if the source has torchvision's
            names, which imply torchvision's preprocessing.
        sha256: the expected SHA-256 of the file; None accepts any.

    Returns:
        The weights. The provenance of converted weights names the file they were converted from.

    Raises:
        UnknownNormError: the file does not prove a norm.
        WeightsFileError: the file is damaged, could run code, or is not as expected.
        OSError: the file cannot be read.
    """
    content = read_weights_file(path)
    if sha256 not in (None, content.sha256):
        raise WeightsFileError(
            f"weights ({os.fspath(path)!r}): SHA-256 is {content.sha256} instead of {sha256}: the file was replaced. "
            "Fix: try again."
        )
    try:
        notes = read_notes(content)
        tensors = unwrap(content.value)
        names: Mapping[str, str] = {}
        if "stem.conv1.weight" in tensors:
            converted, tensors = tensors, to_torchvision(tensors)
            names = dict(zip(tensors, converted, strict=True))
        if keep_fc is None:
            keep_fc = "fc.weight" in tensors
        images = _preprocessing(notes, preprocessing, detectron2_names=bool(names))
        conversion = convert(
            tensors,
            architecture=architecture,
            positions=positions,
            norm=norm,
            keep_fc=keep_fc,
            pool_norm=pool_norm,
            notes=notes,
        )
    except ValueError as error:
        kind = UnknownNormError if isinstance(error, UnknownNormError) else WeightsFileError
        raise kind(f"weights ({os.fspath(path)!r}): {error}") from None
    origin: dict[str, Any] = {"source": os.path.basename(path), "source_sha256": content.sha256}
    if notes.provenance is not None:
        origin = {name: getattr(notes.provenance, name) for name in ("tool", "source", "source_sha256")}
    provenance = dataclasses.replace(conversion.provenance, **origin, preprocessing=images)
    rows = tuple(row._replace(source=names.get(row.source, row.source)) for row in conversion.rows)
    return dataclasses.replace(conversion, rows=rows, provenance=provenance)


def _preprocessing(notes: Notes, stated: str | None, *, detectron2_names: bool) -> Preprocessing:
    """Return the recorded or stated preprocessing; torchvision's names imply torchvision's."""
    known = ", ".join(PREPROCESSING)
    if stated is not None and stated not in PREPROCESSING:
        raise WeightsError(f"preprocessing ({stated!r}): unknown. Fix: give one of {known}.")
    if notes.preprocessing is None and stated is None and detectron2_names:
        raise WeightsError(
            "preprocessing (not recorded): the names are Detectron2's, whose weights need RGB or BGR images, with or "
            f"without division by std. Fix: state --preprocessing (in Python, preprocessing=) as one of {known}."
        )
    if notes.preprocessing is not None and stated is not None and notes.preprocessing != PREPROCESSING[stated]:
        raise WeightsError(f"preprocessing ({stated!r}): the file records {notes.preprocessing}. Fix: leave it out.")
    return notes.preprocessing or (PREPROCESSING[stated] if stated else TORCHVISION)


def write_weights(path: str | os.PathLike[str], conversion: Conversion) -> None:
    """Write converted weights and their provenance atomically.

    Args:
        path: ends in ``.pkl`` or ``.safetensors``.
        conversion: the weights.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    provenance = dataclasses.asdict(conversion.provenance)
    with atomic_write(path) as temporary:
        if path.suffix == ".safetensors":
            dense = {name: value.contiguous() for name, value in conversion.tensors.items()}
            temporary.write_bytes(save(dense, {"format": "pt", HEADER_PROVENANCE: json.dumps(provenance)}))
        else:
            content = {
                "model": {name: np.ascontiguousarray(value.numpy()) for name, value in conversion.tensors.items()},
                "__author__": tool(),
                # Detectron2 then matches tensors by the end of their names, so that one file fits detectors with and
                # without FPN and bare backbones
                "matching_heuristics": True,
                PROVENANCE: provenance,
            }
            with open(temporary, "wb") as file:
                pickle.dump(content, file, protocol=4)
