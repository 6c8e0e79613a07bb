"""Open a detector, and load an opened checkpoint strictly."""

import copy
import logging
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.utils.file_io import PathManager
from torch import Tensor, nn

from ..config import read_config
from ..errors import (
    ConfigError,
    MissingFileError,
    WeightsError,
    WeightsFileError,
    summarize_names,
)
from ..layers.mixed_norms import MixedNorm
from ..modeling import build_checked_model
from ..modeling.build import NORM_KEYS
from ..norms import conv_names, norm_rows
from .comparing import norm_differences, recorded_norms, stored_shapes
from .load_report import (
    NO_STATISTICS,
    LoadReport,
    compare_tensors,
    empty_report,
)
from .network_record import NORMS_KEY
from .opening import (
    Checkpoint,
    config_beside,
    detector_file,
    open_checkpoint,
    open_start_weights,
)
from .reading import SAVE_AGAIN, weight_problems
from .recording import NormRecorder, check_recorded_config

log = logging.getLogger(__name__)


class OpenDetector(NamedTuple):
    """The config of a detector, the path of that config, and its weights, not loaded yet."""

    cfg: CfgNode
    config_file: str
    checkpoint: Checkpoint | None  # None if the config names no weights


def open_detector(
    run: str | os.PathLike[str] = "",
    config_file: str | os.PathLike[str] = "",
    opts: Sequence[Any] = (),
) -> OpenDetector:
    """Open the config and the weights of a detector, and refuse a config with other preprocessing.

    Args:
        run: a run folder, whose best or last checkpoint is opened, or a checkpoint; "" opens the
            config's ``MODEL.WEIGHTS``.
        config_file: config of the detector; default: the ``config.yaml`` beside the checkpoint.
        opts: config keys to change, as key, value, ...
    """
    if run:
        weights = detector_file(run)
        opts = ("MODEL.WEIGHTS", weights, *opts)
        config_file = config_file or _config_of(weights)
    cfg = read_config(config_file, opts)
    checkpoint = open_start_weights(cfg.MODEL.WEIGHTS).checkpoint()
    if checkpoint is not None:
        check_recorded_config(cfg, checkpoint)
    return OpenDetector(cfg, os.fspath(config_file), checkpoint)


def _config_of(weights: str) -> str:
    config_file = config_beside(weights)
    if not os.path.isfile(config_file):
        raise MissingFileError(
            f"RUN ('{weights}'): its config is not found: '{config_file}'. Fix: give --config-file,"
            f" or a run folder; `gw-detectron weights describe --config {shlex.quote(weights)}` "
            "prints the config that it was trained with."
        )
    return config_file


def load_model(
    cfg: CfgNode,
    needed: str = "",
    *,
    checkpoint: Checkpoint | None = None,
    device: str = "cpu",
    allow_partial: bool = False,
) -> nn.Module:
    """Build the detector of a config in evaluation mode and load its weights.

    Args:
        cfg: the config; it is not changed.
        needed: name prefix of the tensors that the weights must hold: ``"backbone."`` for the FPN,
            ``""`` for all. The ResNet's tensors are always needed.
        checkpoint: the weights; None opens ``MODEL.WEIGHTS``.
        device: replaces ``MODEL.DEVICE``.
        allow_partial: accept missing tensors, and norms that differ from the checkpoint's.

    Raises:
        ConfigError: no weights are given, or Detectron2 cannot build the detector.
        WeightsError: the weights lack a needed tensor, or have it with another shape.
        UserError: the file cannot be read, see :func:`open_checkpoint`.
    """
    checkpoint = checkpoint or open_start_weights(cfg.MODEL.WEIGHTS).checkpoint()
    if checkpoint is None:
        raise ConfigError(
            "MODEL.WEIGHTS (''): no weights are given. Fix: set it to a trained detector, or give a "
            "RUN."
        )

    model = build_checked_model(cfg, device).eval()
    report = load_checkpoint(model, checkpoint, allow_partial=allow_partial)
    log.info("%s", report)
    _warn_of_missing_statistics(checkpoint, model)

    missing = [name for name in report.new if name.startswith(needed)]
    if missing and not allow_partial:
        alone = "; --no-fpn exports only the ResNet" if needed else ""
        raise WeightsError(
            f"MODEL.WEIGHTS ('{checkpoint.address}'): {len(missing)} tensors are missing or have "
            f"other shapes than the model's ({summarize_names(missing)}). Fix: give the weights of "
            "a trained detector, with NUM_CLASSES and the keys of the heads as in its run"
            f"{alone}."
        )
    return model


