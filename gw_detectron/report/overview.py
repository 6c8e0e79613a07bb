"""Summary, norms and config of a run."""

import math
import statistics
from typing import Any

from ..checkpoint.records import RUN_RECORD
from ..errors import MissingInputError
from ..norms import norm_rows, norm_summary
from .precision_recall import TASKS
from .run_folder import RunFolder
from .sections import Section, Table

# COCO's summary begins with these; small objects have no keypoints
_METRICS = {
    "bbox": ("AP", "AP50", "AP75", "APs", "APm", "APl"),
    "segm": ("AP", "AP50", "AP75", "APs", "APm", "APl"),
    "keypoints": ("AP", "AP50", "AP75", "APm", "APl"),
}

_SEGMENTATION = {"mIoU": "sem_seg/mIoU", "PQ": "panoptic_seg/PQ"}


def summary_section(run: RunFolder) -> Section:
    """Summarize a run as far as its files tell; other sections say what is missing."""
    numbers: dict[str, Any] = {"folder": str(run.folder)}
    for part in (_data, _segmentation, _norms, _speed, _origin):
        try:
            numbers |= part(run)
        except MissingInputError:
            continue
    scores = _scores(run)
    cards = {f"{TASKS[task]} AP": "-" if (ap := found["AP"]) is None else f"{ap:.1f}" for task, found in scores.items()}
    cards |= {name: f"{numbers[name]:.1f}" for name in _SEGMENTATION if name in numbers}
    if "images_per_second" in numbers:
        cards |= {"iterations": f"{numbers['iterations']:,}", "images/s": f"{numbers['images_per_second']:.3g}"}
    tables = [Table(["", ""], [(name.replace("_", " "), _text(value)) for name, value in numbers.items()])]
    if scores:
        rows = [[TASKS[task], *(found.get(name) for name in _METRICS["bbox"])] for task, found in scores.items()]
        where = f"percent on {run.dataset}" if run.dataset else "percent"
        tables.insert(0, Table([where, *_METRICS["bbox"]], rows))
    return Section("Summary", {**numbers, "scores": scores}, cards=cards, tables=tables)


def _data(run: RunFolder) -> dict[str, Any]:
    return {"dataset": run.dataset, "images": len(run.records)}


def _norms(run: RunFolder) -> dict[str, Any]:
    return {"norms": norm_summary(run.plain_model)}


def _speed(run: RunFolder) -> dict[str, Any]:
    records, solver = run.metrics, run.cfg.SOLVER
    times = [record["time"] for record in records if "time" in record]
    # REFERENCE_WORLD_SIZE scales MAX_ITER and IMS_PER_BATCH by the number of processes, which the config does not have
    scaled, iterations = solver.REFERENCE_WORLD_SIZE, records[-1]["iteration"] + 1
    found: dict[str, Any] = {"iterations": iterations if scaled else min(iterations, solver.MAX_ITER)}
    if run.evaluated_iteration is not None:
        found["evaluated_after_iteration"] = min(run.evaluated_iteration + 1, found["iterations"])
    if run.training_time:
        found["training_time"] = run.training_time
    if times:
        seconds = statistics.median(times)
        found["seconds_per_iteration"] = round(seconds, 4)
        if not scaled:
            found["images_per_second"] = round(solver.IMS_PER_BATCH * solver.ACCUMULATE / seconds, 3)
    return found


def _segmentation(run: RunFolder) -> dict[str, Any]:
    """Return the last logged scores of semantic and panoptic segmentation, in percent."""
    logged = run.logged_scores
    return {name: round(logged[key], 1) for name, key in _SEGMENTATION.items() if key in logged}


def _origin(run: RunFolder) -> dict[str, Any]:
    """Read weights, seed and versions from the checkpoint."""
    found: dict[str, Any] = {"weights": run.weights, "sha256": run.checkpoint.sha256}
    record = run.checkpoint.metadata.get(RUN_RECORD)
    if not isinstance(record, dict):  # other software wrote the checkpoint
        return found
    versions = dict(record.get("versions", {}))
    machine = ", ".join(versions.pop(name) for name in ("platform", "gpu") if name in versions)
    return {
        **found,
        "start_weights": record.get("start_weights", {}).get("address", "random"),
        "seed": record.get("seed"),
        "commit": versions.pop("commit", "not recorded"),
        "machine": machine,
        "versions": versions,
    }


def _text(value: Any) -> str:
    return ", ".join(f"{name} {each}" for name, each in value.items()) if isinstance(value, dict) else str(value)


def _scores(run: RunFolder) -> dict[str, dict[str, float | None]]:
    """Return task -> AP in percent, of the predictions or else of the last logged evaluation."""
    try:
        return {
            task: {
                name: float(100 * value) if value >= 0 else None
                for name, value in zip(_METRICS[task], evaluation.stats, strict=False)
            }
            for task, evaluation in run.detections.scores.items()
        }
    except MissingInputError:
        pass
    try:
        logged = run.logged_scores
    except MissingInputError:
        return {}
    return {
        task: {name: None if math.isnan(value := logged.get(f"{task}/{name}", math.nan)) else value for name in names}
        for task, names in _METRICS.items()
        if f"{task}/AP" in logged
    }


def norms_section(run: RunFolder) -> Section:
    """List every norm layer of the model."""
    rows = [row._asdict() for row in norm_rows(run.plain_model)]
    header = ["layer", "norm", "channels", "groups", "parameters", "frozen"]
    cells = [[*list(row.values())[:-1], "yes" if row["frozen"] else "no"] for row in rows]
    return Section("Norm layers", rows, norm_summary(run.plain_model), tables=[Table(header, cells)], folded=True)


def config_section(run: RunFolder) -> Section:
    """Show the config file."""
    text = run.config_file.read_text()
    return Section("Config", {"file": str(run.config_file)}, f"'{run.config_file}'", code=text, folded=True)
