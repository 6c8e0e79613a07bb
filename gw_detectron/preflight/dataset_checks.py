"""Check that the datasets of a run are complete and fit."""

import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.file_io import PathManager

from ..data import read_json
from ..data.images import upright_size
from ..errors import DataError, similar_names, summarize_names
from ..modeling.class_counts import CLASS_COUNTS
from .coco_checks import Use, check_coco
from .findings import Findings

#: values of a dataset's metadata ``evaluator_type`` that are evaluated by the COCO rules
_COCO_EVALUATORS = ("coco", "coco_panoptic_seg")
#: architecture -> the ``evaluator_type`` that its predictions need, if they are not boxes alone
_EVALUATORS = {
    "PanopticFPN": ("coco_panoptic_seg",),
    "SemanticSegmentor": ("coco_panoptic_seg", "sem_seg"),
}


#: difference between the name of a file and the one in the json -> function that removes it
_SPELLINGS: dict[str, Callable[[str], str]] = {
    "their umlauts or accents in another Unicode form (NFC, NFD)": partial(unicodedata.normalize, "NFC"),
    "other capital letters, such as .JPG instead of .jpg": str.lower,
}
_MOST_HEADERS = 1000  # a few seconds on a network disk
_PARTS = {"train": "training", "val": "validation"}  # of a split file


class _Dataset(NamedTuple):
    """Classes and images of a dataset; none if it cannot be read.

    Args:
        classes: names of the objects' classes in the order of their ids, or None if they are unknown.
        images: paths of the images.
    """

    classes: Sequence[str] | None = None
    images: Sequence[str] = ()


def check_datasets(cfg: CfgNode, findings: Findings, *, eval_only: bool) -> None:
    """Check the datasets of training (unless ``eval_only``) and evaluation."""
    needed = "DATASETS.TEST" if eval_only else "DATASETS.TRAIN"
    if not (cfg.DATASETS.TEST if eval_only else cfg.DATASETS.TRAIN):
        findings.problems.append(f"{needed} (empty): no dataset. Fix: name at least one.")
    trained = {n: _check_dataset(n, findings, Use.in_training(cfg)) for n in cfg.DATASETS.TRAIN if not eval_only}
    tested = {n: _check_dataset(n, findings, Use.in_evaluation(cfg)) for n in cfg.DATASETS.TEST}
    classes = {name: found.classes for name, found in {**tested, **trained}.items()}
    findings.problems += _wrong_classes(cfg, classes)
    if not eval_only:
        findings.problems += _different_classes(trained, tested)
        findings.warnings += _common_images(trained, tested)
        images = sum(len(found.images) for found in trained.values())
        if all(found.images for found in trained.values()) and images < cfg.SOLVER.IMS_PER_BATCH:
            findings.warnings.append(
                f"SOLVER.IMS_PER_BATCH ({cfg.SOLVER.IMS_PER_BATCH}): a batch repeats images, because DATASETS.TRAIN "
                f"has {images}. Fix: set it to {images} or lower, and SOLVER.BASE_LR lower by the same factor."
            )
    for name in cfg.DATASETS.TEST:
        if classes[name] is not None and (problem := wrong_evaluator(cfg, name)):
            findings.problems.append(problem)


def _different_classes(trained: Mapping[str, _Dataset], tested: Mapping[str, _Dataset]) -> Iterator[str]:
    """Yield an error for each dataset whose classes differ from the first.

    Another number of classes in evaluation is left to :func:`_wrong_classes`.
    """
    datasets = (*trained.items(), *tested.items())
    known = [(name, list(found.classes)) for name, found in datasets if found.classes]
    first, wanted = known[0] if known else ("", [])
    for name, found in known:
        if found != wanted and (name in trained or len(found) == len(wanted)):
            yield (
                f"DATASETS: {first} and {name} have different classes: {summarize_names(wanted)}; "
                f"{summarize_names(found)}. Fix: give both the same categories with the same ids."
            )


def _common_images(trained: Mapping[str, _Dataset], tested: Mapping[str, _Dataset]) -> Iterator[str]:
    """Yield a warning where training and evaluation share images."""
    for name, found in trained.items():
        for other in tested.keys() - trained.keys():
            if common := _in_both(found.images, tested[other].images):
                yield (
                    f"DATASETS.TEST ('{other}'): {len(common)} of its images are also in {name}: "
                    f"{summarize_names(common, 3)}. AP would be too high. Fix: remove them from one of the two."
                )


def _in_both(trained: Sequence[str], tested: Sequence[str]) -> list[str]:
    """Return the paths in ``trained`` of files that are also in ``tested``, perhaps by another path or a link.

    Only files of the same name are compared: to resolve 100,000 paths takes long, above all on a network disk.
    """
    names = {os.path.basename(path) for path in trained} & {os.path.basename(path) for path in tested}
    first, second = (
        {os.path.realpath(path): path for path in paths if os.path.basename(path) in names}
        for paths in (trained, tested)
    )
    return sorted(first[path] for path in first.keys() & second.keys())


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
    for node, field in CLASS_COUNTS.get(architecture, {}).items():
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


