"""Check that the datasets of a run are complete and fit."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.file_io import PathManager

from ..errors import DataError, similar_names, summarize_names
from .coco_checks import Use, check_coco
from .findings import Findings

#: values of a dataset's metadata ``evaluator_type`` that are evaluated by the COCO rules
_COCO_EVALUATORS = ("coco", "coco_panoptic_seg")
#: architecture -> the ``evaluator_type`` that its predictions need, if they are not boxes alone
_EVALUATORS = {
    "PanopticFPN": ("coco_panoptic_seg",),
    "SemanticSegmentor": ("coco_panoptic_seg", "sem_seg"),
}
#: architecture -> node of MODEL that counts the classes, and their names in a dataset's metadata
_NUM_CLASSES = {
    "RetinaNet": {"RETINANET": "thing_classes"},
    "GWRetinaNet": {"RETINANET": "thing_classes"},
    "GeneralizedRCNN": {"ROI_HEADS": "thing_classes"},
    "PanopticFPN": {"ROI_HEADS": "thing_classes", "SEM_SEG_HEAD": "stuff_classes"},
    "SemanticSegmentor": {"SEM_SEG_HEAD": "stuff_classes"},
}


def check_datasets(cfg: CfgNode, findings: Findings, *, eval_only: bool) -> None:
    """Check the datasets of training (unless ``eval_only``) and evaluation."""
    needed = "DATASETS.TEST" if eval_only else "DATASETS.TRAIN"
    if not (cfg.DATASETS.TEST if eval_only else cfg.DATASETS.TRAIN):
        findings.problems.append(f"{needed} (empty): no dataset. Fix: name at least one.")
    classes: dict[str, Sequence[str] | None] = {}
    for name in () if eval_only else cfg.DATASETS.TRAIN:
        classes[name] = _check_dataset(name, findings, Use.in_training(cfg))
    for name in cfg.DATASETS.TEST:
        tested = _check_dataset(name, findings, Use.in_evaluation(cfg))
        classes[name] = classes.get(name) or tested
    findings.problems += _wrong_classes(cfg, classes)
    trained = {} if eval_only else {tuple(classes[name] or ()): name for name in cfg.DATASETS.TRAIN}
    if len(trained) > 1:
        first, other = list(trained.values())[:2]
        findings.problems.append(
            f"DATASETS.TRAIN: {first} and {other} have different classes. Fix: give all the same categories."
        )
    for name in cfg.DATASETS.TEST:
        if classes[name] is not None and (problem := wrong_evaluator(cfg, name)):
            findings.problems.append(problem)


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
    """Yield an error for each dataset that lacks the classes of the config's heads.

    Args:
        cfg: the config.
        datasets: the classes of objects by dataset; None where they are unknown.
    """
    architecture = cfg.MODEL.META_ARCHITECTURE
    for node, field in _NUM_CLASSES.get(architecture, {}).items():
        key, wanted = f"MODEL.{node}.NUM_CLASSES", cfg.MODEL[node].NUM_CLASSES
        for name, objects in datasets.items():
            metadata = MetadataCatalog.get(name)
            semantic, folder = field == "stuff_classes", metadata.get("sem_seg_root")
            found = metadata.get(field) if semantic else objects
            if objects is not None and semantic and found is None:
                yield (
                    f"MODEL.META_ARCHITECTURE ('{architecture}'): dataset {name} has no semantic masks. Fix: give a "
                    "panoptic dataset, e.g. coco_2017_train_panoptic_separated."
                )
            elif found is not None and len(found) != wanted:
                yield f"{key} ({wanted}): dataset {name} has {len(found)} classes. Fix: set {key} {len(found)}."
            elif semantic and folder and not os.path.isdir(folder):
                yield f"Dataset '{name}': {_missing(folder)}"


def _check_dataset(name: str, findings: Findings, use: Use) -> Sequence[str] | None:
    """Check the files of a dataset.

    Args:
        name: the name in Detectron2's ``DatasetCatalog``.
        findings: problems and warnings are added; each names file, field and record.
        use: requirements of the run.

    Returns:
        The class names in the order of their ids, or None if they are unknown.
    """
    if name not in DatasetCatalog:
        findings.problems.append(
            f"DATASETS ('{name}'): unknown dataset.{similar_names(name, DatasetCatalog)} Fix: correct the name, or "
            "register it first (detectron2.data.datasets.register_coco_instances)."
        )
        return None
    metadata = MetadataCatalog.get(name)
    json_file = metadata.get("json_file")
    if json_file is None:  # registered as a Python function
        return metadata.get("thing_classes")
    where = f"Dataset '{name}': '{json_file}'"
    try:
        path = PathManager.get_local_path(json_file)  # generates or downloads it if a handler does so
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        warnings = check_coco(content, use)
        problem = ""
    except FileNotFoundError:
        problem = f"Dataset '{name}': {_missing(json_file)}"
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = f"{where}: invalid JSON: {error}. Fix: give a JSON file in UTF-8, not compressed."
    except DataError as error:
        problem = f"{where}: {error}. Fix: correct the file."
    except (OSError, ValueError) as error:  # ValueError: e.g. a number of thousands of digits
        problem = f"{where}: cannot be read: {error}. Fix: put a correct annotation file there."
    if problem:
        findings.problems.append(problem)
        return None
    findings.warnings += [f"{where}: {warning}" for warning in warnings]
    names = [category["name"] for category in sorted(content["categories"], key=lambda category: category["id"])]
    if (registered := metadata.get("thing_classes")) is not None and list(registered) != names:
        findings.problems.append(
            f"{where}: its categories differ from thing_classes of the MetadataCatalog, {summarize_names(registered)}. "
            "Fix: register the file under another name, or do not set thing_classes."
        )
    if use.keypoints and use.training and not ({"keypoint_names", "keypoint_flip_map"} <= metadata.as_dict().keys()):
        findings.problems.append(
            f"MODEL.KEYPOINT_ON (True): dataset {name} has no names of keypoints. Fix: set keypoint_names and "
            f'keypoint_flip_map of MetadataCatalog.get("{name}"), or set MODEL.KEYPOINT_ON False.'
        )
    image_root = metadata.get("image_root")
    if image_root is not None and (missing := _missing_images(image_root, content["images"])):
        findings.problems.append(f"Dataset '{name}': {missing}")
    return names


def _missing(path: str) -> str:
    """Describe a missing path by its outermost missing part."""
    gone = Path(path)
    while not gone.parent.exists():
        gone = gone.parent
    reason = f"'{gone}' does not exist" + ("." if str(gone) == str(path) else f", so '{path}' is missing.")
    variable = os.environ.get("DETECTRON2_DATASETS")
    if Path(path).is_absolute() and not variable:
        return f"{reason} Fix: put it there, or register the dataset with another path."
    now = f"'{variable}'" if variable else "not set, which means 'datasets'"
    return f"{reason} Fix: set the environment variable DETECTRON2_DATASETS to the folder of the datasets (now {now})."


def _missing_images(image_root: str, images: Sequence[dict]) -> str:
    """Describe missing image files, or return ""."""
    root = PathManager.get_local_path(image_root) if "://" in image_root else image_root
    if not os.path.isdir(root):
        return _missing(root)
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
    if not missing:
        return ""
    return (
        f"{len(missing)} of {len(images)} images are missing, e.g. '{min(missing)}'. Fix: download them, or remove "
        "them from the JSON file."
    )
