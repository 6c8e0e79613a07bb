"""Check config, weights and data before training starts."""

from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer
from detectron2.utils import comm

from ..checkpoint import StartWeights
from .config_checks import (
    PreflightReport,
    check_device,
    check_evaluation,
    check_kept_weights,
    check_output_folder,
    check_schedule,
)
from .dataset_checks import check_datasets, wrong_evaluator
from .model_checks import check_model, check_start_weights

__all__ = ["PreflightReport", "preflight", "wrong_evaluator"]


def preflight(
    cfg: CfgNode,
    start: StartWeights,
    *,
    eval_only: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    allow_partial: bool = False,
    config_file: str = "",
) -> PreflightReport:
    """Find what would stop a run after hours, or let it train to nothing.

    Values that Detectron2 refuses at once are left to it. Remote weights are fetched last, and only if there is no
    error. Nothing is written.

    Args:
        cfg: the config.
        start: the weights that the run starts from, see :func:`gw_detectron.checkpoint.open_start_weights`.
        eval_only: the run evaluates only.
        resume: the user asked to resume.
        overwrite: the user asked to replace an earlier run.
        allow_partial: the user accepts weights that do not fit.
        config_file: the file that the config was read from.

    Returns:
        All errors and warnings.
    """
    report = PreflightReport()
    check_device(cfg, report)
    if not eval_only:
        check_schedule(cfg, report)
        cfg = DefaultTrainer.auto_scale_workers(cfg, comm.get_world_size())  # as the trainer does
    check_output_folder(
        cfg, start, report, eval_only=eval_only, resume=resume, overwrite=overwrite, config_file=config_file
    )
    model = check_model(cfg, start, report, eval_only=eval_only)
    check_evaluation(cfg, model, report)
    check_datasets(cfg, report, eval_only=eval_only)
    if not eval_only:
        check_kept_weights(cfg, report)
    if not report.errors:
        start.fetch()
    if start.unfetched:
        report.unchecked = f"MODEL.WEIGHTS ('{start.address}'): not fetched and not checked before this is corrected."
    check_start_weights(cfg, start, model, report, allow_partial=allow_partial)
    return report
