"""Find the datasets of a run: flags, yaml or earlier record."""

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode

from ...atomic import write_json
from ...errors import ConfigError, DataError, summarize_names
from ...weights.opening import config_beside, local_file
from ..dataset.coco_content import MALFORMED, read_json
from ..dataset.datasets_yaml import DATASETS_FILE, CocoDatasets, read_datasets
from ..dataset.layouts import labels_digest
from ..dataset.recipe import class_values
from ..dataset.registration import register_datasets
from ..dataset.source import is_foreign, own_sources, sources_of
from .request import RunRequest

log = logging.getLogger(__name__)

# beside datasets.yaml: the files that the user named, and their digests
_SOURCES = "sources.json"


def use_datasets(cfg: CfgNode, request: RunRequest) -> None:
    """Open and register the datasets of a request; set ``DATASETS`` and what follows from them.

    These are the class count and, for RLE, ``INPUT.MASK_FORMAT``. Keys that the command line sets keep their values.
    Without flags, unknown names are registered from the ``datasets.yaml`` beside the config file. No split may put
    images that the run was trained on into the validation. The config is not frozen.
    """
    folder = cfg.OUTPUT_DIR
    if request.eval_only:
        folder = os.path.join(folder, "inference")
    given = request.data.read()
    if given is None:
        use_recorded_datasets(cfg, request.config_file, folder)
        return

    if not (given.train or request.eval_only or request.changes("DATASETS.TRAIN")):
        by_yaml = request.data.datasets is not None
        flag, missing = (
            ("--datasets", "train") if by_yaml else ("--val-json", "--train-json")
        )
        raise ConfigError(
            f"{flag}: no dataset to train on. Fix: give {missing}; to train on the datasets of the config, add "
            f'DATASETS.TRAIN "{cfg.DATASETS.TRAIN}"; to evaluate, use gw-detectron eval.'
        )
    named = register_datasets(given, folder)
    for config_file in _configs_of_run(cfg, request):
        _check_unseen(named, config_file)

    values: dict[str, Any] = {"DATASETS.TEST": tuple(named.val)}
    if named.train:
        values["DATASETS.TRAIN"] = tuple(named.train)
    sources = own_sources([*named.train, *named.val])
    # the first dataset decides
    for source in reversed(sources.values()):
        with contextlib.suppress(OSError, DataError):  # the checks report why
            values |= class_values(cfg, source.fingerprint)
    for key, value in values.items():
        if not request.changes(key):
            cfg.merge_from_list([key, value])


def use_recorded_datasets(
    cfg: CfgNode, config_file: str | os.PathLike[str], folder: str
) -> None:
    """Register datasets that are unknown from the ``datasets.yaml`` beside a config file."""
    record = Path(config_file).with_name(DATASETS_FILE)
    names = (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)
    # own datasets have the names of flags, which another run may have registered
    if record.is_file() and not all(map(is_foreign, names)):
        register_datasets(read_datasets(str(record)), folder)
        _note_changed_labels(record.with_name(_SOURCES))


def record_sources(cfg: CfgNode, folder: str) -> None:
    """Write the files that the user named for the datasets, with their SHA-256."""
    known = _read_sources(Path(cfg.OUTPUT_DIR, _SOURCES))
    output = os.path.abspath(cfg.OUTPUT_DIR)
    sources = {}
    for name, source in sources_of(cfg).items():
        file = source.labels.path
        if not os.path.exists(file):
            continue
        is_derived = Path(file).is_relative_to(output)
        if is_derived and name in known:  # a resumed or evaluated run
            sources[name] = known[name]
        else:
            digest = labels_digest(file, source.dataset.images)
            sources[name] = [file, digest]
    write_json(Path(folder, _SOURCES), sources)


def _note_changed_labels(record: Path) -> None:
    """Let the checks tell which labels are scored, if the user's files have changed since the run."""
    recorded = _read_sources(record)
    for name, source in own_sources(recorded).items():
        file, digest = recorded[name]
        if not os.path.exists(file):
            continue
        if labels_digest(file, source.dataset.images) == digest:
            continue
        if source.dataset.json == file:
            labels = "and the scores of the training are by the earlier labels"
        else:
            labels = (
                f"but its labels of then ('{source.dataset.json}') are used. Fix: for the new ones, "
                "give the flags of the data again"
            )
        source.notes.append(f"'{file}' has changed since the run, {labels}.")


def _read_sources(record: Path) -> dict[str, list[str]]:
    """Return file and digest by the name of a dataset; {} of a record that is missing or of another form."""
    with contextlib.suppress(OSError, RecursionError, *MALFORMED):
        sources = json.loads(record.read_text())
        return {
            name: [str(file), str(digest)] for name, (file, digest) in sources.items()
        }
    return {}


def _configs_of_run(cfg: CfgNode, request: RunRequest) -> list[str]:
    """Return the configs beside which the resumed or evaluated run may have recorded its datasets."""
    if request.resume:
        return [os.path.join(cfg.OUTPUT_DIR, "config.yaml")]
    if not request.eval_only:
        return []
    configs = [request.config_file]
    # of a run whose config was perhaps not given
    weights = local_file(cfg.MODEL.WEIGHTS)
    if weights:
        configs.append(config_beside(weights))
    return list(dict.fromkeys(configs))


def _check_unseen(given: CocoDatasets, config_file: str) -> None:
    """Refuse a split whose validation has images that the run was trained on."""
    record = Path(config_file).with_name(DATASETS_FILE)
    if not record.is_file():
        return
    trained: set[str] = set()
    for dataset in read_datasets(str(record)).train.values():
        if dataset.val_fraction:  # of a user's yaml, which is split anew
            continue
        with contextlib.suppress(OSError, DataError, *MALFORMED):
            trained |= _image_names(read_json(dataset.json))

    for source in own_sources(given.val).values():
        if not source.part:
            continue
        common = trained & _image_names(source.content)
        if common:
            raise ConfigError(
                f"--val-fraction: '{config_file}' was trained on {len(common)} of the images for validation "
                f"({summarize_names(sorted(common))}). Fix: give the fraction of that run."
            )


def _image_names(content: Any) -> set[str]:
    return {image["file_name"] for image in content["images"]}
