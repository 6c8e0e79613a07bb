"""Records in the checkpoints of a run: its norms, and how it was trained; a description of any checkpoint."""

import functools
import json
import logging
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import detectron2
import numpy as np
import torch
import torchvision
import yaml
from detectron2.config import CfgNode
from detectron2.utils import comm
from torch import Tensor, nn

from ..config import flat_items, parse_config
from ..errors import ConfigError, printable, summarize_names
from ..installation import __version__, git_commit
from ..norms import CONVS, norm_rows
from .network import NORMS, PREPROCESSING_KEY, PROVENANCE, is_same_norm, norm_record
from .opening import Checkpoint
from .reading import read_weights_file, sha256_of

log = logging.getLogger(__name__)

#: key of the run's record in a checkpoint
RUN_RECORD = "record"
_PREPROCESSING_KEYS = (
    "INPUT.FORMAT",
    "MODEL.PIXEL_MEAN",
    "MODEL.PIXEL_STD",
    "MODEL.RESNETS.STRIDE_IN_1X1",
)
PREPROCESSING_DIFFERS = (
    "these weights expect different preprocessing (channel order, mean, std or stride)"
)
#: MODEL keys that change no result of trained weights
_HARMLESS_KEYS = ("MODEL.WEIGHTS", "MODEL.DEVICE", "MODEL.COMPILE", "MODEL.BACKBONE.FREEZE_AT")
#: what stands before the names that all detectors with a ResNet share
_DETECTOR_PREFIX = re.compile(r"^.*?\b(?=stem\.|res[2-5]\.\d)")


class NormRecord:
    """Record the norms of a model in its checkpoints, see :func:`gw_detectron.weights.network.norm_record`.

    Add it to Detectron2's ``DetectionCheckpointer`` with ``add_checkpointable(NORMS, NormRecord(model))``.
    """

    def __init__(self, model: nn.Module) -> None:
        parallel = isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel))
        self._model: Any = (
            model.module if parallel else model
        )  # as Detectron2 saves its tensors

    def state_dict(self) -> dict[str, str]:
        return norm_record(self._model)

    def load_state_dict(self, recorded: Mapping[str, Any]) -> None:
        """Load nothing: norms come from the config. :func:`norm_differences` compares them."""


def norm_differences(checkpoint: Checkpoint, model: nn.Module) -> list[str]:
    """List the layers whose norm or Weight Standardization differs between a checkpoint and a model.

    Norms that compute the same in evaluation are equal: BN may be synchronized or frozen. Layers that only one side has
    are not listed; their tensors show them. The eps of converted weights may be changed. Without a record, names of
    tensors tell BN and GN from others.
    """
    if checkpoint.record.norms is None:
        return _named_differences(checkpoint.tensors, model)
    used, differences = norm_record(model), []
    is_converted = checkpoint.record.provenance is not None
    for name, before in recorded_norms(checkpoint, model).items():
        here = used.get(name, "")
        if before == here:
            continue
        if (
            before in CONVS and here in CONVS and not is_converted
        ):  # the values of raw and standardized weights agree
            differences.append(
                f"{name} {before or here} {'in the checkpoint' if before else 'here'} only"
            )
        elif before and here and not is_same_norm(before, here, with_eps=not is_converted):
            differences.append(f"{name} {before} in the checkpoint, {here} here")
    return differences


def recorded_norms(checkpoint: Checkpoint, model: nn.Module) -> dict[str, str]:
    """Return the recorded norm, or "", of each module of a model that the checkpoint contains, by the model's names."""
    norms = checkpoint.record.norms or {}
    recorded = {name.removeprefix("module."): spec for name, spec in norms.items()} | dict(
        norms
    )  # loading strips it
    stored = {
        name.removeprefix("module.").rpartition(".")[0] for name in checkpoint.tensors
    } | recorded.keys()
    found = {}
    for name, _ in model.named_modules():
        theirs = name
        while theirs and theirs not in stored:  # tensors may load by the end of their names
            theirs = (
                theirs.partition(".")[2]
                if checkpoint.metadata.get("matching_heuristics", False)
                else ""
            )
        if theirs:
            found[name] = recorded.get(theirs, "")
    return found


