"""Fail early on configs that would crash later or train to nothing."""

from detectron2.config import CfgNode

from ..checkpoint import StartWeights
from .config_checks import check_device, check_schedule
from .dataset_checks import COCO_EVALUATORS, check_datasets
from .findings import Findings, PreflightError
from .model_checks import check_model
from .weights_checks import check_weights

__all__ = ["COCO_EVALUATORS", "Findings", "PreflightError", "find_problems", "preflight"]


def preflight(
    cfg: CfgNode, start: StartWeights, *, eval_only: bool = False, resume: bool = False, ignore: bool = False
) -> list[str]:
    """Check a run before it starts.

    Args:
        cfg: the config.
        start: the weights that the run starts from, see :func:`gw_detectron.checkpoint.open_start_weights`.
        eval_only: the run evaluates only.
        resume: the user asked to resume.
        ignore: return problems as warnings.

    Returns:
        The warnings, to be logged.

    Raises:
        PreflightError: all problems.
    """
    findings = find_problems(cfg, start, eval_only=eval_only, resume=resume)
    if findings.problems and not ignore:
        raise PreflightError(findings.problems)
    return findings.problems + findings.warnings


def find_problems(cfg: CfgNode, start: StartWeights, *, eval_only: bool = False, resume: bool = False) -> Findings:
    """Return all problems and warnings of a run; the arguments are those of :func:`preflight`."""
    findings = Findings()
    check_device(cfg, findings, eval_only=eval_only)
    if not eval_only:
        check_schedule(cfg, findings)
    check_weights(cfg, start, findings, eval_only=eval_only, resume=resume)
    check_model(cfg, start, findings, eval_only=eval_only)
    check_datasets(cfg, findings, eval_only=eval_only)
    return findings
