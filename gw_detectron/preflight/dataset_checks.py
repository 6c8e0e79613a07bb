"""Check that the datasets of a run are complete and fit the model."""

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from ..data import read_json
from ..data.coco_files import COMPLETED, coco_of_records
from ..data.fingerprint import Fingerprint, read_fingerprint
from ..data.images import content_key, upright_size
from ..errors import DataError, PreflightReport, similar_names, summarize_names
from ..modeling.build import CLASS_COUNTS
from .annotation_checks import DatasetNeeds, check_coco
from .data_fit import check_fit, training_view

#: values of a dataset's metadata ``evaluator_type`` that are evaluated by the COCO rules
_COCO_EVALUATORS = ("coco", "coco_panoptic_seg")
#: architecture -> the ``evaluator_type`` that its predictions need, if they are not only boxes
_EVALUATORS = {"PanopticFPN": ("coco_panoptic_seg",), "SemanticSegmentor": ("coco_panoptic_seg", "sem_seg")}
_MOST_HEADERS = 1000  # a few seconds on a network disk


def check_datasets(
    cfg: CfgNode, report: PreflightReport, *, eval_only: bool, trained: Mapping[int, str] | None = None
) -> dict[str, Fingerprint]:
    """Check and return the datasets of training (unless ``eval_only``) and evaluation; require the same classes.

    ``trained`` has the classes that the checkpoint of a resumed run or an evaluation records.
    """
    key = "TEST" if eval_only else "TRAIN"
    if not cfg.DATASETS[key]:
        report.errors.append(f"DATASETS.{key} (empty): no dataset. Fix: name at least one.")
    polygons = cfg.MODEL.MASK_ON and cfg.INPUT.MASK_FORMAT == "polygon"
    if polygons and cfg.INPUT.CROP.ENABLED and not eval_only and importlib.util.find_spec("shapely") is None:
        report.errors.append(
            "INPUT.CROP.ENABLED (True): polygons are cropped by the package shapely, which is not installed. Fix: pip "
            "install shapely, or set INPUT.MASK_FORMAT bitmask."
        )
    data: dict[str, Fingerprint] = {}
    photos: dict[str, tuple[str, Any, str]] = {}
    roles = ((True, () if eval_only else cfg.DATASETS.TRAIN), (False, cfg.DATASETS.TEST))
    classes = {
        name: _check_dataset(name, report, _needs(cfg, training), data, photos)
        for training, names in roles
        for name in names
    }
    trains = not (eval_only or report.errors)  # anchors may be wrong
    learned = [name for name in cfg.DATASETS.TRAIN if trains and name in data and len(data[name].boxes)]
    report.notes += [f"dataset {name}: {data[name]}; {training_view(cfg, data[name])}" for name in learned]
    known = {name: names for name, names in classes.items() if names}
    if trained:
        known = {f"the checkpoint ({len(trained)} classes)": list(trained.values()), **known}
    first = next(iter(known), "")
    differing = {name: names for name, names in known.items() if names != known[first]}
    for name, names in differing.items():
        missing, added = set(known[first]) - set(names), set(names) - set(known[first])
        how = [
            f"{what} {summarize_names(sorted(which))}" for what, which in (("no", missing), ("also", added)) if which
        ]
        report.errors.append(
            f"DATASETS ('{name}'): other classes than {first}: {' and '.join(how) or 'another order'}. Fix: give it "
            "the same list of categories; a category may have no object."
        )
    if cfg.MODEL.KEYPOINT_ON:
        report.errors += _wrong_keypoint_names(cfg, [name for name in classes if name in DatasetCatalog])
    if not differing:
        report.errors += _wrong_classes(cfg, classes)
        report.warnings += [*_classes_without_objects(cfg, data), *check_fit(cfg, data, eval_only=eval_only)]
    return data


