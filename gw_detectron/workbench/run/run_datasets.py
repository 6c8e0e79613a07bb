"""Find the datasets of a run: flags, yaml or earlier record."""

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog

from ...atomic import write_json
from ...errors import ConfigError, DataError, summarize_names
from ...modeling.build import object_count_keys
from ...weights.opening import local_file
from ..dataset.coco_content import MALFORMED, read_json
from ..dataset.datasets_yaml import DATASETS_FILE, CocoDatasets, read_datasets
from ..dataset.layouts import labels_digest
from ..dataset.registration import register_datasets
from ..dataset.source import own_source
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
    values |= _class_values(cfg, [*named.train, *named.val])
    for key, value in values.items():
        if not request.changes(key):
            cfg.merge_from_list([key, value])


def _class_values(cfg: CfgNode, names: list[str]) -> dict[str, Any]:
    """Return the config keys of the classes in the first readable dataset, and of the mask format."""
    keys = set(object_count_keys(cfg))
    values: dict[str, Any] = {}
    for name in names:
        source = own_source(name)
        if source is None:
            continue
        with contextlib.suppress(OSError, DataError):  # the checks report why
            data = source.fingerprint
            if data.classes and not keys.intersection(values):
                values |= dict.fromkeys(keys, len(data.classes))
            if data.masks["rle"]:
                # in which Detectron2 reads RLE, also for validation losses
                values["INPUT.MASK_FORMAT"] = "bitmask"
    return values


def use_recorded_datasets(
    cfg: CfgNode, config_file: str | os.PathLike[str], folder: str
) -> None:
    """Register datasets that are unknown from the ``datasets.yaml`` beside a config file."""
    record = Path(config_file).with_name(DATASETS_FILE)
    names = (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)
    # own datasets have the names of flags, which another run may have registered
    is_foreign = [name in DatasetCatalog and own_source(name) is None for name in names]
    if record.is_file() and not all(is_foreign):
        register_datasets(read_datasets(str(record)), folder)
        _note_changed_labels(record.with_name(_SOURCES))


def record_sources(cfg: CfgNode, folder: str) -> None:
    """Write the files that the user named for the datasets, with their SHA-256."""
    known = _read_sources(Path(cfg.OUTPUT_DIR, _SOURCES))
    output = os.path.abspath(cfg.OUTPUT_DIR)
    sources = {}
    for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST):
        source = own_source(name)
        if source is None or not os.path.exists(source.origin):
            continue
        is_derived = Path(source.origin).is_relative_to(output)
        if is_derived and name in known:  # a resumed or evaluated run
            sources[name] = known[name]
        else:
            digest = labels_digest(source.origin, source.dataset.images)
            sources[name] = [source.origin, digest]
    write_json(Path(folder, _SOURCES), sources)


def _note_changed_labels(record: Path) -> None:
    """Let the checks tell which labels are scored, if the user's files have changed since the run."""
    for name, (file, digest) in _read_sources(record).items():
        source = own_source(name)
        if source is None or not os.path.exists(file):
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
    with contextlib.suppress(OSError, ValueError):
        return json.loads(record.read_text())
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
        configs.append(os.path.join(os.path.dirname(weights), "config.yaml"))
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

    for name in given.val:
        source = own_source(name)
        if source is None or not source.part:
            continue
        common = trained & _image_names(source.content)
        if common:
            raise ConfigError(
                f"--val-fraction: '{config_file}' was trained on {len(common)} of the images for validation "
                f"({summarize_names(sorted(common))}). Fix: give the fraction of that run."
            )


def _image_names(content: Any) -> set[str]:
    return {image["file_name"] for image in content["images"]}
