"""Load an opened checkpoint strictly, and report what was loaded."""

import copy
import logging
import os
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.layers import FrozenBatchNorm2d
from detectron2.utils.file_io import PathManager
from torch import Size, Tensor, nn

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
from ..norms import conv_names, mix_statistics, norm_rows
from .comparing import norm_differences, recorded_norms, stored_shapes
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

_BACKBONE_NAME = re.compile(r"(backbone\.(bottom_up\.)?)?(stem\.conv1|res[2-5]\.\d+)\.")
_TORCHVISION_NAME = re.compile(r"(module\.)?layer1\.0\.conv1\.weight")
_COUNTER = ".num_batches_tracked"
#: of old checkpoints; the config decides them now
_ANCHORS = ".cell_anchors."
#: of a deformable convolution, which a classifier does not have; zero at first
_OFFSETS = ".conv2_offset."
_NO_STATISTICS = "MixGW and MixBN need BN's running statistics, which these weights have multiplied into the scale."
_GIVE_STATISTICS = "give weights with statistics, such as detectron2://ImageNetPretrained/torchvision/R-50.pkl."


@dataclass
class LoadReport:
    """Report of the loaded and the missing tensors of a detector.

    ``str(report)`` is one line:
    ``backbone: 231/231 tensors; FPN and heads are randomly initialized, as expected``.

    Attributes:
        backbone: the tensors of the model's ResNet; res5 of a C4 detector's head is part of it.
        heads: all other tensors: of FPN and heads, and the offsets of deformable convolutions.
        is_loaded: False if no checkpoint was loaded.
        loaded: the tensors that the checkpoint has in the model's shapes.
        missing: tensors of the backbone that were not loaded.
        unexpected: backbone tensors of the checkpoint that the model does not have.
        new: tensors of the heads that were not loaded.
        resized: layers of the heads with another number of outputs, as for other classes, and a text.
        unfit: other tensors of FPN and heads that only one side has, or with other shapes, though
            both have this part.
        unused: parts of the checkpoint that the model does not have, next to others that it has.
        frozen: number of FrozenBN layers whose statistics the checkpoint has multiplied into the
            scale, as in Caffe2's files.
        fix: what to do if the backbone is not complete.
    """

    backbone: list[str]
    heads: list[str]
    is_loaded: bool = False
    loaded: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    resized: dict[str, str] = field(default_factory=dict)
    unfit: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    frozen: int = 0
    fix: str = ""

    def __str__(self) -> str:
        if not self.is_loaded:
            return "no weights were loaded: the whole model is randomly initialized"

        loaded = self.loaded.intersection(self.backbone)
        text = f"backbone: {len(loaded)}/{len(self.backbone)} tensors"
        if self.unexpected:
            names = summarize_names(self.unexpected)
            text += f"; {len(self.unexpected)} unexpected tensors in the checkpoint ({names})"
        if self.frozen:
            text += f"; {self.frozen} FrozenBN without statistics, as in Caffe2 weights"

        count = len(self.heads)
        if self.new and len(self.new) == count:
            return f"{text}; FPN and heads are randomly initialized, as expected"
        if count:
            text += f"; FPN and heads: {count - len(self.new)}/{count}"
        if self.resized:
            text += f"; new outputs: {summarize_names(self.resized.values(), 8)}"
        absent = [name for name in self.new if _layer(name) not in self.resized]
        if absent:
            text += f"; new: {summarize_names(absent)}"
        if self.unused:
            text += f"; not in the model: {summarize_names(self.unused)}"
        return text

    def check(self) -> None:
        """Raise :class:`WeightsError` unless the whole backbone, and the parts of a detector, were loaded."""
        if self.missing or self.unexpected:
            lines = [f"MODEL.WEIGHTS: does not fit the model: {self}"]
            if self.missing:
                lines.append(f"Missing: {summarize_names(self.missing)}.")
            lines.append(self.fix)
            raise WeightsError("\n  ".join(lines))
        if self.unfit:
            raise WeightsError(
                "MODEL.WEIGHTS: another detector than the model: tensors (file -> model) "
                f"{summarize_names(self.unfit, 3)}. Fix: set MODEL as in the config of that detector, which "
                "its run folder or Detectron2's model zoo has (--config-file), or give weights of a "
                "backbone. train and eval accept random values with --allow-partial."
            )