def _check_dataset(name: str, findings: Findings, use: Use) -> _Dataset:
    """Check the files of a dataset.

    Args:
        name: the name in Detectron2's ``DatasetCatalog``.
        findings: problems and warnings are added; each names file, field and record.
        use: requirements of the run.
    """
    if name not in DatasetCatalog:
        findings.problems.append(
            f"DATASETS ('{name}'): unknown dataset.{similar_names(name, DatasetCatalog)} Fix: correct the name, or "
            "register the dataset: give --train-json, --train-images, --val-json and --val-images, or --datasets FILE "
            "(docs/your_data.md); in Python, call detectron2.data.datasets.register_coco_instances."
        )
        return _Dataset()
    metadata = MetadataCatalog.get(name)
    json_file = metadata.get("json_file")
    if json_file is None:  # registered as a Python function
        return _Dataset(metadata.get("thing_classes"))
    source, part = metadata.get("source", json_file), metadata.get("part", "")
    where = f"Dataset '{name}': '{source}'" + (f" ({_PARTS[part]} part)" if part else "")
    try:
        content = read_json(json_file)  # generates or downloads it if a handler does so
        warnings = check_coco(content, use)
        problem = ""
    except FileNotFoundError:
        problem = f"Dataset '{name}': {_missing(json_file)}"
    except DataError as error:
        problem = f"{where}: {error}" + ("" if "Fix: " in str(error) else ". Fix: correct the file.")
    except (OSError, ValueError) as error:  # ValueError: of a handler of addresses
        problem = f"{where}: cannot be read: {error}. Fix: put a correct annotation file there."
    if problem:
        # both parts of a split file have its problems
        found = (each for each in findings.problems if source in each)
        if not (part and any(each.endswith(problem.removeprefix(where)) for each in found)):
            findings.problems.append(problem)
        return _Dataset()
    if (added := metadata.get("added")) and part != "val":
        findings.warnings.append(f"'{source}': {added}. Fix: write them into the file, or ignore this.")
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
    if image_root is not None:
        if missing := _missing_images(image_root, content["images"]):
            findings.problems.append(f"Dataset '{name}': {missing}")
        else:
            findings.problems += [f"{where}: {wrong}" for wrong in _wrong_images(image_root, content["images"])]
    return _Dataset(names, [os.path.join(image_root or "", image["file_name"]) for image in content["images"]])


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
    missing, respelled = [], Counter[str]()
    for folder, wanted in by_folder.items():
        try:
            present = set(os.listdir(folder) if os.path.isdir(folder) else ())
        except OSError as error:
            return f"'{folder}' cannot be listed: {error.strerror}. Fix: allow reading it, or copy its images."
        gone = wanted - present
        missing += [os.path.join(folder, base) for base in gone]
        for difference, spell in _SPELLINGS.items() if gone else ():
            forms = {spell(base) for base in present}
            respelled[difference] += sum(spell(base) in forms for base in gone)
    if not missing:
        return ""
    names = summarize_names((f"'{path}'" for path in sorted(missing)), 3)
    fix = "put them there, remove them from the JSON file, or give the folder that file_name is relative to"
    slashes = sum("\\" in path and os.path.exists(path.replace("\\", "/")) for path in missing)
    if slashes:
        fix = f"{slashes} exist with / instead of \\ in their file_name: write / in the JSON file"
    elif (found := respelled.most_common(1)[0])[1]:
        fix = f"{found[1]} exist with {found[0]}: rename the files"
    elif len(missing) == len(images) and (elsewhere := _folder_of(images, root)):
        fix = f"'{elsewhere}' has them: give it instead"
    return f"{len(missing)} of {len(images)} images are missing: {names}. Fix: {fix}."


def _wrong_images(image_root: str, images: Sequence[dict]) -> Iterator[str]:
    """Describe images that are damaged or of another size than their record, by the headers of some of them."""
    if "://" in image_root:  # a header would cost a download
        return
    checked = images[:: -(-len(images) // _MOST_HEADERS)]
    damaged, others = [], []
    for image in checked:
        wanted = (image["width"], image["height"])
        try:
            size = upright_size(os.path.join(image_root, image["file_name"]))
        except DataError as error:
            reason = str(error).partition(": cannot be read: ")[2].partition(". Fix: ")[0]
            damaged.append(f"'{image['file_name']}' ({reason})")
            continue
        if size != wanted:
            others.append(f"'{image['file_name']}' {size[0]} x {size[1]} in place of {wanted[0]} x {wanted[1]}")
    if damaged:
        yield (
            f"{len(damaged)} of {len(checked)} checked images cannot be read: {summarize_names(damaged, 3)}. Fix: "
            "repair them or remove them from the file."
        )
    if others:
        yield (
            f"{len(others)} of {len(checked)} checked images have another width x height: {summarize_names(others, 3)}"
            ". Fix: correct the file; the size of a photo with an EXIF orientation is that of the upright photo."
        )


def _folder_of(images: Sequence[dict], root: str) -> str | None:
    """Find the images in the folder above, or in a folder beside or below their supposed one."""
    above = os.path.dirname(os.path.abspath(root))
    near = [above, *(entry.path for top in (above, root) for entry in os.scandir(top) if entry.is_dir())]
    names = [image["file_name"] for image in images[:20]]
    return next((folder for folder in near if all(os.path.isfile(os.path.join(folder, name)) for name in names)), None)
