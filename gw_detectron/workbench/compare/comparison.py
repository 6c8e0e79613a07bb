"""What a comparison of norms is asked, whether it is possible, and the runs that follow from it."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from ...config import changed_config
from ...errors import ConfigError, check_minimum, existing_path
from ...modeling.build import object_count_keys
from ...weights import open_start_weights
from ..dataset.datasets_yaml import DATASETS_FILE
from ..dataset.layouts import YAML, is_layout
from ..dataset.registration import record_datasets
from ..dataset.source import sources_of
from ..run import RunRequest, prepare
from ..run.checks import check_run
from ..run.request import DatasetFlags
from ..run.timing import check_minutes
from .plan import Job, check_plan, norm_keys, schedule_keys

Report = Callable[[str], object]


@dataclass(frozen=True)
class Comparison:
    """A comparison: of which norms, and how long.

    Args:
        base: the run that is repeated: its config, keys and flags. Its datasets choose the rates; its
            norms in the backbone, learning rate, schedule and seed are replaced.
        norms: see :func:`gw_detectron.workbench.compare.plan.norm_keys`.
        output: the folder; a comparison there is continued.
        scored: the datasets of the scored runs; None for those of ``base``.
        rates: learning rates to try; empty for half, once and twice the config's.
        iterations: of a scored run; 0 to derive them from ``minutes``.
        minutes: time for everything; 0 for no limit.
        seeds: scored runs of each norm; 0 means 3, and with ``minutes`` as many as the time allows.
        jobs: runs side by side.
        equal_time: also compare after equal time: faster norms are trained for more iterations.
    """

    base: RunRequest
    norms: Sequence[str]
    output: Path
    scored: DatasetFlags | None = None
    rates: Sequence[float] = ()
    iterations: int = 0
    minutes: float = 0.0
    seeds: int = 0
    jobs: int = 1
    equal_time: bool = True

    @property
    def folder(self) -> Path:
        return Path(self.output).absolute()

    def request(
        self, folder: Path, keys: Mapping[str, Any], *, scored: bool
    ) -> RunRequest:
        """Return a run in a folder: the keys come after the user's, except for periods."""
        data = self.base.data
        if scored and self.scored:
            data = self.scored
        opts = list(self.base.opts)
        for key, value in {**keys, "OUTPUT_DIR": str(folder)}.items():
            is_chosen = key.endswith("_PERIOD") and self.base.changes(key)
            if not is_chosen:
                opts += [key, value]
        return replace(self.base, data=data, opts=tuple(opts))

    def job_request(
        self, folder: Path, job: Job, cfg: CfgNode, evaluations: int
    ) -> RunRequest:
        """Return the run of a job.

        Args:
            cfg: the config, whose schedule is fitted to the job's length.
            evaluations: of a scored run.
        """
        keys = {
            **norm_keys(job.norm),
            **schedule_keys(cfg, job.iterations, job.evaluations(evaluations)),
            "SOLVER.BASE_LR": job.rate,
            "SEED": job.seed,
        }
        return self.request(folder, keys, scored=not job.is_search)


def check(
    comparison: Comparison, report: Report
) -> tuple[CfgNode, dict[str, dict[str, str]]]:
    """Check what is asked, each norm, and the images of --test-json; report the warnings.

    Returns:
        The config, whose datasets stay registered, and the digests of all datasets.
    """
    _check_flags(comparison)
    warnings: dict[str, None] = {}  # once each
    digests = {}
    if comparison.scored:
        tested = _config(comparison, scored=True)
        _check_norm(
            comparison, tested, comparison.norms[0], " with --test-json", warnings
        )
        digests["--test-json, "] = _dataset_digests(tested.DATASETS.TEST[0])

    cfg = _config(comparison, scored=False)  # replaces the datasets above
    for norm in comparison.norms:
        _check_norm(comparison, cfg, norm, "", warnings)
    for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST):
        digests[f"dataset '{name}', "] = _dataset_digests(name)

    for text in warnings:
        report(f"Warning: {text}")
    return cfg, digests


