"""Checks before a run: what would stop it later, or let it go on and learn nothing, is said at once."""

from detectron2.config import CfgNode

from .data import COCO_EVALUATORS, check_data
from .findings import Findings, PreflightError
from .machine import check_machine
from .model import check_model
from .solver import check_solver
from .weights import check_weights

__all__ = ["COCO_EVALUATORS", "Findings", "PreflightError", "find_problems", "preflight"]


def preflight(cfg: CfgNode, *, eval_only: bool = False, resume: bool = False, ignore: bool = False) -> list[str]:
    """Checks a run before it starts.

    Args:
        cfg: the config.
        eval_only: nothing is going to be trained.
        resume: the run goes on from the last checkpoint of ``OUTPUT_DIR`` if there is one.
        ignore: turn problems into warnings.

    Returns:
        The warnings, to be logged.

    Raises:
        PreflightError: all problems.
    """

    findings = find_problems(cfg, eval_only=eval_only, resume=resume)
    if findings.problems and not ignore:
        raise PreflightError(findings.problems)
    return findings.problems + findings.warnings


def find_problems(cfg: CfgNode, *, eval_only: bool = False, resume: bool = False) -> Findings:
    """Returns all problems and warnings of a run; see :func:`preflight` for the arguments."""
    findings = Findings()
    check_machine(cfg, findings, eval_only=eval_only)
    if not eval_only:
        check_solver(cfg, findings)
    start = check_weights(cfg, findings, eval_only=eval_only, resume=resume)
    check_model(cfg, findings, eval_only=eval_only, start=start)
    check_data(cfg, findings, eval_only=eval_only)
    return findings
