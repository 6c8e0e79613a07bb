"""Fail early on configs that would crash later or train to nothing."""

from detectron2.config import CfgNode

from ..checkpoint import StartWeights
from .config_checks import check_device, check_schedule
from .dataset_checks import COCO_EVALUATORS, check_datasets
from .findings import Findings, PreflightError
from .model_checks import check_model
from .weights_checks import check_weights

__all__ = ["COCO_EVALUATORS", "Findings", "PreflightError", "preflight"]


def preflight(cfg: CfgNode, start: StartWeights, *, eval_only: bool = False, resume: bool = False) -> Findings:
    """Check a run before it starts.

    Args:
        cfg: the config.
        start: the weights that the run starts from, see :func:`gw_detectron.checkpoint.open_start_weights`.
        eval_only: the run evaluates only.
        resume: the user asked to resume.

    Returns:
        All problems and warnings.
    """
    findings = Findings()
    check_device(cfg, findings, eval_only=eval_only)
    if not eval_only:
        check_schedule(cfg, findings)
    check_weights(cfg, start, findings, eval_only=eval_only, resume=resume)
    check_model(cfg, start, findings, eval_only=eval_only)
    check_datasets(cfg, findings, eval_only=eval_only)
    return findings
