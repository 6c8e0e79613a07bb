"""Check that the datasets of a run are complete and fit the model."""

import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.detection_utils import create_keypoint_hflip_indices

from ...errors import DataError, PreflightReport, similar_names, summarize_names
from ...modeling.build import CLASS_COUNTS
from ..images import content_key, upright_size
from .annotation_checks import DatasetNeeds, Fault, check_coco, describe
from .coco_files import COMPLETED, coco_of_records, read_json
from .data_fit import check_fit
from .fingerprint import Fingerprint, read_fingerprint

#: values of a dataset's metadata ``evaluator_type`` that are evaluated by the COCO rules
_COCO_EVALUATORS = ("coco", "coco_panoptic_seg")
#: architecture -> the ``evaluator_type`` that its predictions need, if they are not only boxes
_EVALUATORS = {
    "PanopticFPN": ("coco_panoptic_seg",),
    "SemanticSegmentor": ("coco_panoptic_seg", "sem_seg"),
}
_MOST_HEADERS = 1000  # a few seconds on a network disk
_MISSING = Fault(
    "are missing",
    "put them there, or correct file_name, which is relative to the folder of images",
)
_UNREADABLE = Fault(
    "cannot be read or have another width x height",
    "correct them; the size is after EXIF rotation",
)
_COPIES = Fault("are copies", "remove them; AP on images of the training is too high", 1)


def check_datasets(
    cfg: CfgNode,
    report: PreflightReport,
    *,
    eval_only: bool,
    trained: Mapping[int, str] | None = None,
) -> dict[str, Fingerprint]:
    """Check and return the datasets of training (unless ``eval_only``) and evaluation; require the same classes.

    ``trained`` has the classes that the checkpoint of a resumed run or an evaluation records.
    """
    key = "TEST" if eval_only else "TRAIN"
    if not cfg.DATASETS[key]:
        report.errors.append(f"DATASETS.{key} (empty): no dataset. Fix: name at least one.")
    data: dict[str, Fingerprint] = {}
    photos: dict[str, tuple[str, Any, str]] = {}
    roles = ((True, () if eval_only else cfg.DATASETS.TRAIN), (False, cfg.DATASETS.TEST))
    classes = {
        name: _check_dataset(name, report, _needs(cfg, training, eval_only), data, photos)
        for training, names in roles
        for name in names
    }
    known = {name: names for name, names in classes.items() if names}
    if trained:
        known = {f"the checkpoint ({len(trained)} classes)": list(trained.values()), **known}
    first = next(iter(known), "")
    differing = {name: names for name, names in known.items() if names != known[first]}
    for name, names in differing.items():
        missing, added = set(known[first]) - set(names), set(names) - set(known[first])
        how = [
            f"{what} {summarize_names(sorted(which))}"
            for what, which in (("no", missing), ("also", added))
            if which
        ]
        report.errors.append(
            f"DATASETS ('{name}'): other classes than {first}: {' and '.join(how) or 'another order'}. Fix: give it "
            "the same list of categories; a category may have no object."
        )
    if cfg.MODEL.KEYPOINT_ON:
        report.errors += _wrong_keypoint_names(
            cfg, [name for name in classes if name in DatasetCatalog]
        )
    if not differing:
        report.errors += _wrong_classes(cfg, classes)
        report.warnings += [
            *_classes_without_objects(cfg, data),
            *check_fit(cfg, data, eval_only=eval_only),
        ]
    return data


def _wrong_keypoint_names(cfg: CfgNode, datasets: Sequence[str]) -> Iterator[str]:
    """Yield an error for each dataset whose names of keypoints do not fit the model or its horizontal flips."""
    points, first = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS, None
    for name in datasets:
        names = list(MetadataCatalog.get(name).get("keypoint_names", None) or ())
        try:
            order = create_keypoint_hflip_indices(name)
        except AttributeError:  # no names or pairs
            if name not in cfg.DATASETS.TRAIN:
                continue
            order = []
        except ValueError:  # a pair with another name
            order = []
        first = first or names
        flipped = {
            each
            for pair in MetadataCatalog.get(name).get("keypoint_flip_map", None) or ()
            for each in pair
        }
        if (
            names != first
            or flipped - {*names}
            or [order[index] for index in order] != list(range(points))
        ):
            yield (
                f"keypoint_names of {name} ({summarize_names(map(str, names), 20)}): not one name for each of {points} "
                "keypoints (MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS), in at most one pair of keypoint_flip_map, the same "
                "in all datasets. Fix: write them into the categories of the json, as keypoints, or both keys into "
                "--datasets FILE (docs/your_data.md); of a dataset registered in Python, set them in MetadataCatalog."
            )


