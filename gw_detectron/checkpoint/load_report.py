"""Report which tensors of a detector a checkpoint has loaded."""

import re
from collections.abc import Collection

from detectron2.layers import FrozenBatchNorm2d
from torch import nn

from ..errors import PartialLoadError, summarize_names

_BACKBONE_NAME = re.compile(r"(backbone\.(bottom_up\.)?)?(stem\.conv1|res[2-5]\.\d+)\.")
_TORCHVISION_NAME = re.compile(r"(module\.)?layer1\.0\.conv1\.weight")
_STATISTICS = ("running_mean", "running_var")
_OFFSETS = ".conv2_offset."  # of a deformable convolution, which a classifier does not have; zero at first


class LoadReport:
    """Report of the loaded and the missing tensors of a detector.

    ``str(report)`` is one line: ``backbone: 231/231 tensors; FPN and heads start new, as expected``.

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
        res5 = getattr(getattr(model, "roi_heads", None), "res5", None)  # C4 detectors have the last stage in the head
        parts = [(name, part) for name, part in model.named_modules() if part in (bottom_up, res5)]
        prefixes = tuple(f"{name}." if name else "" for name, _ in parts)
        frozen = [
            name
            for prefix, part in parts
            for name, layer in part.named_modules(prefix=prefix)
            if isinstance(layer, FrozenBatchNorm2d)
        ]
        names = [name for name in model.state_dict() if not name.endswith(".num_batches_tracked")]
        self._loaded = given is not None
        self._given = set(given or ())
        # Caffe2's files have the statistics multiplied into scale and shift, which Detectron2 accepts. A file that
        # lacks the statistics of only some layers belongs to another network.
        statistics = {f"{name}.{field}" for name in frozen for field in _STATISTICS}
        scales = {f"{name}.weight" for name in frozen}
        self._fused_layers = len(frozen) if scales <= self._given and not statistics & self._given else 0
        fused = statistics if self._fused_layers else set()
        self._backbone = [name for name in names if name.startswith(prefixes) and _OFFSETS not in name]
        self._others = [name for name in names if not name.startswith(prefixes) or _OFFSETS in name]
        self.missing = [name for name in self._backbone if name not in self._given | fused]
        self.new = [name for name in self._others if name not in self._given]
        self.unexpected = sorted(
            name
            for name in self._given.difference(names)
            if _BACKBONE_NAME.match(name)
            and not name.endswith(".num_batches_tracked")
            and not (self._fused_layers and name.endswith("stem.conv1.bias"))  # Caffe2's, which Detectron2 ignores
        )

    def __str__(self) -> str:
        if not self._loaded:
            return "no weights were loaded: backbone, FPN and heads start new"
        parts = [f"backbone: {len(self._given.intersection(self._backbone))}/{len(self._backbone)} tensors"]
        if self.unexpected:
            names = summarize_names(self.unexpected)
            parts.append(f"{len(self.unexpected)} unexpected tensors in the checkpoint ({names})")
        if self._fused_layers:
            parts.append(
                f"{self._fused_layers} FrozenBN without statistics: right for Caffe2 weights, whose scale and shift "
                "contain them; wrong for GN and GW weights"
            )
        if self.new and len(self.new) == len(self._others):
            parts.append("FPN and heads start new, as expected")
        elif self.new:
            loaded = len(self._others) - len(self.new)
            parts.append(f"FPN and heads: {loaded}/{len(self._others)}, new: {summarize_names(self.new)}")
        elif self._others:
            parts.append(f"FPN and heads: {len(self._others)}/{len(self._others)}")
        return "; ".join(parts)

    def check(self) -> None:
        """Raise :class:`PartialLoadError` unless the whole backbone was loaded."""
        if not self._loaded or not (self.missing or self.unexpected):
            return
        lines = [f"MODEL.WEIGHTS: does not fit the model: {self}"]
        if self.missing:
            lines.append(f"Missing: {summarize_names(self.missing)}.")
        if any(map(_TORCHVISION_NAME.fullmatch, self._given)):
            lines.append(
                "The checkpoint has torchvision's names. Fix: convert it with gw-detectron convert, or set "
                "MODEL.WEIGHTS to gw://file/<path>."
            )
        else:
            lines.append(
                "Fix: set MODEL.RESNETS (DEPTH, NUM_GROUPS, WIDTH_PER_GROUP, NORM, WHITEN_POSITIONS) as the weights "
                "need it, give other weights, or accept random values with --allow-partial."
            )
        raise PartialLoadError("\n  ".join(lines))
