"""Open a checkpoint once, safely: from a file, an address, or the folder of a run."""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import (
    ConfigError,
    FileAccessError,
    MissingFileError,
    UserError,
    WeightsFileError,
)
from .fetching import local_path, refetch_hint
from .network_record import ZOO_DETECTOR, NetworkRecord, read_network_record
from .reading import FileContent, named_tensors, read_weights_file

#: names of tensors in the heads of detectors, of Detectron2 and Detectron
_HEAD = re.compile(
    r"(module\.)?(proposal_generator|roi_heads|head\.(cls|bbox)_\w+)\.|cls_score_w|retnet_cls"
)
_TAG = "last_checkpoint"  # of Detectron2: names the newest checkpoint
FINAL_CHECKPOINT = "model_final.pth"  # of Detectron2: the last one of a run
BEST_CHECKPOINT = "model_best.pth"  # which TEST.BEST keeps
# a pattern of files; a user's copy may have more in its name
PERIODIC_CHECKPOINTS = f"model_{'[0-9]' * 7}.pth"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory."""

    address: str  # as the user gave it, also with ``?matching_heuristics=True``
    path: str  # the file on this machine
    tensors: dict[str, Tensor] = field(repr=False)
    #: everything else, e.g. ``__author__`` and the training state
    metadata: dict[str, Any] = field(repr=False)
    network: NetworkRecord = field(default_factory=NetworkRecord, repr=False)


@dataclass
class LazyCheckpoint:
    """A checkpoint that is opened when it is first needed, or the error of opening it.

    Remote weights are fetched by the first call of :meth:`fetch` or :meth:`checkpoint`.
    """

    address: str = ""  # "" for random initial values
    resumed: bool = False  # it is the last checkpoint of the same run
    opened: Checkpoint | None = None
    error: Exception | None = None  # why it cannot be opened
    key: str = "MODEL.WEIGHTS"  # the config key or file that the address comes from

    @property
    def unfetched(self) -> bool:
        """Whether there is an address that was not opened yet."""
        return bool(self.address) and self.opened is None and self.error is None

    def fetch(self) -> None:
        """Open the checkpoint, which may be remote; an error is stored."""
        if not self.unfetched:
            return
        try:
            self.opened = open_checkpoint(self.address, self.key)
        except (UserError, OSError) as error:
            self.error = error

    def checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint or None for random values, or raise the error of opening it."""
        self.fetch()
        if self.error is not None:
            raise self.error
        return self.opened


def last_checkpoint(folder: str) -> str:
    """Return the path of the checkpoint that ``--resume`` continues from; "" if there is none.

    The file ``last_checkpoint`` names it. A run that was killed before it wrote this file continues from its newest
    checkpoint.
    """
    tag = Path(folder, _TAG)
    if tag.exists():
        return str(Path(folder, tag.read_text(errors="replace").strip()))
    if Path(folder, FINAL_CHECKPOINT).is_file():
        return ""  # weights alone, such as a user has copied
    return max(map(str, Path(folder).glob(PERIODIC_CHECKPOINTS)), default="")


def best_checkpoint(folder: str) -> str:
    """Return the path of a run's best checkpoint if ``TEST.BEST`` kept it, else of the last.

    A folder without any is taken for one with ``model_final.pth``.
    """
    best = Path(folder, BEST_CHECKPOINT)
    if best.is_file():
        return str(best)
    return last_checkpoint(folder) or str(Path(folder, FINAL_CHECKPOINT))


def config_beside(weights: str) -> str:
    """Return the path that the config of a run has beside its weights."""
    return os.path.join(os.path.dirname(weights), "config.yaml")


def detector_file(model: str | os.PathLike[str]) -> str:
    """Return the checkpoint of a detector: the file itself, or the best one of a run folder."""
    model = os.fspath(model)
    if "://" in model:
        return model
    if not os.path.exists(model):
        raise MissingFileError(
            f"RUN ('{model}'): not found (cwd: {os.getcwd()}). Fix: give an existing path."
        )
    return best_checkpoint(model) if os.path.isdir(model) else model


def is_detector(address: str) -> bool:
    """Return whether weights are those of a whole detector: of Detectron2's model zoo, or a file with its heads."""
    if re.search(ZOO_DETECTOR, address):
        return True
    # not of remote weights; the checks before the run tell an error of opening it
    checkpoint = open_start_weights(address).opened
    return checkpoint is not None and any(map(_HEAD.match, checkpoint.tensors))