def _empty_report(model: nn.Module) -> LoadReport:
    """Return the report of a model whose values are all random."""
    prefixes = _resnet_prefixes(model)
    names = [name for name in model.state_dict() if not name.endswith(_COUNTER)]
    backbone = [
        name for name in names if name.startswith(prefixes) and _OFFSETS not in name
    ]
    heads = [name for name in names if name not in backbone]
    return LoadReport(backbone, heads, missing=backbone, new=heads)


def _compare(
    model: nn.Module,
    given: Collection[str],
    stored: Mapping[str, Size],
    *,
    is_fused: bool,
) -> LoadReport:
    """Compare the tensors of a checkpoint with a model's.

    Args:
        model: the detector, or a bare backbone, before the tensors are loaded.
        given: names of the tensors with the model's shapes, and of those that the model does not
            have, under the model's names where these are known.
        stored: the shapes of all tensors of the checkpoint, under the same names.
        is_fused: BN's statistics are multiplied into its scale, as in Caffe2's files.
    """
    report = _empty_report(model)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    report.is_loaded = True
    report.loaded = shapes.keys() & given
    report.new = [name for name in report.heads if name not in given]

    statistics = _statistics_of_frozen_norms(model) if is_fused else set()
    report.frozen = len(statistics) // 2
    present = report.loaded | statistics
    report.missing = [name for name in report.backbone if name not in present]
    unused = (_COUNTER, "stem.conv1.bias") if is_fused else _COUNTER
    report.unexpected = sorted(
        name
        for name in given
        if name not in shapes
        and _BACKBONE_NAME.match(name)
        and not name.endswith(unused)
    )
    report.fix = _fix_of_backbone(model, given, is_fused=is_fused)
    _compare_heads(report, shapes, stored)
    return report


def _fix_of_backbone(
    model: nn.Module, given: Collection[str], *, is_fused: bool
) -> str:
    is_mixed = any(isinstance(layer, MixedNorm) for layer in model.modules())
    if is_fused and is_mixed:
        return f"{_NO_STATISTICS} Fix: {_GIVE_STATISTICS}"
    if any(map(_TORCHVISION_NAME.fullmatch, given)):
        return "It has torchvision's names. Fix: gw-detectron weights convert."
    return (
        "Fix: set MODEL.RESNETS (DEPTH, NUM_GROUPS, WIDTH_PER_GROUP, NORM, "
        "WHITEN_POSITIONS) as the weights need it, or give other weights. train and eval "
        "accept random values with --allow-partial."
    )


def _compare_heads(
    report: LoadReport, ours: Mapping[str, Size], stored: Mapping[str, Size]
) -> None:
    """Compare FPN and heads: the parts that the checkpoint and the model both have."""
    theirs = [
        name
        for name in stored
        if name not in report.backbone
        and not _BACKBONE_NAME.match(name)
        and not name.endswith(_COUNTER)
        and _ANCHORS not in name
    ]
    their_parts = {_part(name) for name in theirs}
    common = their_parts.intersection(map(_part, report.heads))
    if not common:  # weights of a backbone
        return

    report.unused = sorted(their_parts - common)
    for name in dict.fromkeys((*report.new, *theirs)):
        if _part(name) not in common or name in report.loaded:
            continue
        here, there = ours.get(name), stored.get(name)
        if here and there and here[1:] == there[1:]:
            layer = _layer(name)
            report.resized[layer] = f"{layer} {there[0]} -> {here[0]}"
        else:
            report.unfit.append(f"{name} {_shape_text(there)} -> {_shape_text(here)}")


def _layer(name: str) -> str:
    """Return the layer of a tensor."""
    return name.rpartition(".")[0]