def _wrong_keypoint_names(cfg: CfgNode, datasets: Sequence[str]) -> Iterator[str]:
    """Yield an error for each dataset whose names of keypoints do not fit the model or its horizontal flips."""
    points, first = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS, None
    for name in datasets:
        given, flips = (MetadataCatalog.get(name).get(f"keypoint_{key}", None) for key in ("names", "flip_map"))
        if given is None or flips is None:
            if name in cfg.DATASETS.TRAIN:
                yield (
                    f"DATASETS.TRAIN ('{name}'): no keypoint_names or keypoint_flip_map, which flips of images need. "
                    "Fix: write the names into the categories of the json, as keypoints, or both keys into --datasets "
                    "FILE (docs/your_data.md); of a dataset registered in Python, set them in MetadataCatalog."
                )
            continue
        names, flipped = list(given), [each for pair in flips for each in pair]
        first = first or names
        wrong = [f"are {len(names)}, MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {points}"] * (len(names) != points)
        wrong += [f"have {each} twice" for each in names if names.count(each) > 1][:1]
        wrong += [f"differ from those of {datasets[0]}"] * (names != first)
        wrong += [f"lack {each} of keypoint_flip_map" for each in flipped if each not in names][:1]
        wrong += [f"exchange {each} twice in flips" for each in flipped if flipped.count(each) > 1][:1]
        if wrong:
            yield (
                f"keypoint_names ({summarize_names(map(str, names), 20)}) of {name}: {', '.join(wrong)}. Fix: give one "
                "name per keypoint, and each in at most one pair of keypoint_flip_map."
            )


def _classes_without_objects(cfg: CfgNode, data: Mapping[str, Fingerprint]) -> Iterator[str]:
    """Yield warnings of classes that are not trained, if all training data is known."""
    trained, tested = (
        [data[name] for name in names if name in data] for names in (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST)
    )
    if not trained or len(trained) < len(cfg.DATASETS.TRAIN):
        return
    names = np.array(trained[0].classes, str)
    untrained = np.sum([each.per_class for each in trained], axis=0) == 0
    scored = untrained & np.any([np.zeros_like(untrained), *(each.per_class > 0 for each in tested)], axis=0)
    for found, what, fix in (
        (scored, "occur in the evaluation only: their AP of 0 lowers the mean", "move some to the training"),
        (untrained & ~scored, "have no object: outputs that learn nothing", "remove them from the categories"),
    ):
        if found.any():
            listed = summarize_names(names[found])
            yield f"DATASETS: {found.sum()} of {len(names)} classes {what} ({listed}). Fix: {fix}."


def _needs(cfg: CfgNode, training: bool) -> DatasetNeeds:
    points = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS if cfg.MODEL.KEYPOINT_ON else 0
    run_lengths = not training or cfg.INPUT.MASK_FORMAT != "polygon"
    return DatasetNeeds(training, cfg.MODEL.MASK_ON, run_lengths, points, cfg.INPUT.PERCENTILES)


def wrong_evaluator(cfg: CfgNode, name: str) -> str:
    """Describe why a model's predictions cannot be evaluated on a dataset, or return ""."""
    architecture, kind = cfg.MODEL.META_ARCHITECTURE, MetadataCatalog.get(name).get("evaluator_type")
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
    architecture = cfg.MODEL.META_ARCHITECTURE
    for node, field in CLASS_COUNTS.get(architecture, {}).items():
        key, wanted = f"MODEL.{node}.NUM_CLASSES", cfg.MODEL[node].NUM_CLASSES
        for name, objects in datasets.items():
            semantic = field == "stuff_classes"
            found = MetadataCatalog.get(name).get(field) if semantic else objects
            if objects is not None and found is None:
                yield (
                    f"MODEL.META_ARCHITECTURE ('{architecture}'): dataset {name} has no semantic masks. Fix: give a "
                    "panoptic dataset, e.g. coco_2017_train_panoptic_separated."
                )
            elif found is not None and len(found) != wanted:
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
    try:
        if json_file is None:
            content = coco_of_records(DatasetCatalog.get(name), classes, evaluated=not needs.training)
        else:
            content = read_json(json_file)  # generates or downloads it if a handler does so
        if json_file is None and content is None:
            return classes
        errors, warnings = check_coco(content, needs)
        warnings += content.get(COMPLETED, [])
        data[name] = read_fingerprint([{"annotations": [], **content}])
    except FileNotFoundError:
        report.errors.append(f"{where}: file not found. {_place()}")
        return None
    except (DataError, OSError, ValueError) as error:  # ValueError: of a handler of addresses
        text = str(error).removeprefix(f"'{source}': ")
        report.errors.append(f"{where}: {text}" + ("" if "Fix: " in text else ". Fix: correct the file."))
        return None
    root = metadata.get("image_root", ".") or "."
    if "://" not in root:  # a header would cost a download
        missing = _missing_images(root, content["images"])
        found = ([], []) if missing else _image_faults(name, root, content["images"], needs.percentiles, photos)
        errors += [*missing, *found[0]]
        warnings += found[1]
    report.errors += [f"{where}: {error}" for error in errors]
    report.warnings += [f"{where}: {warning}" for warning in warnings]
    return classes if json_file is None else data[name].classes