def _named_differences(tensors: Mapping[str, Tensor], model: nn.Module) -> list[str]:
    """Compare norms with those that the names of tensors prove.

    Caffe2's files, of ResNets, have BN's statistics multiplied into its scale, so their tensors fit any norm.
    """
    mean = ".running_mean"
    with_statistics = {
        _DETECTOR_PREFIX.sub("", name[: -len(mean)]) for name in tensors if name.endswith(mean)
    }
    bn, gn = (any(name.endswith(f"_{kind}_s") for name in tensors) for kind in ("bn", "gn"))
    own, differences = model.state_dict().keys(), []
    for row in norm_rows(model):
        in_resnet = _DETECTOR_PREFIX.match(row.layer)
        proves_bn = (bn and in_resnet) or _DETECTOR_PREFIX.sub("", row.layer) in with_statistics
        if proves_bn and f"{row.layer}{mean}" not in own:
            differences.append(f"{row.layer} BN in the checkpoint, {row.spec} here")
        elif gn and in_resnet and not row.spec.startswith("GN"):
            differences.append(f"{row.layer} GN in the checkpoint, {row.spec} here")
    return differences


class RunRecord:
    """Record of a run, with its config as yaml, for its checkpoints, in strings, numbers, lists and dicts.

    Add it to Detectron2's ``DetectionCheckpointer``: ``add_checkpointable(RUN_RECORD, RunRecord(cfg.dump(), seed))``.

    ``classes`` are names by category id, in the order of the detector's outputs.
    """

    def __init__(
        self, config: str, seed: int, classes: Mapping[int, str] | None = None
    ) -> None:
        self.config = config
        self.seed = seed
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
        if checkpoint.record.provenance is not None:  # converted by this package
            self._start_weights[PROVENANCE] = asdict(checkpoint.record.provenance)

    def state_dict(self) -> dict[str, Any]:
        return {
            "versions": software_versions(),
            "config": self.config,
            "processes": comm.get_world_size(),
            "seed": self.seed,
            "classes": self.classes,
            "start_weights": self._start_weights,
        }

    def load_state_dict(self, recorded: Mapping[str, Any]) -> None:
        """Keep the start weights of a resumed run, and warn if its config has changed."""
        if isinstance(recorded, Mapping) and isinstance(recorded.get("start_weights"), dict):
            self._start_weights = recorded["start_weights"]
        if differences := config_differences(recorded, self.config):
            log.warning(
                "--resume: the config differs from the checkpoint's. Learning rate, momentum and weight decay "
                "remain the checkpoint's:\n%s",
                "\n".join(differences.values()),
            )


def trained_classes(checkpoint: Checkpoint | None) -> dict[int, str]:
    """Return the class names by category id that a checkpoint records, in the order of its outputs; {} if none."""
    record = checkpoint.metadata.get(RUN_RECORD) if checkpoint else None
    try:
        return {each["id"]: str(each["name"]) for each in record["classes"]}  # type: ignore[index]
    except (LookupError, TypeError):
        return {}


def config_differences(record: Any, config: str) -> dict[str, str]:
    """Describe, by key, the values of a config that differ from a run's; under ``config`` why they are not compared."""
    before = record.get("config") if isinstance(record, Mapping) else None
    if not isinstance(before, str) or before == config:
        return {}
    try:
        old, new = (
            dict(flat_items(parse_config(text, RUN_RECORD))) for text in (before, config)
        )
    except ConfigError as error:
        return {"config": f"config: not compared: {str(error).partition(' Fix: ')[0]}"}
    return {
        key: f"{key} {old.get(key)!r:.99} in the checkpoint, {value!r:.99} here"
        for key, value in new.items()
        if old.get(key) != value
    }


