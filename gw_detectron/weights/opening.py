"""Open a checkpoint once, safely: from a file, an address, or the folder of a run."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from detectron2.utils.file_io import PathManager
from torch import Tensor

from ..errors import ConfigError, FileAccessError, MissingFileError, UserError, WeightsFileError
from .addresses import local_path
from .network import Record, read_record
from .reading import SAVE_AGAIN, Contents, named_tensors, read_weights_file

_TAG = "last_checkpoint"  # of Detectron2: the file that names the newest checkpoint
BEST_CHECKPOINT = "model_best.pth"  # which TEST.BEST keeps


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory."""

    address: str  # as the user gave it, also with ``?matching_heuristics=True``
    path: str  # the file on this machine
    tensors: dict[str, Tensor] = field(repr=False)
    metadata: dict[str, Any] = field(
        repr=False
    )  # everything else, e.g. ``__author__`` and the training state
    record: Record = field(default_factory=Record, repr=False)


@dataclass
class StartWeights:
    """Checkpoint that a run starts from, or its error.

    Remote weights are fetched by the first call of :meth:`fetch` or :meth:`checkpoint`.
    """

    address: str = ""  # "" for random initial values
    resumed: bool = False  # it is the last checkpoint of the same run
    opened: Checkpoint | None = None
    error: Exception | None = None  # why it cannot be opened
    key: str = "MODEL.WEIGHTS"  # the config key or file that the address comes from

    @property
    def unfetched(self) -> bool:
        """Whether the weights are remote and not fetched yet."""
        return bool(self.address) and self.opened is None and self.error is None

    def fetch(self) -> None:
        """Open the weights, which may be remote; an error is stored."""
        if self.unfetched:
            try:
                self.opened = open_checkpoint(self.address, self.key)
            except (UserError, OSError) as error:
                self.error = error

    def checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint, None for random initial values, or raise the error of opening it."""
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
    with PathManager.open(tag, "r", errors="replace") as file:
        name = file.read().strip()
    if not name:
        raise WeightsFileError(
            f"{tag}: does not hold a file name. Fix: write the checkpoint's file name into it."
        )
    return os.path.join(folder, name)


def best_checkpoint(folder: str) -> str:
    """Return the path of the best checkpoint of a run folder, or of the last one if ``TEST.BEST`` kept no best one."""
    best = os.path.join(folder, BEST_CHECKPOINT)
    return best if PathManager.isfile(best) else last_checkpoint(folder)


def detector_file(model: str | os.PathLike[str]) -> str:
    """Return the checkpoint of a detector: of a run folder the best one, if ``TEST.BEST`` keeps it, or the last one."""
    model = os.fspath(model)
    if "://" in model:
        return model
    if not os.path.exists(model):
        raise MissingFileError(
            f"MODEL ('{model}'): not found (cwd: {os.getcwd()}). Fix: give an existing path."
        )
    return best_checkpoint(model) if os.path.isdir(model) else model


def open_start_weights(weights: str | None, run_folder: str = "") -> StartWeights:
    """Open the checkpoint that a run starts from.

    Args:
        weights: ``MODEL.WEIGHTS``; empty for random initial values.
        run_folder: open the last checkpoint of this folder instead, if there is one.
    """
    start = StartWeights(weights or "")
    try:
        if run_folder and PathManager.exists(tag := os.path.join(run_folder, _TAG)):
            start = StartWeights(resumed=True, key=tag)
            start.address = last_checkpoint(run_folder)
    except (UserError, OSError) as error:
        start.error = error
    if local_file(start.address):
        start.fetch()
    return start


def local_file(address: str | None) -> str:
    """Return the file that an address names, without its options; "" if it is not on this machine."""
    location = (address or "").partition("?")[0]
    return "" if "://" in location else location


def open_checkpoint(address: str | os.PathLike[str], key: str = "MODEL.WEIGHTS") -> Checkpoint:
    """Read a checkpoint as Detectron2 does, without running its code.

    The format is detected from the content: a file of ``torch.save``, or a pickle of the model zoo of Detectron2 or
    Detectron (Caffe2).

    Args:
        address: path or address that Detectron2's ``PathManager`` resolves, also with ``?matching_heuristics=True``.
        key: the config key or file that the address comes from; error messages begin with it.

    Raises:
        MissingFileError: the file does not exist.
        FileAccessError: the address cannot be fetched, or the file cannot be opened.
        ConfigError: the address has another option.
        RefusedFileError: the file could run code.
        WeightsFileError: the file is damaged, or contains no tensors by name.
    """
    address = os.fspath(address)
    location, _, query = address.partition("?")
    options = parse_qs(query, keep_blank_values=True)
    if options not in (
        {},
        {"matching_heuristics": ["True"]},
        {"matching_heuristics": ["False"]},
    ):
        raise ConfigError(f"{key} ('{address}'): unknown option. Fix: leave out '?{query}'.")
    path = local_path(location, key)
    try:
        contents = read_weights_file(path)
    except (WeightsFileError, FileAccessError) as error:
        raise type(error)(f"{key}: {error}") from error
    try:
        tensors, metadata = _model_and_metadata(contents, path)
        record = read_record(contents)
    except ValueError as error:
        raise WeightsFileError(f"{key}: '{path}': {error}") from error
    if options == {"matching_heuristics": ["True"]}:
        metadata["matching_heuristics"] = True
    return Checkpoint(address, path, tensors, metadata, record)


def _model_and_metadata(
    contents: Contents, path: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split the content of a file as Detectron2's DetectionCheckpointer does, in v0.6 and main of 2026."""
    content = contents.value
    if contents.format == "safetensors":
        raise WeightsFileError(
            f"a safetensors file. Fix: gw-detectron weights convert {path} NEW.pkl; give NEW.pkl."
        )
    if not isinstance(content, Mapping):
        raise WeightsFileError(
            f"a {type(content).__name__} instead of a dict of tensors. {SAVE_AGAIN}"
        )
    model: Any = content.get("model", content)
    metadata = (
        {}
        if model is content
        else {key: value for key, value in content.items() if key != "model"}
    )
    if contents.format == "pickle" and not ("model" in content and "__author__" in content):
        model = content.get("blobs", content)
        if isinstance(model, Mapping):
            model = {
                name: value
                for name, value in model.items()
                if not str(name).endswith("_momentum")
            }
        metadata = {"__author__": "Caffe2", "matching_heuristics": True}
    if not isinstance(heuristics := metadata.get("matching_heuristics", False), bool):
        raise WeightsFileError(
            f"matching_heuristics is a {type(heuristics).__name__}. Fix: set it to True or False."
        )
    return named_tensors(model, contents.size), metadata