def open_start_weights(weights: str | None, run_folder: str = "") -> LazyCheckpoint:
    """Open the checkpoint that a run starts from: now if it is a file, later if it is remote.

    Args:
        weights: ``MODEL.WEIGHTS``: a file, an address or a run folder, whose best checkpoint is opened; empty for
            random initial values.
        run_folder: open the last checkpoint of this folder instead, if there is one.
    """
    weights = weights or ""
    start = LazyCheckpoint(weights)
    if os.path.isdir(weights):
        start.address = local_file(weights)
        if not os.path.isfile(start.address):
            start.error = MissingFileError(
                f"MODEL.WEIGHTS ('{weights}'): a folder without the checkpoint of a run. Fix: give a run that has "
                "written one, or a file."
            )
    if run_folder:
        tag = os.path.join(run_folder, _TAG)
        try:
            last = last_checkpoint(run_folder)
        except OSError as error:
            start = LazyCheckpoint(resumed=True, key=tag, error=error)
        else:
            if last:
                start = LazyCheckpoint(last, resumed=True, key=tag)

    if local_file(start.address):
        start.fetch()
    return start


def local_file(address: str | None) -> str:
    """Return the file of an address, without its options, or the best one of a run folder; "" of a remote one."""
    location = (address or "").partition("?")[0]
    if "://" in location:
        return ""
    return best_checkpoint(location) if os.path.isdir(location) else location


def open_checkpoint(
    address: str | os.PathLike[str], key: str = "MODEL.WEIGHTS"
) -> Checkpoint:
    """Read a checkpoint as Detectron2 does, without running its code.

    The format is detected from the content: a file of ``torch.save``, a pickle of the model zoo
    of Detectron2 or Detectron (Caffe2), or a safetensors file of this package.

    Args:
        address: path or address that Detectron2's ``PathManager`` resolves, also with
            ``?matching_heuristics=True``.
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
    if query not in ("", "matching_heuristics=True", "matching_heuristics=False"):
        raise ConfigError(
            f"{key} ('{address}'): unknown option. Fix: leave out '?{query}'."
        )

    path = local_path(location, key)
    try:
        content = read_weights_file(path)
    except (WeightsFileError, FileAccessError) as error:
        raise type(error)(f"{key}: {error}{refetch_hint(location)}") from error

    try:
        model, metadata = _model_and_metadata(content, path)
        if query == "matching_heuristics=True":
            metadata["matching_heuristics"] = True
        tensors = _without_wrappers(named_tensors(model, content.size))
        if metadata.get("__author__") == "Caffe2":  # with the state of its optimizer
            tensors = {
                name: tensors[name]
                for name in tensors
                if not name.endswith("_momentum")
            }
        network = read_network_record(content)
    except ValueError as error:
        raise WeightsFileError(f"{key}: '{path}': {error}") from error
    return Checkpoint(address, path, tensors, metadata, network)


def _without_wrappers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove from a state dict what torch.compile and AveragedModel add; Detectron2 removes ``module.``."""
    tensors.pop("n_averaged", None)
    if not any("_orig_mod." in name for name in tensors):
        return tensors  # with its metadata
    return {name.replace("_orig_mod.", ""): value for name, value in tensors.items()}


def _model_and_metadata(content: FileContent, path: str) -> tuple[Any, dict[str, Any]]:
    """Split a file as Detectron2's DetectionCheckpointer does, in v0.6 and main of 2026."""
    value = content.value
    has_record = isinstance(value, Mapping) and isinstance(value.get("model"), Mapping)
    if content.format == "safetensors" and not has_record:
        raise WeightsFileError(
            f"a safetensors file of another program. Fix: gw-detectron weights convert {shlex.quote(path)} NEW.pkl; "
            "give NEW.pkl."
        )
    if not isinstance(value, Mapping):
        return value, {}

    if content.format == "pickle" and not ("model" in value and "__author__" in value):
        return value.get("blobs", value), {
            "__author__": "Caffe2",
            "matching_heuristics": True,
        }
    if "model" not in value:
        return value, {}
    metadata = {name: entry for name, entry in value.items() if name != "model"}
    # the value of a damaged file may be anything
    metadata["matching_heuristics"] = metadata.get("matching_heuristics") is True
    return value["model"], metadata