def _place() -> str:
    folder = os.environ.get("DETECTRON2_DATASETS", "datasets")
    return f"Fix: put it there, or set DETECTRON2_DATASETS to the folder of the datasets (now '{folder}')."


def _missing_images(root: str, images: Sequence[dict]) -> list[str]:
    if not os.path.isdir(root):
        return [f"the folder of images '{root}' does not exist. {_place()}"]
    # one listing per folder, because network disks are slow at a query per file
    by_folder: dict[str, set[str]] = {}
    for image in images:
        folder, base = os.path.split(os.path.join(root, image["file_name"]))
        by_folder.setdefault(folder, set()).add(base)
    missing = [
        os.path.join(folder, base)
        for folder, wanted in by_folder.items()
        for base in wanted.difference(os.listdir(folder) if os.path.isdir(folder) else ())
    ]
    text = (
        f"{len(missing)} of {len(images)} images are missing: {summarize_names(sorted(missing), 3)}. Fix: put them "
        "there, remove them from the JSON file, or give the folder that file_name is relative to."
    )
    return [text] * bool(missing)


def _image_faults(
    name: str, root: str, images: Sequence[dict], percentiles: Sequence[float], photos: dict[str, tuple[str, Any, str]]
) -> tuple[list[str], list[str]]:
    """Return errors and warnings of images, by the headers of some of them.

    ``photos`` has dataset, id and file of images by their content, to find copies; those of this dataset are added.
    """
    checked = images[:: -(-len(images) // _MOST_HEADERS)]
    wrong, turned, copies = [], [], []
    for image in checked:
        path = os.path.join(root, image["file_name"])
        try:
            width, height, is_ambiguous = upright_size(path, percentiles)
        except DataError as error:
            wrong.append(str(error).partition(" Fix: ")[0])
            continue
        if (width, height) != (image["width"], image["height"]):
            wrong.append(f"'{image['file_name']}' is {width} x {height}")
        elif is_ambiguous:
            turned.append(image["file_name"])
        *first, file = photos.setdefault(content_key(path), (name, image["id"], image["file_name"]))
        if first != [name, image["id"]]:
            copies.append(f"{image['file_name']} is {file} of {first[0]}")
    texts = (
        f"cannot be read or have another width x height: {summarize_names(wrong, 3)}. Fix: correct the file; a photo "
        "with an EXIF orientation has the size of the upright photo.",
        f"are turned or mirrored by their EXIF orientation and keep their size ({summarize_names(turned, 3)}). Fix: "
        "check that their boxes are those of the upright photo.",
        f"are copies ({summarize_names(copies, 3)}). Fix: remove them; AP on images of the training is too high.",
    )
    errors, first, second = (
        [f"{len(files)} of {len(checked)} checked images {text}"] * bool(files)
        for files, text in zip((wrong, turned, copies), texts, strict=True)
    )
    return errors, first + second