def _classes_without_objects(cfg: CfgNode, data: Mapping[str, Fingerprint]) -> Iterator[str]:
    """Yield warnings of classes that are not trained, if all training data is known."""
    trained, tested = (
        [data[name] for name in names if name in data]
        for names in (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST)
    )
    if not trained or len(trained) < len(cfg.DATASETS.TRAIN):
        return
    names = np.array(trained[0].classes, str)
    untrained = np.sum([each.per_class for each in trained], axis=0) == 0
    scored = untrained & np.any(
        [np.zeros_like(untrained), *(each.per_class > 0 for each in tested)], axis=0
    )
    for found, what, fix in (
        (
            scored,
            "occur only in the evaluation: their AP of 0 lowers the mean",
            "move some to the training",
        ),
        (
            untrained & ~scored,
            "have no object: outputs that learn nothing",
            "remove them from the categories",
        ),
    ):
        if found.any():
            listed = summarize_names(names[found])
            yield f"DATASETS: {found.sum()} of {len(names)} classes {what} ({listed}). Fix: {fix}."


def _needs(cfg: CfgNode, training: bool, eval_only: bool) -> DatasetNeeds:
    points = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS if cfg.MODEL.KEYPOINT_ON else 0
    has_losses = training or (
        cfg.TEST.LOSS and cfg.TEST.EVAL_PERIOD > 0 and not eval_only
    )  # they read masks alike
    run_lengths = not has_losses or cfg.INPUT.MASK_FORMAT != "polygon"
    return DatasetNeeds(training, cfg.MODEL.MASK_ON, run_lengths, points, cfg.INPUT.PERCENTILES)


def wrong_evaluator(cfg: CfgNode, name: str) -> str:
    """Describe why a model's predictions cannot be evaluated on a dataset, or return ""."""
    architecture, kind = (
        cfg.MODEL.META_ARCHITECTURE,
        MetadataCatalog.get(name).get("evaluator_type"),
    )
    allowed = _EVALUATORS.get(architecture, _COCO_EVALUATORS)
    if kind in allowed:
        return ""
    fix = "give a panoptic dataset, e.g. coco_2017_val_panoptic_separated"
    if allowed is _COCO_EVALUATORS:
        fix = f'if it has COCO annotations, set MetadataCatalog.get("{name}").evaluator_type = "coco"'
    return (
        f"DATASETS.TEST ('{name}'): evaluator_type {kind!r} is not one of {list(allowed)}. Fix: {fix}, else override "
        "build_evaluator."
    )


def _wrong_classes(cfg: CfgNode, datasets: Mapping[str, Sequence[str] | None]) -> Iterator[str]:
    """Yield an error for each dataset that lacks the classes of the config's heads."""
    for node, field in CLASS_COUNTS.get(cfg.MODEL.META_ARCHITECTURE, {}).items():
        key, wanted = f"MODEL.{node}.NUM_CLASSES", cfg.MODEL[node].NUM_CLASSES
        for name, objects in datasets.items():
            found = (
                MetadataCatalog.get(name).get(field) if field == "stuff_classes" else objects
            )
            if found is not None and len(found) != wanted:
                yield f"{key} ({wanted}): dataset {name} has {len(found)} classes. Fix: set {key} {len(found)}."


