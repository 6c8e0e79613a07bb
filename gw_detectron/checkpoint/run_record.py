"""Record of the run that wrote a checkpoint: software, config, processes, seed, start weights."""

import functools
import logging
import platform
from collections.abc import Mapping
from typing import Any

import detectron2
import numpy as np
import torch
import torchvision
from detectron2.utils import comm

from ..config import flat_items, parse_config
from ..errors import ConfigError
from ..installation import __version__, git_commit
from .checkpoint_file import Checkpoint
from .provenance import PROVENANCE

log = logging.getLogger(__name__)

#: key of the record in a checkpoint
RUN_RECORD = "record"


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
