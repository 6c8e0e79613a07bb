"""Says after loading what of a detector's backbone was loaded, and treats the rest as an error."""

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from detectron2.layers import FrozenBatchNorm2d
from detectron2.utils.file_io import PathManager
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import summarize_names
from ..modeling.norm_keys import NORM_KEYS
from .norms import NormMismatchError, differing_norms
from .reading import read_weights_file

_OF_A_BACKBONE = re.compile(r"(backbone\.(bottom_up\.)?)?(stem\.conv1|res[2-5]\.\d+)\.")
_OF_TORCHVISION = re.compile(r"(module\.)?layer1\.0\.conv1\.weight")
_STATISTICS = ("running_mean", "running_var")


class PartialLoadError(ValueError):
    """Weights left a part of the backbone at random values."""


class LoadReport:
    """What a checkpoint brought to a model; complete when the ``with`` statement that made it has ended.

    Args:
        model: the detector, or a bare backbone.
    """

    def __init__(self, model: nn.Module) -> None:
        backbone = getattr(model, "backbone", model)
        bottom_up = getattr(backbone, "bottom_up", backbone)
        prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is bottom_up)
        names = [name for name in model.state_dict() if not name.endswith(".num_batches_tracked")]
        self._frozen = [
            f"{prefix}{name}" for name, module in bottom_up.named_modules() if isinstance(module, FrozenBatchNorm2d)
        ]
        self._backbone = [name for name in names if name.startswith(prefix)]
        self._others = [name for name in names if not name.startswith(prefix)]
        self._given: set[str] | None = None
        self._fused = False

    def note(self, given: Collection[str]) -> None:
        """Takes the names that a checkpoint gives to the model, those without a place in it among them."""
        self._given = set(given)
        # Caffe2's files have the statistics multiplied into scale and shift, which Detectron2 accepts. A file that
        # lacks the statistics of some layers only is of another network.
        statistics = {f"{name}.{field}" for name in self._frozen for field in _STATISTICS}
        scales = {f"{name}.weight" for name in self._frozen}
        self._fused = bool(scales) and scales <= self._given and not statistics & self._given
        if self._fused:
            self._given |= statistics

    @property
    def missing(self) -> list[str]:
        """Backbone tensors that were not loaded."""
        return [name for name in self._backbone if name not in (self._given or ())]

    @property
    def homeless(self) -> list[str]:
        """Backbone tensors of the file for which the model has no place."""
        known = {*self._backbone, *self._others}
        return sorted(
            name
            for name in (self._given or ())
            if name not in known and _OF_A_BACKBONE.match(name) and not name.endswith(".num_batches_tracked")
        )

    @property
    def new(self) -> list[str]:
        """Tensors outside the backbone that were not loaded, such as those of FPN and heads."""
        return [name for name in self._others if name not in (self._given or ())]

    def __str__(self) -> str:
        if self._given is None:
            return "no weights were loaded: backbone, FPN and heads start new"
        total = len(self._backbone)
        parts = [f"backbone: {total - len(self.missing)}/{total} tensors"]
        if self.homeless:
            parts.append(f"{len(self.homeless)} of the file have no place ({summarize_names(self.homeless)})")
        if self._fused:
            parts.append(
                f"{len(self._frozen)} FrozenBN without statistics, right for Caffe2 weights, whose scale and shift "
                "hold them, wrong for GroupNorm weights"
            )
        if self.new and len(self.new) == len(self._others):
            parts.append("FPN and heads start new, as expected")
        elif self.new:
            loaded = len(self._others) - len(self.new)
            parts.append(f"FPN and heads: {loaded}/{len(self._others)}, new are {summarize_names(self.new)}")
        elif self._others:
            parts.append(f"FPN and heads: {len(self._others)}/{len(self._others)}")
        return "; ".join(parts)

    def check(self) -> None:
        """Raises :class:`PartialLoadError` if the backbone was not loaded as a whole."""
        if self._given is None or not (self.missing or self.homeless):
            return
        lines = [str(self)]
        if self.missing:
            lines.append(f"not loaded: {summarize_names(self.missing)}")
        if any(map(_OF_TORCHVISION.fullmatch, self._given)):
            lines.append(
                "the file has torchvision's names: convert it with tools/convert_weights.py, or give MODEL.WEIGHTS as "
                "gw://file/<path>"
            )
        else:
            lines.append(
                "make MODEL.RESNETS (DEPTH, NUM_GROUPS, WIDTH_PER_GROUP, NORM, WHITEN_POSITIONS) fit the weights, give "
                "weights that fit it, or allow the rest to start from random values with --allow-partial"
            )
        raise PartialLoadError("\n  ".join(lines))


@contextlib.contextmanager
def strict_backbone_load(model: nn.Module, weights: str, *, allow_partial: bool = False) -> Iterator[LoadReport]:
    """Watches weights being loaded in the ``with`` statement, and at its end demands that all of the backbone were.

    It works with any checkpointer that ends in ``model.load_state_dict``, such as Detectron2's. Detectron2 would run
    code that a pickle carries, so the file is first read in a way that does not.

        with strict_backbone_load(model, cfg.MODEL.WEIGHTS) as report:
            DetectionCheckpointer(model).load(cfg.MODEL.WEIGHTS)
        logger.info(report)  # backbone: 231/231 tensors; FPN and heads start new, as expected

    Args:
        model: the detector, or a bare backbone.
        weights: the file or address that is going to be loaded, "" for none.
        allow_partial: accept a backbone of which a part was not loaded, and norms that are not those of the weights.

    Raises:
        NormMismatchError: the file says that it was trained with other norms. Nothing was loaded then.
        RefusedFileError: the file could run code.
        WeightsFileError: the file is damaged.
        PartialLoadError: a backbone tensor was not loaded, or one of the file found no place.
        OSError: the file is not there or cannot be fetched.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if weights:
        # Detectron2 reads "...?matching_heuristics=True" as a file name and an option
        content = read_weights_file(PathManager.get_local_path(weights.partition("?")[0])).value
        if isinstance(content, Mapping) and not allow_partial:
            _check_norms(weights, content, model)
        del content  # all tensors of the file
    report = LoadReport(model)

    def before_loading(module: nn.Module, state_dict: dict, *args: object) -> None:
        report.note(state_dict)

    # before, because FrozenBatchNorm2d adds statistics it does not find
    handle = model.register_load_state_dict_pre_hook(before_loading)
    try:
        yield report
    finally:
        handle.remove()
    if not allow_partial:
        report.check()


def _check_norms(weights: str, notes: Mapping[str, Any], model: nn.Module) -> None:
    differences = differing_norms(notes, model)
    if differences:
        raise NormMismatchError(
            f"{weights} was trained with other norms: {len(differences)} layers differ ({summarize_names(differences)}). Set "
            f"the norms as in that run, by {', '.join(NORM_KEYS)}. train_net.py and analyze_whitening.py accept the "
            "difference with --allow-partial"
        )
