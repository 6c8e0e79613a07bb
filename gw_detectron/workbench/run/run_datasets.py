"""Find the datasets of a run: flags, yaml or earlier record."""

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog

from ...errors import ConfigError, DataError, summarize_names
from ...modeling.build import object_count_keys
from ...weights.opening import local_file
from ..dataset.coco_content import MALFORMED, read_json
from ..dataset.datasets_yaml import DATASETS_FILE, CocoDatasets, read_datasets
from ..dataset.registration import register_datasets
from ..dataset.source import own_source
from .request import RunRequest

log = logging.getLogger(__name__)


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
        _check_unseen(named, request.data.val_fraction or 0.0, config_file)

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


def _configs_of_run(cfg: CfgNode, request: RunRequest) -> list[str]:
    """Return the configs beside which the resumed or evaluated run may have recorded its datasets."""
    if request.resume:
        return [os.path.join(cfg.OUTPUT_DIR, "config.yaml")]
    if not request.eval_only:
        return []
    configs = [request.config_file]
    weights = local_file(
        cfg.MODEL.WEIGHTS
    )  # of a run whose config was perhaps not given
    if weights:
        configs.append(os.path.join(os.path.dirname(weights), "config.yaml"))
    return list(dict.fromkeys(configs))


def _check_unseen(given: CocoDatasets, fraction: float, config_file: str) -> None:
    """Refuse a split whose validation has images that the run was trained on; warn of such a file."""
    record = Path(config_file).with_name(DATASETS_FILE)
    if not record.is_file():
        return
    trained = [
        data
        for data in read_datasets(str(record)).train.values()
        if not data.val_fraction
    ]
    files = {os.path.realpath(dataset.json) for dataset in trained}
    seen: set[str] = set()
    for dataset in trained:
        with contextlib.suppress(OSError, DataError, *MALFORMED):
            seen |= _image_paths(read_json(dataset.json), dataset.images)

    for name, dataset in given.val.items():
        source = own_source(name)
        if source is None or os.path.realpath(source.origin) in files:
            continue  # an evaluation of the training images is no accident
        try:
            common = seen & _image_paths(source.content, dataset.images)
        except (OSError, DataError, *MALFORMED):  # the checks name the fault
            continue
        if not common:
            continue
        images = summarize_names(sorted(map(os.path.basename, common)))
        reason = (
            f"'{config_file}' was trained on {len(common)} of the images ({images})"
        )
        if source.part:
            raise ConfigError(
                f"--val-fraction ({fraction:g}): {reason}. Fix: give the fraction of that run."
            )
        log.warning(
            "--val-json ('%s'): %s. Fix: give images that the run has not seen.",
            source.origin,
            reason,
        )


def _image_paths(content: Any, root: str) -> set[str]:
    return {
        os.path.realpath(os.path.join(root, i["file_name"])) for i in content["images"]
    }