def _check_flags(comparison: Comparison) -> None:
    """Refuse what cannot be compared, before the config is read."""
    check_minimum("--jobs", comparison.jobs)
    check_minimum("--seeds", comparison.seeds, 0)
    if comparison.minutes or not comparison.iterations:
        check_minutes(comparison.minutes)
    check_plan(comparison.norms, comparison.rates or [1.0], comparison.iterations or 2)
    gpus = comparison.base.num_gpus
    if gpus > 1:
        raise ConfigError(
            f"--num-gpus ({gpus}): each run uses one GPU. Fix: leave it out; --jobs {gpus} trains "
            f"on {gpus} GPUs, and SOLVER.IMS_PER_BATCH is the batch of one."
        )
    if comparison.scored:
        _check_scored(comparison.base.data, comparison.scored)


def _check_scored(search: DatasetFlags, scored: DatasetFlags) -> None:
    """Check the images that are scored, by the names of their flags."""
    if not search.val_json:
        raise ConfigError(
            "--test-json: needs --val-json for the rates, not --val-fraction or --datasets."
        )
    labels = existing_path("--test-json", scored.val_json or "", os.path.exists)
    if scored.val_images is not None or not is_layout(labels):
        existing_path("--test-images", scored.val_images or "", os.path.isdir)
    if labels.endswith(YAML):
        raise ConfigError(
            f"--test-json ('{labels}'): a data.yaml has photos to train and to choose the rates. Fix: give the "
            "folder of the labels to score on."
        )


def _config(comparison: Comparison, *, scored: bool) -> CfgNode:
    cfg = prepare(comparison.request(comparison.folder, {}, scored=scored)).cfg
    if len(cfg.DATASETS.TEST) != 1:  # several have scores of their own, not one AP
        raise ConfigError(
            f"DATASETS.TEST ({cfg.DATASETS.TEST}): a comparison scores one dataset. Fix: add "
            "DATASETS.TEST \"('NAME',)\" with the name of one."
        )
    if not object_count_keys(cfg):
        raise ConfigError(
            f"--config-file ('{comparison.base.config_file}'): it detects no objects, so it has no AP."
        )
    return cfg


def _check_norm(
    comparison: Comparison,
    cfg: CfgNode,
    norm: str,
    suffix: str,
    warnings: dict[str, None],
) -> None:
    """Add what the checks of a norm find to the warnings, or raise the errors, named by norm and suffix."""
    weights = open_start_weights(cfg.MODEL.WEIGHTS)
    found = check_run(changed_config(cfg, norm_keys(norm)), weights)
    errors = [f"{norm}{suffix}: {text}" for text in found.errors]
    if comparison.base.ignore_preflight:
        warnings |= dict.fromkeys(errors)
    else:
        found.errors = errors
        found.raise_errors()
    warnings |= dict.fromkeys(found.warnings)


def read_labels_once(comparison: Comparison, cfg: CfgNode) -> Comparison:
    """Write labels that are not a COCO json to the comparison's folder, for all its runs."""
    if not any(source.labels.layout for source in sources_of(cfg).values()):
        return comparison
    scored = None
    if comparison.scored:
        scored = _write_labels(comparison, "scored")
    search = _write_labels(comparison, "search")  # the last images stay registered
    return replace(
        comparison, base=replace(comparison.base, data=search), scored=scored
    )


def _write_labels(comparison: Comparison, name: str) -> DatasetFlags:
    folder = comparison.folder / "labels" / name
    prepared = prepare(comparison.request(folder, {}, scored=name == "scored"))
    record_datasets(prepared.cfg, str(folder))
    return DatasetFlags(datasets=str(folder / DATASETS_FILE))


def _dataset_digests(name: str) -> dict[str, str]:
    """Return the folder and digests of a registered dataset; of its images, by size and time of change.

    To read the time takes some 10 us for an image, its pixels would take 10 ms.
    """
    annotations = hashlib.sha256()
    images = hashlib.sha256()
    for record in DatasetCatalog.get(name):
        text = json.dumps(record, sort_keys=True, default=str)
        annotations.update(text.encode())
        path = record["file_name"]
        if os.path.isfile(path):
            state = os.stat(path)
            images.update(f"{path} {state.st_size} {state.st_mtime_ns}".encode())
    return {
        "folder of the images": MetadataCatalog.get(name).get("image_root", ""),
        "annotations": annotations.hexdigest(),
        "image files (names, sizes, times)": images.hexdigest(),
    }
