"""Open a checkpoint once, safely: from a file, an address, or the folder of a run."""

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from detectron2.config import CfgNode
from detectron2.utils.file_io import PathManager
from torch import Tensor

from ..errors import ConfigError, FileAccessError, UserError, WeightsFileError
from ..weights.architecture import DETECTOR_PREFIX, infer_architecture
from ..weights.catalog import local_path
from ..weights.metadata import NORMS
from ..weights.pickle_check import SAVE_AGAIN
from ..weights.provenance import PROVENANCE, TORCHVISION, Preprocessing, Provenance
from ..weights.reading import Contents, read_weights_file

_LOCAL_SCHEME = "gw://file/"
_LONGEST_NAME = 4096  # of a file, in characters
_TAG = "last_checkpoint"  # of Detectron2: the file that names the newest checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory.

    Args:
        address: as the user gave it: a path, ``gw://...``, ``https://...``, also with ``?matching_heuristics=True``.
        path: the file on this machine.
        tensors: the model's tensors by name.
        metadata: everything else in the file, e.g. ``norms``, ``provenance``, ``__author__`` and the training state.
        sha256: the SHA-256 of the file that was read.
        provenance: of weights that this package converted.
    """

    address: str
    path: str
    tensors: dict[str, Tensor] = field(repr=False)
    metadata: dict[str, Any] = field(repr=False)
    sha256: str = ""
    provenance: Provenance | None = None

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How images were given to the weights in training; None if the file does not tell."""
        if self.provenance is not None:
            return self.provenance.preprocessing
        return TORCHVISION if self.metadata.get("__author__") == "torchvision" else None  # by Detectron2's tool