def config_problems(
    cfg: CfgNode, checkpoint: Checkpoint, what: str
) -> tuple[list[str], list[str]]:
    """Compare a config with the record of the run that wrote a checkpoint: errors (preprocessing) and warnings."""
    differences = config_differences(checkpoint.metadata.get(RUN_RECORD), cfg.dump())
    if cfg.MODEL.RESNETS.DEPTH < 50:  # without 1x1 convolutions in its blocks
        differences.pop("MODEL.RESNETS.STRIDE_IN_1X1", None)
    errors, warnings = [], []
    if images := [differences.pop(key) for key in _PREPROCESSING_KEYS if key in differences]:
        errors = [
            f"{what}: {PREPROCESSING_DIFFERS}: {', '.join(images)}. Fix: set these keys as in the checkpoint."
        ]
    if changed := [
        k for k in differences if k.startswith(("MODEL.", "config")) and k not in _HARMLESS_KEYS
    ]:
        warnings = [
            f"{what}: trained with other values of MODEL keys: "
            f"{summarize_names((differences[key] for key in changed), 20)}. Fix: set them as in the checkpoint, unless "
            "the change is intended."
        ]
    return errors, warnings


def check_recorded_config(cfg: CfgNode, checkpoint: Checkpoint | None) -> None:
    """Refuse a config whose preprocessing is not that of the run that wrote a checkpoint; warn of other MODEL keys."""
    if checkpoint is None:
        return
    errors, warnings = config_problems(
        cfg, checkpoint, f"MODEL.WEIGHTS ('{checkpoint.address}')"
    )
    for text in warnings:
        log.warning("%s", text)
    if errors:
        raise ConfigError(errors[0])


@functools.cache
def software_versions() -> dict[str, str]:
    """Return the versions that results depend on, and the commit of a checkout of this package."""
    versions = {
        "gw_detectron": __version__,
        "commit": git_commit(),
        **{
            module.__name__: str(module.__version__)
            for module in (detectron2, torch, torchvision, np)
        },
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    }
    return {name: version for name, version in versions.items() if version}


def describe_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe any file that :func:`read_weights_file` reads, in plain values; what it lacks is left out."""
    contents = read_weights_file(path)
    content = contents.value if isinstance(contents.value, Mapping) else {}
    model, norms = content.get("model", content.get("state_dict", content)), content.get(NORMS)
    tensors = (
        [each for each in model.values() if isinstance(each, Tensor)]
        if isinstance(model, Mapping)
        else []
    )
    names = (
        [name for name in norms.values() if isinstance(name, str)]
        if isinstance(norms, Mapping)
        else []
    )
    description = {
        "file": os.fspath(path),
        "format": contents.format,
        **{
            key: content.get(key)
            for key in ("iteration", RUN_RECORD, PREPROCESSING_KEY, PROVENANCE)
        },
        "header": dict(contents.metadata) or None,
        "norms": dict(Counter(names).most_common()) or None,
        "tensors": len(tensors),
        "values": sum(tensor.numel() for tensor in tensors),
    }
    plain = json.dumps(
        {key: value for key, value in description.items() if value is not None}, default=str
    )
    return json.loads(plain)


def format_description(description: Mapping[str, Any]) -> str:
    """Format the result of :func:`describe_checkpoint` as yaml, without the run's config."""
    record = description.get(RUN_RECORD)
    if isinstance(record, dict):
        record = {key: value for key, value in record.items() if key != "config"}
        description = {**description, RUN_RECORD: record}
    return yaml.safe_dump(dict(description), sort_keys=False)


def format_config(description: Mapping[str, Any]) -> str:
    """Return the config of the run from the result of :func:`describe_checkpoint`, a yaml file.

    Raises:
        ConfigError: the file records none.
    """
    record = description.get(RUN_RECORD)
    config = record.get("config") if isinstance(record, dict) else None
    if not isinstance(config, str):
        file = description["file"]
        raise ConfigError(
            f"'{file}': records no config. Fix: give a checkpoint of this package's trainer."
        )
    return "\n".join(map(printable, config.splitlines()))
