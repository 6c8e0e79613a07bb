"""Records in the checkpoints of a run: its norms, and how it was trained.

The tensors alone do not tell GN from GW, 64 groups from 32, or raw weights from those that are standardized.
"""

import functools
import logging
import platform
from collections.abc import Container, Mapping
from typing import Any

import detectron2
import numpy as np
import torch
import torchvision
from detectron2.utils import comm
from torch import Tensor, nn

from ..config import flat_items, parse_config
from ..errors import ConfigError
from ..installation import __version__, git_commit
from ..norms.conversion import CONVS, conv_names
from ..norms.listing import evaluation_spec, norm_rows
from ..weights.architecture import DETECTOR_PREFIX, Architecture
from ..weights.metadata import NORMS
from ..weights.norm_inference import norm_key
from ..weights.provenance import PROVENANCE, Provenance
from .opening import Checkpoint

log = logging.getLogger(__name__)

#: key of the run's record in a checkpoint
RUN_RECORD = "record"
_MEAN = ".running_mean"


class NormRecord:
    """Record the norms of a model in its checkpoints, ``{layer: norm name}``, and ``{convolution: "WS"}``.

    Add it to Detectron2's ``DetectionCheckpointer`` with ``add_checkpointable(NORMS, NormRecord(model))``.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, str]:
        return {row.layer: row.spec for row in norm_rows(self._model)} | conv_names(self._model)

    def load_state_dict(self, recorded: Mapping[str, Any]) -> None:
        """Load nothing: norms come from the config. :func:`norm_differences` compares them."""


def norm_differences(checkpoint: Checkpoint, model: nn.Module) -> list[str]:
    """List the layers whose norm or Weight Standardization differs between a checkpoint and a model.

    Norms that compute the same in evaluation are equal: BN may be synchronized or frozen. Layers that only one side has
    are not listed; their tensors show them. Converted weights record the norms of their backbone; their eps may be
    changed. Without a record, names of tensors tell BN and GN from others.
    """
    tensors, metadata, provenance = checkpoint.tensors, checkpoint.metadata, checkpoint.provenance
    if NORMS not in metadata:
        return _backbone_differences(provenance, model) if provenance else _named_differences(tensors, model)
    recorded, used = metadata[NORMS], NormRecord(model).state_dict()
    stored = {name.rpartition(".")[0] for name in tensors} | recorded.keys()
    differences = []
    for name, _ in model.named_modules():
        theirs = _stored_name(name, stored, matching_heuristics=metadata.get("matching_heuristics", False))
        before, here = recorded.get(theirs, ""), used.get(name, "")
        if theirs is None or before == here:
            continue
        if before in CONVS and here in CONVS:
            differences.append(f"{name} {before or here} {'in the checkpoint' if before else 'here'} only")
        elif before and here and evaluation_spec(before) != evaluation_spec(here):
            differences.append(f"{name} {before} in the checkpoint, {here} here")
    return differences


def _stored_name(name: str, stored: Container[str], *, matching_heuristics: bool) -> str | None:
    """Return the name in a checkpoint of a module, whose tensors load by equal names or by the end of its name."""
    while name not in stored:
        if not (matching_heuristics and "." in name):
            return None
        name = name.partition(".")[2]
    return name


def _backbone_differences(provenance: Provenance, model: nn.Module) -> list[str]:
    """Compare the norms of a ResNet, also where the tensors look alike."""
    rows = {DETECTOR_PREFIX.sub("", row.layer): row for row in norm_rows(model)}
    differences = []
    for layer, spec in provenance.norms.by_layer(Architecture.parse(provenance.architecture)).items():
        row = rows.get(layer.detectron2)
        if row is None or row.channels != layer.channels:  # the tensors show it
            continue
        if norm_key(spec, row.channels) != norm_key(row.spec, row.channels):
            differences.append(f"{row.layer} {spec} in the weights, {row.spec} here")
    return differences


def _named_differences(tensors: Mapping[str, Tensor], model: nn.Module) -> list[str]:
    """Compare the norms of a ResNet with those that the names of tensors prove.

    Caffe2's files have BN's statistics multiplied into its scale, so their tensors fit any norm.
    """
    with_statistics = {DETECTOR_PREFIX.sub("", name[: -len(_MEAN)]) for name in tensors if name.endswith(_MEAN)}
    bn, gn = (any(name.endswith(f"_{kind}_s") for name in tensors) for kind in ("bn", "gn"))
    own, differences = model.state_dict().keys(), []
    for row in norm_rows(model):
        if not DETECTOR_PREFIX.match(row.layer):
            continue
        if f"{row.layer}{_MEAN}" not in own and (bn or DETECTOR_PREFIX.sub("", row.layer) in with_statistics):
            differences.append(f"{row.layer} BN in the weights, {row.spec} here")
        elif gn and not row.spec.startswith("GN"):
            differences.append(f"{row.layer} GN in the weights, {row.spec} here")
    return differences


class RunRecord:
    """Record of a run for its checkpoints, in strings, numbers, lists and dicts.

    Add it to Detectron2's ``DetectionCheckpointer``: ``add_checkpointable(RUN_RECORD, RunRecord(cfg.dump(), seed))``.

    Args:
        config: the config as yaml.
        seed: the seed of the run.
    """

    def __init__(self, config: str, seed: int) -> None:
        self.config = config
        self.seed = seed
        self._start_weights: dict[str, Any] = {}
        self._earlier_parts: list[dict[str, Any]] = []

    def set_start_weights(self, checkpoint: Checkpoint) -> None:
        """Record address, SHA-256 and origin of the weights that the run starts from."""
        self._start_weights = {"address": checkpoint.address, "sha256": checkpoint.sha256}
        if PROVENANCE in checkpoint.metadata:  # converted by this package
            self._start_weights[PROVENANCE] = checkpoint.metadata[PROVENANCE]

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._part(),
            "seed": self.seed,
            "start_weights": self._start_weights,
            "earlier_parts": self._earlier_parts,
        }

    def _part(self) -> dict[str, Any]:
        """Describe how this part of the run is trained; a resumed run has several."""
        return {"versions": software_versions(), "config": self.config, "processes": comm.get_world_size()}

    def load_state_dict(self, recorded: Mapping[str, Any]) -> None:
        """Keep start weights and parts of a resumed run, and warn if its config has changed."""
        recorded = recorded if isinstance(recorded, Mapping) else {}
        if isinstance(recorded.get("start_weights"), dict):
            self._start_weights = recorded["start_weights"]
        if isinstance(recorded.get("earlier_parts"), list):
            self._earlier_parts = recorded["earlier_parts"]
        part = {key: recorded[key] for key in self._part() if key in recorded}
        if part and part != self._part():
            self._earlier_parts = [*self._earlier_parts, part]
        if differences := config_differences(recorded, self.config):
            log.warning(
                "--resume: the config differs from that of the checkpoint. Learning rate, momentum and weight decay "
                "remain those of the checkpoint:\n%s",
                "\n".join(differences.values()),
            )


def config_differences(record: Any, config: str) -> dict[str, str]:
    """Describe the values of a config that differ from those in the record of a run.

    Args:
        record: under :data:`RUN_RECORD` in a checkpoint; one without a config differs in nothing.
        config: the config as yaml.

    Returns:
        A description for each key; one under ``config`` if the configs cannot be compared.
    """
    before = record.get("config") if isinstance(record, Mapping) else None
    if not isinstance(before, str) or before == config:
        return {}
    try:
        old, new = (dict(flat_items(parse_config(text, RUN_RECORD))) for text in (before, config))
    except ConfigError as error:
        return {"config": f"config: not compared: {str(error).partition(' Fix: ')[0]}"}
    return {
        key: f"{key} {old.get(key)!r:.99} in the checkpoint, {value!r:.99} here"
        for key, value in new.items()
        if old.get(key) != value
    }


@functools.cache
def software_versions() -> dict[str, str]:
    """Return the versions that results depend on, and the commit of a checkout of this package."""
    versions = {
        "gw_detectron": __version__,
        "commit": git_commit(),
        **{module.__name__: str(module.__version__) for module in (detectron2, torch, torchvision, np)},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    }
    return {name: version for name, version in versions.items() if version}