def _check_dataset(
    name: str,
    report: PreflightReport,
    needs: DatasetNeeds,
    data: dict[str, Fingerprint],
    photos: dict[str, tuple[str, Any, str]],
) -> list[str] | None:
    """Check the files of a dataset; add its numbers to ``data``; return its classes by id, None if unknown."""
    if name not in DatasetCatalog:
        report.errors.append(
            f"DATASETS ('{name}'): unknown dataset.{similar_names(name, DatasetCatalog)} Fix: correct the name, or "
            "register it: give --train-json and --train-images, or --datasets FILE (docs/your_data.md)."
        )
        return None
    metadata = MetadataCatalog.get(name)
    json_file, classes = metadata.get("json_file"), metadata.get("thing_classes")
    classes = classes and list(classes)
    source = metadata.get("source", json_file or "a Python function")
    where = f"Dataset '{name}' ('{source}')"
    evaluator = metadata.get("evaluator_type", "coco")
    if evaluator == "lvis":  # its files name images by address
        return classes
    evaluated = not needs.training and evaluator != "sem_seg"
    try:
        if json_file is not None:
            content = read_json(json_file)  # generates or downloads it if a handler does so
        elif (
            content := coco_of_records(DatasetCatalog.get(name), classes, evaluated=evaluated)
        ) is None:
            return classes
        errors, warnings = check_coco(content, needs)
        warnings += content.get(COMPLETED, [])
        data[name] = read_fingerprint([{"annotations": [], **content}])
    except FileNotFoundError:
        report.errors.append(f"{where}: file not found. {_place()}")
        return None
    except (DataError, OSError, ValueError) as error:  # ValueError: of a handler of addresses
        text = str(error).removeprefix(f"'{source}': ")
        report.errors.append(
            f"{where}: {text}" + ("" if "Fix: " in text else ". Fix: correct the file.")
        )
        return None
    root = (
        json_file and metadata.get("image_root")
    ) or "."  # the names of a function's records are paths
    if "://" not in root:  # a header would cost a download
        found = _check_images(name, root, content["images"], needs.percentiles, photos)
        errors, warnings = errors + found[0], warnings + found[1]
    report.errors += [f"{where}: {error}" for error in errors]
    report.warnings += [f"{where}: {warning}" for warning in warnings]
    return classes if json_file is None else data[name].classes


def _place() -> str:
    folder = os.environ.get("DETECTRON2_DATASETS", "datasets")
    return f"Fix: put it there, or set DETECTRON2_DATASETS to the folder of the datasets (now '{folder}')."


def _check_images(
    name: str,
    root: str,
    images: Sequence[dict],
    percentiles: Sequence[float],
    photos: dict[str, tuple[str, Any, str]],
) -> tuple[list[str], list[str]]:
    """Return errors and warnings of images: whether all exist, and what the headers of some of them say.

    ``photos`` has dataset, id and file of images by their content, to find copies; images of this dataset are added.
    """
    if not os.path.isdir(root):
        return [f"the folder of images '{root}' does not exist. {_place()}"], []
    # one listing per folder, because network disks are slow at a query per file
    files = functools.cache(
        lambda folder: set(os.listdir(folder)) if os.path.isdir(folder) else set()
    )
    paths = {os.path.join(root, image["file_name"]) for image in images}
    if missing := sorted(
        path for path in paths if os.path.basename(path) not in files(os.path.dirname(path))
    ):
        return describe({_MISSING: missing}, len(images), "images")
    checked = images[:: -(-len(images) // _MOST_HEADERS)]
    found: dict[Fault, list[str]] = {_UNREADABLE: [], _COPIES: []}
    for image in checked:
        path = os.path.join(root, image["file_name"])
        try:
            width, height = upright_size(path, percentiles)
        except DataError as error:
            found[_UNREADABLE].append(str(error).partition(" Fix: ")[0])
            continue
        if (width, height) != (image["width"], image["height"]):
            found[_UNREADABLE].append(f"'{image['file_name']}' is {width} x {height}")
        *first, file = photos.setdefault(
            content_key(path), (name, image["id"], image["file_name"])
        )
        if first != [name, image["id"]]:
            found[_COPIES].append(f"{image['file_name']} is {file} of {first[0]}")
    return describe(found, len(checked), "checked images")