def load_checkpoint(
    model: nn.Module | DetectionCheckpointer,
    checkpoint: Checkpoint | None,
    *,
    allow_partial: bool = False,
) -> LoadReport:
    """Load an opened checkpoint into a detector and require the whole backbone.

    Args:
        model: the detector, a bare backbone, or the DistributedDataParallel of one; or its
            checkpointer, whose own ``_load_model`` then loads the tensors.
        checkpoint: None keeps the initial values.
        allow_partial: accept missing backbone tensors, and norms that differ from the
            checkpoint's.

    Raises:
        WeightsError: a backbone tensor is missing, or norms differ; also with ``allow_partial``, a
            tensor is not finite, has a negative variance or no floating-point numbers, or the model
            has the names of ``torch.compile(module)``. Nothing is loaded.
        WeightsFileError: the checkpoint has no tensors.
    """
    checkpointer = (
        model
        if isinstance(model, DetectionCheckpointer)
        else DetectionCheckpointer(model)
    )
    model = checkpointer.model
    if checkpoint is None:
        return empty_report(model)

    if not checkpoint.tensors:  # of which Detectron2 could match no name
        raise WeightsFileError(
            f"MODEL.WEIGHTS ('{checkpoint.address}'): the file has no tensors. {SAVE_AGAIN}"
        )
    renamed = [name for name in model.state_dict() if "_orig_mod." in name]
    if renamed:
        raise WeightsError(
            f"the model: torch.compile has renamed its tensors ({summarize_names(renamed, 2)}). Fix: load weights "
            "before torch.compile(module), or compile by module.compile(), which keeps the names."
        )
    differences = norm_differences(checkpoint, model)
    if differences:
        error = norm_mismatch(checkpoint.address, differences)
        if not allow_partial:
            raise error
        log.warning("%s", error)

    log.info("Loading weights from %s", checkpoint.path)
    is_caffe2 = checkpoint.metadata.get("__author__") == "Caffe2"
    stored = stored_shapes(checkpoint, model)
    floating = [
        name for name, value in model.state_dict().items() if value.is_floating_point()
    ]
    report = empty_report(model)

    def check(module: nn.Module, state_dict: Mapping[str, Tensor], *_: Any) -> None:
        nonlocal report
        _check_values(state_dict, floating, checkpoint.address)
        report = compare_tensors(module, state_dict, stored, is_fused=is_caffe2)
        if not allow_partial:
            report.check()

    # FrozenBatchNorm2d adds missing statistics while it loads, so the names are compared before
    with model.register_load_state_dict_pre_hook(check):
        # Private methods of DetectionCheckpointer and fvcore's Checkpointer: the part of load()
        # after reading the file.
        content = {**checkpoint.metadata, "model": copy.copy(checkpoint.tensors)}
        incompatible = checkpointer._load_model(content)
        checkpointer._log_incompatible_keys(incompatible)
    _warn_of_unknown_norms(checkpoint, model, report.loaded)
    return report


def norm_mismatch(address: str, differences: Sequence[str]) -> WeightsError:
    """Return the error that weights were trained with other norms than the model has."""
    return WeightsError(
        f"MODEL.WEIGHTS ('{address}'): trained with other norms: {len(differences)} layers differ "
        f"({summarize_names(differences)}). Fix: set MODEL.RESNETS.WHITEN_POSITIONS, "
        f"{', '.join(NORM_KEYS)} and CONV keys as in that run, or give weights of these norms; "
        "train and eval accept others with --allow-partial."
    )


