"""Find the datasets of a run: flags, yaml or earlier record."""

import argparse
import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode

from ...errors import ConfigError, DataError, summarize_names
from ...modeling.build import object_count_keys
from ...weights.opening import local_file
from ..dataset.coco_files import read_json, split_coco
from ..dataset.datasets_yaml import DATASETS_FILE, check_fraction, existing_path, read_datasets
from ..dataset.fingerprint import read_fingerprint
from ..dataset.source import CocoDataset, CocoDatasets, needs_registration, register_datasets

log = logging.getLogger(__name__)

_FLAGS = ("train_json", "train_images", "val_json", "val_images", "val_fraction", "dataset")


def use_datasets(cfg: CfgNode, args: argparse.Namespace, folder: str) -> None:
    """Register the datasets of the flags; set ``DATASETS``, the class count and, for RLE, ``INPUT.MASK_FORMAT``.

    Keys that the command line sets keep their values. Without flags, unknown names are registered from the
    ``datasets.yaml`` beside the config file. No split may put images that the run was trained on into the validation.
    The parts of a split dataset are written to ``folder``. The config is not frozen.
    """
    given = _from_flags(args)
    found = given or _recorded(cfg, args.config_file)
    if found is None:
        return
    explicit = args.opts or []  # not every second word: argparse keeps a first "--"
    if not (found.train or given is None or args.eval_only or "DATASETS.TRAIN" in explicit):
        flag, missing = (
            ("--datasets", "train")
            if args.datasets is not None
            else ("--val-json", "--train-json")
        )
        raise ConfigError(
            f"{flag}: no dataset to train on. Fix: give {missing}; to train on the datasets of the config, add "
            f'DATASETS.TRAIN "{cfg.DATASETS.TRAIN}"; to evaluate, add --eval-only.'
        )
    if given:
        for config_file in _configs_of_run(cfg, args):
            _check_same_split(given, config_file)
    named = register_datasets(found, folder)
    if given is None:
        return
    values: dict[str, object] = {"DATASETS.TEST": tuple(named.val)}
    if named.train:
        values["DATASETS.TRAIN"] = tuple(named.train)
    for dataset in (*named.train.values(), *named.val.values()):
        with contextlib.suppress(OSError, DataError):  # preflight reports why
            data = read_fingerprint([read_json(dataset.json)])
            if data.classes:  # of the first file that can be read
                values = dict.fromkeys(object_count_keys(cfg), len(data.classes)) | values
            if data.masks["rle"]:
                values["INPUT.MASK_FORMAT"] = (
                    "bitmask"  # in which Detectron2 reads RLE, also for validation losses
                )
    cfg.merge_from_list(
        [word for key, value in values.items() if key not in explicit for word in (key, value)]
    )


def use_recorded_datasets(
    cfg: CfgNode, config_file: str | os.PathLike[str], folder: str
) -> None:
    """Register datasets that are unknown from the ``datasets.yaml`` beside a config file."""
    if recorded := _recorded(cfg, config_file):
        register_datasets(recorded, folder)


def _recorded(cfg: CfgNode, config_file: str | os.PathLike[str]) -> CocoDatasets | None:
    record = Path(config_file).with_name(DATASETS_FILE)
    if needs_registration((*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)) and record.is_file():
        return read_datasets(str(record))
    return None


def _from_flags(args: argparse.Namespace) -> CocoDatasets | None:
    """Return the datasets that the flags name, or None without such flags."""
    given = [
        f"--{name.replace('_', '-')}" for name in _FLAGS if getattr(args, name) is not None
    ]
    if args.datasets is not None:
        if given:
            raise ConfigError(
                f"--datasets: given together with {', '.join(given)}. Fix: give one of the two."
            )
        return read_datasets(args.datasets)
    if not given:
        return None
    if args.train_json is None and (args.val_json is None or args.val_fraction is not None):
        raise ConfigError(f"{given[0]}: needs --train-json.")
    if args.train_json is not None and (args.val_json is None) == (args.val_fraction is None):
        raise ConfigError(
            "--train-json: needs either --val-json or --val-fraction, e.g. 0.1 for a tenth of the images"
        )
    if args.val_fraction is None:
        return CocoDatasets(_dataset(args, "train"), _dataset(args, "val"))
    check_fraction(args.val_fraction, "--val-fraction")
    return CocoDatasets(_dataset(args, "train", args.val_fraction))


