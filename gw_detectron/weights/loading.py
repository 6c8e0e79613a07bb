"""Load an opened checkpoint strictly, and report what was loaded; a checkpointer that does so."""

import copy
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.layers import FrozenBatchNorm2d
from detectron2.utils.file_io import PathManager
from torch import Tensor, nn

from ..errors import ConfigError, WeightsError, summarize_names
from ..modeling import build_checked_model
from ..modeling.build import NORM_KEYS
from ..norms import conv_names, norm_rows
from .network import NORMS
from .opening import Checkpoint, open_checkpoint, open_start_weights
from .reading import weight_problem
from .records import NormRecord, norm_differences, recorded_norms

log = logging.getLogger(__name__)

_BACKBONE_NAME = re.compile(r"(backbone\.(bottom_up\.)?)?(stem\.conv1|res[2-5]\.\d+)\.")
_TORCHVISION_NAME = re.compile(r"(module\.)?layer1\.0\.conv1\.weight")
_STATISTICS = ("running_mean", "running_var")
_OFFSETS = ".conv2_offset."  # of a deformable convolution, which a classifier does not have; zero at first


class LoadReport:
    """Report of the loaded and the missing tensors of a detector.

    ``str(report)`` is one line: ``backbone: 231/231 tensors; FPN and heads are randomly initialized, as expected``.

    Args:
        model: the detector, or a bare backbone.
        given: the tensor names of the checkpoint with the model's shapes, under the model's names where these are
            known; None if no checkpoint was loaded.

    Attributes:
        missing: backbone tensors that were not loaded; res5 of a C4 detector's head counts as backbone.
        unexpected: backbone tensors of the checkpoint that the model does not have.
        new: other tensors that were not loaded, e.g. of FPN and heads, and the offsets of deformable convolutions.
    """

    def __init__(self, model: nn.Module, given: Collection[str] | None = None) -> None:
        backbone = getattr(model, "backbone", model)
        bottom_up = getattr(backbone, "bottom_up", backbone)
        res5 = getattr(
            getattr(model, "roi_heads", None), "res5", None
        )  # C4 detectors have the last stage in the head
        prefixes = tuple(
            f"{name}." if name else ""
            for name, part in model.named_modules()
            if part in (bottom_up, res5)
        )
        frozen = [
            name
            for name, layer in model.named_modules()
            if isinstance(layer, FrozenBatchNorm2d) and name.startswith(prefixes)
        ]
        names = [
            name for name in model.state_dict() if not name.endswith(".num_batches_tracked")
        ]
        self._loaded = given is not None
        self._given = set(given or ())
        # Caffe2's files have the statistics multiplied into scale and shift, which Detectron2 accepts. A file that
        # lacks the statistics of only some layers belongs to another network.
        statistics = {f"{name}.{field}" for name in frozen for field in _STATISTICS}
        scales = {f"{name}.weight" for name in frozen}
        self._fused_layers = (
            len(frozen) if scales <= self._given and not statistics & self._given else 0
        )
        fused = statistics if self._fused_layers else set()
        self._backbone = [
            name for name in names if name.startswith(prefixes) and _OFFSETS not in name
        ]
        self._others = [
            name for name in names if not name.startswith(prefixes) or _OFFSETS in name
        ]
        self.missing = [name for name in self._backbone if name not in self._given | fused]
        self.new = [name for name in self._others if name not in self._given]
        self.unexpected = sorted(
            name
            for name in self._given.difference(names)
            if _BACKBONE_NAME.match(name)
            and not name.endswith(".num_batches_tracked")
            and not (
                self._fused_layers and name.endswith("stem.conv1.bias")
            )  # Caffe2's, which Detectron2 ignores
        )

    def __str__(self) -> str:
        if not self._loaded:
            return "no weights were loaded: the whole model is randomly initialized"
        parts = [
            f"backbone: {len(self._given.intersection(self._backbone))}/{len(self._backbone)} tensors"
        ]
        if self.unexpected:
            names = summarize_names(self.unexpected)
            parts.append(
                f"{len(self.unexpected)} unexpected tensors in the checkpoint ({names})"
            )
        if self._fused_layers:
            parts.append(
                f"{self._fused_layers} FrozenBN without statistics, which fits only Caffe2 weights"
            )
        if self.new and len(self.new) == len(self._others):
            parts.append("FPN and heads are randomly initialized, as expected")
        elif self._others:
            new = f", new: {summarize_names(self.new)}" if self.new else ""
            parts.append(
                f"FPN and heads: {len(self._others) - len(self.new)}/{len(self._others)}{new}"
            )
        return "; ".join(parts)

    def check(self) -> None:
        """Raise :class:`WeightsError` unless the whole backbone was loaded."""
        if not self._loaded or not (self.missing or self.unexpected):
            return
        lines = [f"MODEL.WEIGHTS: does not fit the model: {self}"]
        if self.missing:
            lines.append(f"Missing: {summarize_names(self.missing)}.")
        if any(map(_TORCHVISION_NAME.fullmatch, self._given)):
            lines.append("It has torchvision's names. Fix: gw-detectron weights convert.")
        else:
            lines.append(
                "Fix: set MODEL.RESNETS (DEPTH, NUM_GROUPS, WIDTH_PER_GROUP, NORM, WHITEN_POSITIONS) as the weights "
                "need it, give other weights, or accept random values with --allow-partial."
            )
        raise WeightsError("\n  ".join(lines))


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
        needed: name prefix of the tensors that the weights must hold: ``"backbone."`` for the FPN, ``""`` for all.
            The ResNet's tensors are always needed.
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
            "MODEL.WEIGHTS (''): no weights are given. Fix: set it to a trained detector, or give a RUN."
        )
    model = build_checked_model(cfg, device).eval()
    report = load_checkpoint(model, checkpoint, allow_partial=allow_partial)
    log.info("%s", report)
    missing = [name for name in report.new if name.startswith(needed) and not allow_partial]
    if missing:
        alone = "; --no-fpn exports only the ResNet" if needed else ""
        raise WeightsError(
            f"MODEL.WEIGHTS ('{checkpoint.address}'): {len(missing)} tensors are missing or have other shapes than the "
            f"model's ({summarize_names(missing)}). Fix: give the weights of a trained detector, with NUM_CLASSES and "
            f"the keys of the heads as in its run{alone}."
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
        model: the detector, a bare backbone, or the DistributedDataParallel of one; or its checkpointer, whose own
            ``_load_model`` then loads the tensors.
        checkpoint: None keeps the initial values.
        allow_partial: accept missing backbone tensors, and norms that differ from the checkpoint's.

    Raises:
        WeightsError: a backbone tensor is missing, or norms differ; also with ``allow_partial``, a tensor is not
            finite, has a negative variance or no floating-point numbers. Nothing is loaded.
    """
    checkpointer = (
        model if isinstance(model, DetectionCheckpointer) else DetectionCheckpointer(model)
    )
    model = checkpointer.model
    if checkpoint is None:
        return LoadReport(model)
    if differences := norm_differences(checkpoint, model):
        error = norm_mismatch(checkpoint.address, differences)
        if not allow_partial:
            raise error
        log.warning("%s", error)
    log.info("Loading weights from %s", checkpoint.path)
    given: set[str] = set()
    weights = {name for name, value in model.state_dict().items() if value.is_floating_point()}

    def check(module: nn.Module, state_dict: Mapping[str, Tensor], *_: Any) -> None:
        given.update(state_dict)
        _check_weights(
            {name: value for name, value in state_dict.items() if name in weights},
            checkpoint.address,
        )
        if not allow_partial:
            LoadReport(module, given).check()

    # FrozenBatchNorm2d adds missing statistics while it loads, so the names are taken before
    with model.register_load_state_dict_pre_hook(check):
        # Private methods of DetectionCheckpointer and fvcore's Checkpointer: the part of load() after reading the file.
        incompatible = checkpointer._load_model(
            {**checkpoint.metadata, "model": copy.copy(checkpoint.tensors)}
        )
        checkpointer._log_incompatible_keys(incompatible)
    recorded, caffe2 = (
        recorded_norms(checkpoint, model),
        checkpoint.metadata.get("__author__") == "Caffe2",
    )
    grouped = [
        row.layer for row in norm_rows(model) if row.groups and not caffe2
    ]  # Caffe2's names tell GN
    unclear = [layer for layer in grouped if not recorded.get(layer)]
    unclear += [] if any(recorded.values()) else [*conv_names(model)]
    if unclear := [layer for layer in unclear if f"{layer}.weight" in given]:
        log.warning(
            "MODEL.WEIGHTS ('%s'): records no norms of %d layers (%s). GN and GW, or WS and plain convolutions, have "
            "the same tensors: set the NORM and CONV keys as in that run.",
            checkpoint.address,
            len(unclear),
            summarize_names(unclear),
        )
    return LoadReport(model, given)


def norm_mismatch(address: str, differences: Sequence[str]) -> WeightsError:
    """Return the error that the weights at an address were trained with other norms than the model has."""
    return WeightsError(
        f"MODEL.WEIGHTS ('{address}'): trained with other norms: {len(differences)} layers differ "
        f"({summarize_names(differences)}). Fix: set MODEL.RESNETS.WHITEN_POSITIONS, {', '.join(NORM_KEYS)} and CONV "
        "keys as in that run, or give weights of these norms; train and eval accept others with --allow-partial."
    )


def _check_weights(tensors: Mapping[str, Tensor], address: str) -> None:
    problems: dict[str, list[str]] = {}
    for name, value in tensors.items():
        if problem := weight_problem(name, value):
            problems.setdefault(problem, []).append(name)
    if problems:
        lines = [
            f"{len(names)} tensors {problem} ({summarize_names(names)})"
            for problem, names in problems.items()
        ]
        raise WeightsError(
            f"MODEL.WEIGHTS ('{address}'): {'; '.join(lines)}. Fix: give an earlier checkpoint of that run, or other "
            "weights."
        )


class GWDetectionCheckpointer(DetectionCheckpointer):
    """Detectron2's checkpointer, with a record of norms and checked loading, for scripts without this Trainer.

    ``allow_partial`` accepts missing backbone tensors, and other norms than the checkpoint's; the other arguments are
    Detectron2's.
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
        self.add_checkpointable(NORMS, NormRecord(self.model))

    def save(self, name: str, **kwargs: Any) -> None:
        """Write a checkpoint to the folder, which is created if needed."""
        if self.save_dir and self.save_to_disk:
            PathManager.mkdirs(self.save_dir)
        super().save(name, **kwargs)

    def load(self, path: str, checkpointables: list[str] | None = None) -> dict[str, Any]:
        """Load a checkpoint without running its code; return what else it contains. A path "" loads nothing.

        ``checkpointables`` are the names of the training states to load; None loads all.

        Raises:
            UserError: see :func:`open_checkpoint` and :func:`load_checkpoint`.
        """
        if not path:
            return super().load(path)
        checkpoint = open_checkpoint(path, "checkpoint")
        names = [*self.checkpointables] if checkpointables is None else checkpointables
        report = load_checkpoint(self, checkpoint, allow_partial=self.allow_partial)
        for name in names:
            if name in checkpoint.metadata:
                self.checkpointables[name].load_state_dict(checkpoint.metadata[name])
        log.info("%s", report)
        return {name: value for name, value in checkpoint.metadata.items() if name not in names}
