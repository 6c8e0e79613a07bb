"""Fail early on configs that would crash later or train to nothing."""

from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer
from detectron2.utils import comm

from ..checkpoint import StartWeights
from .config_checks import check_compiler, check_device, check_scaled_periods, check_schedule
from .dataset_checks import check_datasets, wrong_evaluator
from .findings import Findings
from .model_checks import check_model
from .value_checks import check_values
from .weights_checks import check_fetched, check_weights

__all__ = ["Findings", "preflight", "wrong_evaluator"]


def preflight(
    cfg: CfgNode,
    start: StartWeights,
    *,
    eval_only: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    allow_partial: bool = False,
    config_file: str = "",
) -> Findings:
    """Check a run before it starts.

    Remote weights are fetched last, and only if no problem was found.

    Args:
        cfg: the config.
        start: the weights that the run starts from, see :func:`gw_detectron.checkpoint.open_start_weights`.
        eval_only: the run evaluates only.
        resume: the user asked to resume.
        overwrite: the user asked to replace an earlier run.
        allow_partial: the user accepts weights that do not fit.
        config_file: the file that the config was read from.

    Returns:
        All problems and warnings.
    """
    findings = Findings()
    if not check_values(cfg, findings, eval_only=eval_only):
        return findings
    wrong = tuple(findings.problems)  # parts with wrong values are not checked further
    if not (wrong or eval_only):
        scaled = DefaultTrainer.auto_scale_workers(cfg, comm.get_world_size())  # as the trainer does
        check_scaled_periods(cfg, scaled, findings)
        cfg = scaled
    check_device(cfg, findings, eval_only=eval_only)
    check_compiler(cfg, findings)
    if not eval_only and not any(problem.startswith("SOLVER.") for problem in wrong):
        check_schedule(cfg, findings)
    check_weights(
        cfg, start, findings, eval_only=eval_only, resume=resume, overwrite=overwrite, config_file=config_file
    )
    model = None
    if not any(problem.startswith(("MODEL.", "INPUT.", "SOLVER.IMS_PER_BATCH")) for problem in wrong):
        model = check_model(cfg, start, findings, eval_only=eval_only)
    if not any(problem.startswith("DATASETS.") for problem in wrong):
        check_datasets(cfg, findings, eval_only=eval_only)
    if not findings.problems:
        start.fetch()
    if start.unfetched:
        findings.unchecked = f"MODEL.WEIGHTS ('{start.address}'): not fetched and not checked before this is corrected."
    check_fetched(cfg, start, model, findings, allow_partial=allow_partial)
    return findings