def _check_values(
    tensors: Mapping[str, Tensor], floating: Collection[str], address: str
) -> None:
    """Refuse values and types that no weight can have, under the names of weights."""
    weights = {name: value for name, value in tensors.items() if name in floating}
    lines = [
        f"{len(names)} tensors {problem} ({summarize_names(names)})"
        for problem, names in weight_problems(weights).items()
    ]
    if lines:
        raise WeightsError(
            f"MODEL.WEIGHTS ('{address}'): {'; '.join(lines)}. Fix: give an earlier checkpoint of "
            "that run, or other weights."
        )


def _warn_of_unknown_norms(
    checkpoint: Checkpoint, model: nn.Module, loaded: Collection[str]
) -> None:
    """Warn of loaded layers whose norm the checkpoint neither records nor shows."""
    recorded = recorded_norms(checkpoint, model)
    layers: list[str] = []
    if checkpoint.metadata.get("__author__") != "Caffe2":  # whose names tell GN
        with_groups = [row.layer for row in norm_rows(model) if row.groups]
        # statistics show BN, from which MixGW starts
        layers += [name for name in with_groups if f"{name}.running_mean" not in loaded]
    if not any(recorded.values()):
        layers += conv_names(model)

    unclear = [
        layer
        for layer in layers
        if f"{layer}.weight" in loaded and not recorded.get(layer)
    ]

    if unclear:
        log.warning(
            "MODEL.WEIGHTS ('%s'): records no norms of %d layers (%s). GN and GW, or WS and plain "
            "convolutions, have the same tensors: set the NORM and CONV keys as in that run.",
            checkpoint.address,
            len(unclear),
            summarize_names(unclear),
        )


def _warn_of_missing_statistics(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Warn of mixed norms without BN's statistics, e.g. from detectors that were trained from Caffe2's weights."""
    untrained = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, MixedNorm) and layer.is_untrained
    ]
    if untrained:
        log.warning(
            "MODEL.WEIGHTS ('%s'): mean 0 and variance 1 in %d layers (%s). %s Fix: measure them on training photos "
            "by layers.measure_statistics, as gw-detectron train does.",
            checkpoint.address,
            len(untrained),
            summarize_names(untrained),
            NO_STATISTICS,
        )


class GWDetectionCheckpointer(DetectionCheckpointer):
    """Detectron2's checkpointer, with a record of norms and checked loading.

    It is for scripts without this package's Trainer. ``allow_partial`` accepts missing backbone
    tensors, and other norms than the checkpoint's; the other arguments are Detectron2's.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: str = "",
        *,
        allow_partial: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, save_dir, **kwargs)
        self.allow_partial = allow_partial
        self.add_checkpointable(NORMS_KEY, NormRecorder(self.model))

    def save(self, name: str, **kwargs: Any) -> None:
        """Write a checkpoint to the folder, which is created if needed."""
        if self.save_dir and self.save_to_disk:
            PathManager.mkdirs(self.save_dir)
        super().save(name, **kwargs)

    def load(
        self, path: str, checkpointables: list[str] | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint without running its code; return what else it contains.

        A path "" loads nothing. ``checkpointables`` are the names of the training states to load;
        None loads all.

        Raises:
            UserError: see :func:`open_checkpoint` and :func:`load_checkpoint`.
        """
        if not path:
            return super().load(path)

        checkpoint = open_checkpoint(path, "checkpoint")
        names = self.checkpointables if checkpointables is None else checkpointables
        report = load_checkpoint(self, checkpoint, allow_partial=self.allow_partial)
        _warn_of_missing_statistics(checkpoint, self.model)
        self.restore(checkpoint.metadata, names)
        log.info("%s", report)
        return {
            name: value
            for name, value in checkpoint.metadata.items()
            if name not in names
        }

    def restore(self, states: Mapping[str, Any], names: Iterable[str]) -> None:
        """Load those of the named training states that a checkpoint contains."""
        for name in names:
            if name in states:
                self.checkpointables[name].load_state_dict(states[name])