def _part(name: str) -> str:
    """Return the part of a detector that a tensor belongs to: the backbone with its FPN, or one head."""
    parts = name.split(".")
    return parts[0] if parts[0] == "backbone" else ".".join(parts[:2])


def _shape_text(shape: Size | None) -> str:
    return "none" if shape is None else str(list(shape))


def _resnet_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return the prefixes of the ResNet's names in a model.

    C4 detectors have its last stage in the head.
    """
    backbone = getattr(model, "backbone", model)
    bottom_up = getattr(backbone, "bottom_up", backbone)
    res5 = getattr(getattr(model, "roi_heads", None), "res5", None)
    names = [name for name, part in model.named_modules() if part in (bottom_up, res5)]
    return tuple(f"{name}." if name else "" for name in names)


def _statistics_of_frozen_norms(model: nn.Module) -> set[str]:
    return {
        f"{name}.{field}"
        for name, layer in model.named_modules()
        if isinstance(layer, FrozenBatchNorm2d)
        for field in ("running_mean", "running_var")
    }


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
    mix: str = "",
) -> nn.Module:
    """Build the detector of a config in evaluation mode and load its weights.

    Args:
        cfg: the config; it is not changed.
        needed: name prefix of the tensors that the weights must hold: ``"backbone."`` for the FPN,
            ``""`` for all. The ResNet's tensors are always needed.
        checkpoint: the weights; None opens ``MODEL.WEIGHTS``.
        device: replaces ``MODEL.DEVICE``.
        allow_partial: accept missing tensors, and norms that differ from the checkpoint's.
        mix: mixture of :func:`gw_detectron.norms.mix_statistics` for the backbone; "" for none.

    Raises:
        NormError: the backbone has no BN layers to mix statistics in.
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

    missing = [name for name in report.new if name.startswith(needed)]
    if missing and not allow_partial:
        alone = "; --no-fpn exports only the ResNet" if needed else ""
        raise WeightsError(
            f"MODEL.WEIGHTS ('{checkpoint.address}'): {len(missing)} tensors are missing or have "
            f"other shapes than the model's ({summarize_names(missing)}). Fix: give the weights of "
            "a trained detector, with NUM_CLASSES and the keys of the heads as in its run"
            f"{alone}."
        )
    if mix:
        mix_in_backbone(model, mix)
    return model


def mix_in_backbone(model: nn.Module, mix: str) -> None:
    """Mix the image's statistics into the BN layers of a detector's ResNet."""
    names = [prefix.removesuffix(".") for prefix in _resnet_prefixes(model)]
    resnet = model.get_submodule(names[0])  # res5 in a C4 detector's head sees regions
    count = mix_statistics(resnet, mix, where="--mix")
    log.info("--mix (%s): %d layers of BN take statistics of each image", mix, count)


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
            tensor is not finite, has a negative variance or no floating-point numbers. Nothing is
            loaded.
        WeightsFileError: the checkpoint has no tensors.
    """
    checkpointer = (
        model
        if isinstance(model, DetectionCheckpointer)
        else DetectionCheckpointer(model)
    )
    model = checkpointer.model
    if checkpoint is None:
        return _empty_report(model)

    if not checkpoint.tensors:  # of which Detectron2 could match no name
        raise WeightsFileError(
            f"MODEL.WEIGHTS ('{checkpoint.address}'): the file has no tensors. {SAVE_AGAIN}"
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
    report = _empty_report(model)

    def check(module: nn.Module, state_dict: Mapping[str, Tensor], *_: Any) -> None:
        nonlocal report
        _check_values(state_dict, floating, checkpoint.address)
        report = _compare(module, state_dict, stored, is_fused=is_caffe2)
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
    _warn_of_missing_statistics(checkpoint, model)
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
        layers += [row.layer for row in norm_rows(model) if row.groups]
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
            "MODEL.WEIGHTS ('%s'): mean 0 and variance 1 in %d layers (%s). %s Fix: %s",
            checkpoint.address,
            len(untrained),
            summarize_names(untrained),
            _NO_STATISTICS,
            _GIVE_STATISTICS,
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