def _dataset(
    args: argparse.Namespace, side: str, val_fraction: float = 0.0
) -> dict[str, CocoDataset]:
    annotations, images = getattr(args, f"{side}_json"), getattr(args, f"{side}_images")
    if (annotations is None) != (images is None):
        missing = "json" if annotations is None else "images"
        raise ConfigError(
            f"--{side}-{missing}: not given. Fix: give --{side}-json and --{side}-images together."
        )
    if annotations is None:
        return {}
    dataset = CocoDataset(
        existing_path(annotations, f"--{side}-json", os.path.isfile),
        existing_path(images, f"--{side}-images", os.path.isdir),
        val_fraction,
    )
    return {f"{'custom' if args.dataset is None else args.dataset}_{side}": dataset}


def _configs_of_run(cfg: CfgNode, args: argparse.Namespace) -> list[str]:
    """Return the configs beside which the run that is resumed or evaluated may have recorded its datasets."""
    if args.resume:
        return [os.path.join(cfg.OUTPUT_DIR, "config.yaml")]
    if not args.eval_only:
        return []
    weights = local_file(cfg.MODEL.WEIGHTS)  # of a run whose config was perhaps not given
    beside = [os.path.join(os.path.dirname(weights), "config.yaml")] if weights else []
    return list(dict.fromkeys([args.config_file, *filter(os.path.isfile, beside)]))


def _check_same_split(given: CocoDatasets, config_file: str) -> None:
    """Refuse a split that validates on images that the run was trained on; a file with such images gets a warning."""
    record = Path(config_file).with_name(DATASETS_FILE)
    recorded = read_datasets(str(record)).train if record.is_file() else {}
    trained = {
        name: each for name, each in recorded.items() if not each.val_fraction
    }  # else no record of a run
    roots = {
        given.train[name].images: trained[name].images
        for name in trained.keys() & given.train.keys()
    }
    files = {
        os.path.realpath(each.json) for each in trained.values()
    }  # DATASETS.TEST custom_train is no accident

    def images(dataset: CocoDataset, content: Any) -> set[str]:
        root = roots.get(dataset.images, dataset.images)  # moved since
        return {
            os.path.realpath(os.path.join(root, image["file_name"]))
            for image in content["images"]
        }

    for dataset in (*given.train.values(), *given.val.values()):
        fraction = dataset.val_fraction
        what, fix = f"--val-json ('{dataset.json}')", "give images that the run has not seen"
        try:
            if fraction:
                what, fix = f"--val-fraction ({fraction:g})", "give that run's fraction"
                train, val = (
                    images(dataset, part)
                    for part in split_coco(read_json(dataset.json), fraction)
                )
            elif dataset in given.val.values() and os.path.realpath(dataset.json) not in files:
                train, val = set(), images(dataset, read_json(dataset.json))
            else:
                continue
            # read_json would derive the earlier files anew
            before = [
                images(each, json.loads(Path(each.json).read_bytes()))
                for each in trained.values()
            ]
        except (OSError, ValueError, LookupError, TypeError):  # preflight names the fault
            continue
        if moved := set().union(*before) & val - train:
            names = summarize_names(sorted(map(os.path.basename, moved)))
            text = f"{what}: '{config_file}' was trained on {len(moved)} of the images ({names}). Fix: {fix}."
            if fraction:
                raise ConfigError(text)
            log.warning("%s", text)