@dataclass
class StartWeights:
    """Checkpoint that a run starts from, or its error.

    Remote weights are fetched by the first call of :meth:`fetch` or :meth:`checkpoint`.

    Args:
        address: path or address, "" for random initial values.
        resumed: whether it is the last checkpoint of the same run.
        opened: the checkpoint; None for random initial values and after an error.
        error: why it cannot be opened.
        unfetched: opens remote weights; None once they are open.
    """

    address: str = ""
    resumed: bool = False
    opened: Checkpoint | None = None
    error: Exception | None = None
    unfetched: Callable[[], Checkpoint] | None = field(default=None, repr=False)

    def fetch(self) -> None:
        """Fetch and open remote weights; an error is stored."""
        if self.unfetched is not None:
            try:
                self.opened = self.unfetched()
            except (UserError, OSError) as error:
                self.error = error
            self.unfetched = None

    def checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint, or None for random initial values.

        Raises:
            The error of opening the checkpoint, if there was one.
        """
        self.fetch()
        if self.error is not None:
            raise self.error
        return self.opened


def last_checkpoint(folder: str) -> str:
    """Return the path of the checkpoint that ``last_checkpoint`` in a run folder names.

    Without this file it is ``model_final.pth``, as a run without a stop ends with it.

    Raises:
        WeightsFileError: the file does not hold the name of a file.
    """
    tag = os.path.join(folder, _TAG)
    if not PathManager.exists(tag):
        return os.path.join(folder, "model_final.pth")
    if not PathManager.isfile(tag):  # to open a pipe would block
        raise WeightsFileError(f"{tag}: not a regular file. Fix: write the checkpoint's file name into a file.")
    with PathManager.open(tag, "r", errors="replace") as file:
        name = file.read(_LONGEST_NAME + 1).strip()
    if not 0 < len(name) <= _LONGEST_NAME:
        wrong = "longer than a file name" if name else "empty file"
        raise WeightsFileError(f"{tag}: {wrong}. Fix: write the checkpoint's file name into it.")
    return os.path.join(folder, name)


def open_start_weights(cfg: CfgNode, *, resume: bool = False) -> StartWeights:
    """Open the checkpoint that a run starts from.

    An error is stored in the result instead of raised. Nothing is fetched from the network yet.

    Args:
        cfg: Detectron2's config; ``MODEL.WEIGHTS`` is opened.
        resume: open the last checkpoint of ``OUTPUT_DIR`` instead, if there is one.
    """
    address, key, resumed = cfg.MODEL.WEIGHTS or "", "MODEL.WEIGHTS", False
    try:
        if resume and PathManager.exists(tag := os.path.join(cfg.OUTPUT_DIR, _TAG)):
            key, resumed = tag, True
            address = last_checkpoint(cfg.OUTPUT_DIR)
        if address and not local_file(address):
            return StartWeights(address, resumed, unfetched=functools.partial(open_checkpoint, address, key))
        return StartWeights(address, resumed, open_checkpoint(address, key) if address else None)
    except (UserError, OSError) as error:
        return StartWeights(address, resumed, error=error)


def local_file(address: str | None) -> str:
    """Return the file that an address names, without its prefix and options; "" if it is not on this machine."""
    location = (address or "").partition("?")[0].removeprefix(_LOCAL_SCHEME)
    return "" if "://" in location else location


def open_checkpoint(address: str | os.PathLike[str], key: str = "MODEL.WEIGHTS") -> Checkpoint:
    """Read a checkpoint as Detectron2 does, without running its code.

    The format is detected from the content: a file of ``torch.save`` by Detectron2 or pycls, or a pickle of the model
    zoo of Detectron2 or Detectron (Caffe2).

    Args:
        address: path or address that Detectron2's ``PathManager`` resolves, also with ``?matching_heuristics=True``.
        key: the config key or file that the address comes from; error messages begin with it.

    Raises:
        MissingFileError: there is no such file.
        FileAccessError: the address cannot be fetched, or the file cannot be opened.
        ConfigError: the address is unknown.
        RefusedFileError: the file could run code.
        WeightsFileError: the file is damaged, or contains no tensors by name.
    """
    address = os.fspath(address)
    location, _, query = address.partition("?")
    options = parse_qs(query, keep_blank_values=True)
    if options not in ({}, {"matching_heuristics": ["True"]}, {"matching_heuristics": ["False"]}):
        raise ConfigError(f"{key} ('{address}'): unknown option. Fix: leave out '?{query}'.")
    path = local_path(location, key)
    try:
        contents = read_weights_file(path)
        tensors, metadata = _model_and_metadata(contents, path)
        provenance = _provenance(tensors, metadata)
    except (WeightsFileError, FileAccessError) as error:
        raise type(error)(f"{key}: {error}") from error
    except ValueError as error:  # of the metadata
        raise WeightsFileError(f"{key}: '{path}': {error}") from error
    if options == {"matching_heuristics": ["True"]}:
        metadata["matching_heuristics"] = True
    return Checkpoint(address, path, tensors, metadata, contents.sha256, provenance)


def _model_and_metadata(contents: Contents, path: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split the content of a file as Detectron2's DetectionCheckpointer does.

    The rules are the same in Detectron2 v0.5, v0.6 and main of 2026.
    """
    content = contents.value
    if contents.format == "safetensors":
        raise WeightsFileError(f"'{path}': is a safetensors file, which needs conversion. Fix: give gw://file/{path}.")
    if not isinstance(content, Mapping):
        raise WeightsFileError(
            f"'{path}': contains a {type(content).__name__} instead of a dict of tensors. {SAVE_AGAIN}"
        )
    model, skipped = content.get("model", content), None
    metadata = {} if model is content else {key: value for key, value in content.items() if key != "model"}
    if contents.format == "pickle" and not ("model" in content and "__author__" in content):
        model, skipped = content.get("blobs", content), "_momentum"
        metadata = {"__author__": "Caffe2", "matching_heuristics": True}
    elif "model_state" in content and model is content:
        model, skipped = content["model_state"], "num_batches_tracked"
        metadata = {"__author__": "pycls", "matching_heuristics": True}
    if not isinstance(model, dict):
        raise WeightsFileError(
            f"'{path}': contains a {type(model).__name__} as model instead of a dict of tensors. {SAVE_AGAIN}"
        )
    for name in [name for name in model if skipped and str(name).endswith(skipped)]:
        del model[name]
    for name, value in model.items():
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            raise WeightsFileError(f"'{path}': {name!r} is not a tensor. {SAVE_AGAIN}")
    if not isinstance(heuristics := metadata.get("matching_heuristics", False), bool):
        raise WeightsFileError(
            f"'{path}': matching_heuristics is a {type(heuristics).__name__}. Fix: set it to True or False."
        )
    return model, metadata


def _provenance(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> Provenance | None:
    """Check the records of norms and origin; return the latter, None without one.

    Raises:
        ValueError: recorded norms are not names by layer, or the provenance is damaged or does not fit the tensors.
    """
    recorded = metadata.get(NORMS, {})
    if not (isinstance(recorded, Mapping) and all(isinstance(word, str) for pair in recorded.items() for word in pair)):
        raise ValueError(f"{NORMS}: a {type(recorded).__name__} that is not norm names by layer. Fix: remove the key.")
    if PROVENANCE not in metadata:
        return None
    provenance = Provenance.from_dict(metadata[PROVENANCE])
    names = {DETECTOR_PREFIX.sub("", name): value for name, value in tensors.items()}
    provenance.check_architecture(infer_architecture(names, layout="detectron2"))
    return provenance
