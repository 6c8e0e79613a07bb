"""Record norms and runs in checkpoints; compare later configs with them."""

import functools
import logging
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import detectron2
import numpy as np
import torch
import torchvision
from detectron2.config import CfgNode
from detectron2.utils import comm
from torch import nn

from ..config import flat_items, parse_config
from ..errors import ConfigError, summarize_names
from ..installation import __version__, git_commit
from .network_record import (
    PROVENANCE_KEY,
    Preprocessing,
    norm_record,
    preprocessing_errors,
)
from .opening import Checkpoint
from .reading import sha256_of

log = logging.getLogger(__name__)

#: key of the :class:`RunRecord` in a checkpoint
RUN_RECORD_KEY = "record"
#: preprocessing, which is checked by itself, and keys that change no result of trained weights
_NO_WARNING = (
    "MODEL.PIXEL_MEAN",
    "MODEL.PIXEL_STD",
    "MODEL.RESNETS.STRIDE_IN_1X1",
    "MODEL.WEIGHTS",
    "MODEL.DEVICE",
    "MODEL.COMPILE",
    "MODEL.BACKBONE.FREEZE_AT",
)


class NormRecorder:
    """Checkpointable that records the norms of a model, see :func:`.network_record.norm_record`.

    Add it to Detectron2's ``DetectionCheckpointer``:
    ``add_checkpointable("norms", NormRecorder(checkpointer.model))``. A file's record is read as part
    of the :class:`.network_record.NetworkRecord`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, str]:
        return norm_record(self._model)

    def load_state_dict(self, recorded: Mapping[str, Any]) -> None:
        """Load nothing: norms come from the config.

        :func:`gw_detectron.weights.norm_differences` compares them.
        """


class RunRecord:
    """Checkpointable that records a run: its config, seed, classes, image scale, versions and start weights.

    The record has strings, numbers, lists and dicts; the config is yaml. Add it to Detectron2's
    ``DetectionCheckpointer``:
    ``add_checkpointable(RUN_RECORD_KEY, RunRecord(cfg.dump(), seed))``.

    ``classes`` are names by category id, in the order of the detector's outputs. ``image_scale`` is the
    median factor by which training resizes images, 0 if it is unknown.
    """

    def __init__(
        self,
        config: str,
        seed: int,
        classes: Mapping[int, str] | None = None,
        image_scale: float = 0.0,
    ) -> None:
        self.config = config
        self.seed = seed
        self.image_scale = image_scale
        self.classes = [
            {"id": number, "name": name} for number, name in (classes or {}).items()
        ]
        self._start_weights: dict[str, Any] = {}

    def set_start_weights(self, checkpoint: Checkpoint) -> None:
        """Record address, SHA-256 and origin of the weights that the run starts from."""
        self._start_weights = {
            "address": checkpoint.address,
            "sha256": sha256_of(checkpoint.path),
        }
        provenance = checkpoint.network.provenance
        if provenance is not None:  # converted by this package
            self._start_weights[PROVENANCE_KEY] = asdict(provenance)

    def state_dict(self) -> dict[str, Any]:
        return {
            "versions": software_versions(),
            "config": self.config,
            "processes": comm.get_world_size(),
            "seed": self.seed,
            "classes": self.classes,
            "image_scale": self.image_scale,
            "start_weights": self._start_weights,
        }

    def load_state_dict(self, recorded: Mapping[str, Any]) -> None:
        """Keep the start weights of a resumed run, and warn if its config has changed."""
        if isinstance(recorded, Mapping) and isinstance(
            recorded.get("start_weights"), dict
        ):
            self._start_weights = recorded["start_weights"]

        differences = config_differences(recorded, self.config)
        if differences:
            log.warning(
                "--resume: the config differs from the checkpoint's. SOLVER.BASE_LR, momentum and weight decay "
                "remain the checkpoint's, the schedule is the config's:\n%s",
                "\n".join(differences.values()),
            )


@functools.cache
def software_versions() -> dict[str, str]:
    """Return the versions that results depend on, and the commit of a checkout of this package."""
    modules = (detectron2, torch, torchvision, np)
    versions = {
        "gw_detectron": __version__,
        "commit": git_commit(),
        **{module.__name__: str(module.__version__) for module in modules},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    }
    return {name: version for name, version in versions.items() if version}


def trained_classes(checkpoint: Checkpoint | None) -> dict[int, str]:
    """Return the class names by category id that a checkpoint records; {} if none.

    They are in the order of the detector's outputs.
    """
    record = checkpoint.metadata.get(RUN_RECORD_KEY) if checkpoint else None
    try:
        names = {entry["id"]: entry["name"] for entry in record["classes"]}  # type: ignore[index]
    except (LookupError, TypeError):
        return {}
    return names if all(isinstance(name, str) for name in names.values()) else {}


def trained_scale(checkpoint: Checkpoint | None) -> float:
    """Return the median factor by which a checkpoint's training resized images, 0 if it is not recorded."""
    record = checkpoint.metadata.get(RUN_RECORD_KEY) if checkpoint else None
    scale = record.get("image_scale") if isinstance(record, Mapping) else None
    return scale if isinstance(scale, float) and 0 < scale < math.inf else 0.0


def config_differences(record: Any, config: str) -> dict[str, str]:
    """Describe, by key, the values of a config that differ from a run's.

    The key ``config`` says why they are not compared.
    """
    before = record.get("config") if isinstance(record, Mapping) else None
    if not isinstance(before, str) or before == config:
        return {}

    try:
        old = _flat_config(before)
        new = _flat_config(config)
    except ConfigError as error:
        return {"config": f"config: not compared: {str(error).partition(' Fix: ')[0]}"}
    return {
        key: f"{key} {old.get(key)!r:.99} in the checkpoint, {value!r:.99} here"
        for key, value in new.items()
        if old.get(key) != value
    }


def _flat_config(text: str) -> dict[str, Any]:
    return dict(flat_items(parse_config(text, RUN_RECORD_KEY)))


def expected_preprocessing(checkpoint: Checkpoint) -> Preprocessing | None:
    """Return the preprocessing that weights need, by their record or by the config of their run; None if unknown."""
    if checkpoint.network.preprocessing:
        return checkpoint.network.preprocessing

    record = checkpoint.metadata.get(RUN_RECORD_KEY)
    try:
        config = parse_config(record["config"], RUN_RECORD_KEY)  # type: ignore[index]
        return Preprocessing.from_config(CfgNode(config))
    # no record of this package
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ):
        return None


def model_warnings(cfg: CfgNode, checkpoint: Checkpoint, what: str) -> list[str]:
    """Return a warning, which begins with ``what``, if MODEL keys differ from those of a checkpoint's run."""
    record = checkpoint.metadata.get(RUN_RECORD_KEY)
    differences = [
        text
        for key, text in config_differences(record, cfg.dump()).items()
        if key.startswith(("MODEL.", "config")) and key not in _NO_WARNING
    ]
    if not differences:
        return []
    return [
        f"{what}: trained with other values of MODEL keys: {summarize_names(differences, 20)}. Fix: "
        "set them as in the checkpoint, unless the change is intended."
    ]


def check_recorded_config(cfg: CfgNode, checkpoint: Checkpoint) -> None:
    """Refuse a config with other preprocessing than weights need; warn of other MODEL keys than those of their run."""
    what = f"MODEL.WEIGHTS ('{checkpoint.address}')"
    for text in model_warnings(cfg, checkpoint, what):
        log.warning("%s", text)
    for text in preprocessing_errors(cfg, expected_preprocessing(checkpoint), what):
        raise ConfigError(text)
