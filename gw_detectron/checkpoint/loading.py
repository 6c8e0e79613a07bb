"""Load an opened checkpoint into a detector."""

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from detectron2.checkpoint import DetectionCheckpointer
from torch import Tensor, nn

from ..errors import InvalidWeightsError, NormMismatchError, summarize_names
from ..modeling.norm_keys import NORM_KEYS
from ..norms.norm_listing import norm_rows
from .checkpoint_file import Checkpoint
from .load_report import LoadReport
from .norm_record import norm_differences
from .reading import weight_problem
from .weight_notes import NORMS


def load_checkpoint(
    model: nn.Module | DetectionCheckpointer, checkpoint: Checkpoint | None, *, allow_partial: bool = False
) -> LoadReport:
    """Load an opened checkpoint into a detector and require the whole backbone.

        report = load_checkpoint(model, open_checkpoint(cfg.MODEL.WEIGHTS))
        logger.info(report)  # backbone: 231/231 tensors; FPN and heads start new, as expected

    Args:
        model: the detector, a bare backbone, or the DistributedDataParallel of one; or its checkpointer, whose own
            ``_load_model`` then loads the tensors.
        checkpoint: None keeps the initial values.
        allow_partial: accept missing backbone tensors, and norms that differ from those of the checkpoint.

    Raises:
        InvalidWeightsError: a tensor has NaN or infinite values, a negative variance, or no floating-point numbers
            where the model has them; ``allow_partial`` does not accept this. Nothing is loaded.
        NormMismatchError: the checkpoint was trained with other norms; nothing is loaded.
        PartialLoadError: a backbone tensor is missing in the checkpoint or in the model; nothing is loaded.
    """
    checkpointer = model if isinstance(model, DetectionCheckpointer) else DetectionCheckpointer(model)
    model = checkpointer.model
    if checkpoint is None:
        return LoadReport(model)
    # in float32, as in the model: larger values of float64 become infinite
    floating = {name: value for name, value in checkpoint.tensors.items() if value.is_floating_point()}
    _check_weights(floating, checkpoint.address)
    log = logging.getLogger(__name__)
    if differences := norm_differences(checkpoint, model):
        error = norm_mismatch(checkpoint.address, differences)
        if not allow_partial:
            raise error
        log.warning("%s", error)
    if NORMS not in checkpoint.metadata and checkpoint.provenance is not None:
        checkpoint.provenance.warn_of_assumed_norms()
    elif NORMS not in checkpoint.metadata and any(
        row.groups and f"{row.layer}.weight" in checkpoint.tensors for row in norm_rows(model)
    ):
        log.warning(
            "MODEL.WEIGHTS ('%s'): records no norms, as it is not of this package's trainer. GN, GW and other "
            "numbers of groups have the same tensors: set the norms as in that run.",
            checkpoint.address,
        )
    log.info("Loading weights from %s", checkpoint.path)
    given: set[str] = set()
    weights = {name for name, value in model.state_dict().items() if value.is_floating_point()}

    def take_names(module: nn.Module, state_dict: Mapping[str, Tensor], *_: Any) -> None:
        given.update(state_dict)
        others = {name: value for name, value in state_dict.items() if not value.is_floating_point()}
        _check_weights({name: value for name, value in others.items() if name in weights}, checkpoint.address)
        if not allow_partial:
            LoadReport(module, given).check()

    # FrozenBatchNorm2d adds missing statistics while it loads, so the names are taken before
    with model.register_load_state_dict_pre_hook(take_names):
        # Private methods of DetectionCheckpointer and fvcore's Checkpointer: the part of load() after reading the file.
        # Run with Detectron2 v0.5; the same code in v0.6 and main of 2026 was compared.
        incompatible = checkpointer._load_model({**checkpoint.metadata, "model": copy.copy(checkpoint.tensors)})
        checkpointer._log_incompatible_keys(incompatible)
    return LoadReport(model, given)


def norm_mismatch(address: str, differences: Sequence[str]) -> NormMismatchError:
    """Return the error that weights were trained with other norms than the model has.

    Args:
        address: that of the weights.
        differences: see :func:`.norm_differences`.
    """
    return NormMismatchError(
        f"MODEL.WEIGHTS ('{address}'): trained with other norms: {len(differences)} layers differ "
        f"({summarize_names(differences)}). Fix: set norms and convolutions as in that run, by "
        f"MODEL.RESNETS.WHITEN_POSITIONS ('' for one norm in the whole backbone), {', '.join(NORM_KEYS)} "
        "and the CONV keys beside them, give weights of these norms, e.g. gw://imagenet/R-50, or accept the difference "
        "with --allow-partial (train_net.py, analyze_whitening.py), in Python allow_partial=True."
    )


def _check_weights(tensors: Mapping[str, Tensor], address: str) -> None:
    problems: dict[str, list[str]] = {}
    for name, value in tensors.items():
        if problem := weight_problem(name, value):
            problems.setdefault(problem, []).append(name)
    if problems:
        lines = [f"{len(names)} tensors {problem} ({summarize_names(names)})" for problem, names in problems.items()]
        raise InvalidWeightsError(
            f"MODEL.WEIGHTS ('{address}'): {'; '.join(lines)}. Fix: give an earlier checkpoint of that run, or other "
            "weights."
        )
