"""Check that the datasets of a run are complete and fit the model."""

import functools
import itertools
import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PureWindowsPath
from typing import Any
from urllib.parse import unquote

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.detection_utils import create_keypoint_hflip_indices

from ...errors import CheckReport, DataError, similar_names, summarize_names
from ...modeling.build import CLASS_COUNTS
from ..images import content_key, evenly_spread, read_header
from ..images.headers import ImageError
from ..images.image_files import only_images, walk_files
from .annotation_checks import check_coco
from .data_fit import check_fit
from .faults import (
    COPIES,
    LEFT_OUT,
    MISSING_IMAGE,
    WRONG_SIZE,
    Fault,
    describe,
)
from .fingerprint import Fingerprint
from .record_checks import check_records
from .registration import open_dataset
from .shape_checks import DatasetNeeds
from .source import CocoSource, own_source

#: values of a dataset's metadata ``evaluator_type`` that are evaluated by the COCO rules
_COCO_EVALUATORS = ("coco", "coco_panoptic_seg")
#: architecture -> the ``evaluator_type`` that its predictions need, if they are not only boxes
_EVALUATORS = {
    "PanopticFPN": ("coco_panoptic_seg",),
    "SemanticSegmentor": ("coco_panoptic_seg", "sem_seg"),
}
_MOST_HEADERS = 1000  # a few seconds on a network disk
_MOST_LISTED = 100_000  # some seconds; the folder may be a whole disk
_KEYPOINT_FIX = (
    "Fix: write them into the categories of the json, as keypoints, or both keys into --datasets FILE "
    "(docs/your_data.md); of a dataset registered in Python, set them in MetadataCatalog."
)


def check_datasets(
    cfg: CfgNode,
    report: CheckReport,
    *,
    eval_only: bool,
    trained: Mapping[int, str] | None = None,
) -> dict[str, Fingerprint]:
    """Check and return the datasets of training (unless ``eval_only``) and evaluation.

    All must have the same classes. ``trained`` has the classes that the checkpoint of a resumed run or an evaluation
    records.
    """
    for key in ("TRAIN", "TEST"):
        name = cfg.DATASETS[key]
        if isinstance(name, str):  # set in Python, without the comma
            report.errors.append(
                f"DATASETS.{key} ({name!r}): a text instead of a tuple. Fix: write ({name!r},)."
            )
            return {}

    key = "TEST" if eval_only else "TRAIN"
    if not cfg.DATASETS[key]:
        report.errors.append(
            f"DATASETS.{key} (empty): no dataset. Fix: name at least one."
        )

    checks = _DatasetChecks(report)
    if not eval_only:
        for name in cfg.DATASETS.TRAIN:
            checks.check(name, _needs(cfg, training=True, eval_only=False))
    for name in cfg.DATASETS.TEST:
        checks.check(name, _needs(cfg, training=False, eval_only=eval_only))

    if cfg.MODEL.KEYPOINT_ON:
        _check_keypoint_names(cfg, checks.classes, report)
    if _have_same_classes(checks.classes, trained, report):
        _check_class_counts(cfg, checks.classes, report)
        _check_trained_classes(cfg, checks.fingerprints, report)
        check_fit(cfg, checks.fingerprints, report, eval_only=eval_only)
    return checks.fingerprints


def _needs(cfg: CfgNode, *, training: bool, eval_only: bool) -> DatasetNeeds:
    points = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS if cfg.MODEL.KEYPOINT_ON else 0
    has_validation = cfg.TEST.LOSS and cfg.TEST.EVAL_PERIOD > 0 and not eval_only
    has_losses = training or has_validation  # they read masks alike
    run_lengths = not has_losses or cfg.INPUT.MASK_FORMAT != "polygon"
    return DatasetNeeds(
        training, cfg.MODEL.MASK_ON, run_lengths, points, cfg.INPUT.PERCENTILES
    )


class _DatasetChecks:
    """Checks dataset after dataset; remembers classes, fingerprints and photos of all."""

    def __init__(self, report: CheckReport) -> None:
        self.classes: dict[str, Sequence[str] | None] = {}  # None: unknown
        self.fingerprints: dict[str, Fingerprint] = {}
        self._report = report
        # dataset, id and file by content
        self._photos: dict[str, tuple[str, Any, str]] = {}

    def check(self, name: str, needs: DatasetNeeds) -> None:
        """Check the files of a dataset."""
        self.classes[name] = None
        if name not in DatasetCatalog:
            self._report.errors.append(
                f"DATASETS ('{name}'): unknown dataset.{similar_names(name, DatasetCatalog)} Fix: correct the name, or "
                "register it: give --train-json and --train-images, or --datasets FILE (docs/your_data.md)."
            )
            return

        metadata = MetadataCatalog.get(name)
        self.classes[name] = metadata.get("thing_classes")
        if metadata.get("evaluator_type") == "lvis":  # its files name images by address
            return
        file = metadata.get("source") or metadata.get("json_file")
        found = CheckReport()
        try:
            source = open_dataset(name)
            if source is not None:
                self._check_source(name, source, needs, found)
            elif metadata.get("evaluator_type") in (None, "coco"):
                self._check_records(name, needs, found)
        except FileNotFoundError:
            found.errors.append(
                f"file not found. {_place(name, metadata.get('made_by'))}"
            )
        # ValueError: of a handler of addresses
        except (DataError, OSError, ValueError) as error:
            text = str(error).removeprefix(f"'{file}': ")
            fix = "" if "Fix: " in text else ". Fix: correct the file."
            found.errors.append(text + fix)

        where = f"Dataset '{name}' ('{file or 'a Python function'}')"
        self._report.errors += [f"{where}: {error}" for error in found.errors]
        self._report.warnings += [f"{where}: {warning}" for warning in found.warnings]

    def _check_source(
        self, name: str, source: CocoSource, needs: DatasetNeeds, report: CheckReport
    ) -> None:
        content = source.content
        report.warnings += source.notes
        check_coco(content, needs, report, is_filled_in=source.is_filled_in)
        data = source.fingerprint
        is_empty = not len(data.boxes)
        if is_empty and needs.training:
            raise DataError(
                "nothing to learn from: no annotation, or only crowds and objects without area or polygon"
            )
        self.fingerprints[name] = data
        self.classes[name] = data.classes
        if needs.training:
            report.warnings += _like_names(data)
        # the official test images have no annotations
        if is_empty and "annotations" in content:
            report.warnings.append(
                "no object to evaluate: AP is not a number. Fix: give other images."
            )

        root = source.dataset.images
        if "://" in root:  # a header would cost a download
            return
        if not os.path.isdir(root):
            report.errors.append(
                f"the folder of images '{root}' does not exist. {_place(name)}"
            )
            return

        images = content["images"]
        missing = _missing_files(root, images)
        if missing:
            describe({MISSING_IMAGE: missing}, len(images), "images", report)
        else:
            self._check_images(name, root, images, needs.percentiles, report)

    def _check_records(
        self, name: str, needs: DatasetNeeds, report: CheckReport
    ) -> None:
        """Check what a Python function returns, and its image files if the records are complete."""
        records = DatasetCatalog.get(name)
        classes = self.classes[name]
        check_records(records, classes, report, evaluated=not needs.training)
        has_all = all(map({"height", "width", "image_id"}.issubset, records))
        if has_all and not report.errors:
            images = [{**record, "id": record["image_id"]} for record in records]
            self._check_images(name, "", images, needs.percentiles, report)

    def _check_images(
        self,
        name: str,
        root: str,
        images: Sequence[dict],
        percentiles: Sequence[float],
        report: CheckReport,
    ) -> None:
        """Check the headers and ends of image files; of many images, a sample."""
        checked = evenly_spread(images, _MOST_HEADERS)
        found: dict[Fault, list[str]] = defaultdict(list)
        for image in checked:
            file = image["file_name"]
            path = os.path.join(root, file)
            try:
                header = read_header(path, percentiles)
                key = content_key(path)
            except ImageError as error:
                fault = Fault(f"cannot be read: {error.reason}", error.fix)
                found[fault].append(file)
                continue
            if (header.width, header.height) != (image["width"], image["height"]):
                size = f"{header.width} x {header.height}"
                found[WRONG_SIZE].append(f"'{file}' is {size}")
            if header.left_out:
                found[LEFT_OUT].append(f"{file}: {header.left_out}")

            first = self._photos.setdefault(key, (name, image["id"], file))
            if first[:2] != (name, image["id"]):
                found[COPIES].append(f"{file} is {first[2]} of {first[0]}")
        describe(found, len(checked), "checked images", report)


def _missing_files(root: str, images: Sequence[dict]) -> list[str]:
    """Return the paths of images that do not exist, each with the file that it may mean."""

    # one listing per folder, because network disks are slow at a query per file
    @functools.cache
    def files(folder: str) -> set[str]:
        return set(os.listdir(folder)) if os.path.isdir(folder) else set()

    paths = sorted({os.path.join(root, image["file_name"]) for image in images})
    missing = []
    for path in paths:
        folder, name = os.path.split(path)
        if name not in files(folder):
            missing.append(path)
    if not missing:
        return []

    files_there = sorted(itertools.islice(walk_files(root), _MOST_LISTED))
    there = {_plain(str(file)): file for file in only_images(files_there)}
    named = []
    for path in missing:
        similar = there.get(_plain(path))
        hint = f" (there is {os.path.relpath(similar, root)!a})" if similar else ""
        named.append(path + hint)
    return named


def _plain(path: str) -> str:
    """Return the name of an image without what differs between tools and systems.

    These are folders, the suffix, case, accents and spaces as macOS and others write them, and codes of addresses.
    """
    stem = PureWindowsPath(unquote(path)).stem
    return unicodedata.normalize("NFKC", stem).casefold()


def _place(name: str, made_by: str | None = None) -> str:
    """Say where the missing files of a dataset go."""
    if made_by:
        return f"Fix: run `{made_by}` in a clone of the repository."
    if own_source(name) is not None:  # its paths are absolute
        return (
            "Fix: put it there, or tell where it is by the flags of the data (--val-json and --val-images, or "
            "--datasets)."
        )
    folder = os.environ.get("DETECTRON2_DATASETS", "datasets")
    return f"Fix: put it there, or set DETECTRON2_DATASETS to the folder of the datasets (now '{folder}')."


def _have_same_classes(
    classes: Mapping[str, Sequence[str] | None],
    trained: Mapping[int, str] | None,
    report: CheckReport,
) -> bool:
    """Compare the classes of datasets with those of the checkpoint, or of the first dataset."""
    known = {name: list(names) for name, names in classes.items() if names}
    first, wanted = next(iter(known.items()), ("", []))
    if trained:
        first = f"the checkpoint ({len(trained)} classes)"
        wanted = list(trained.values())

    different = {name: names for name, names in known.items() if names != wanted}
    for name, names in different.items():
        here, there = Counter(names), Counter(wanted)
        missing = summarize_names(sorted((there - here).elements()))
        added = summarize_names(sorted((here - there).elements()))
        difference = "another order"
        if missing or added:
            difference = f"missing: {missing or 'none'}; added: {added or 'none'}"
        if [*map(_same_letters, names)] == [*map(_same_letters, wanted)]:
            pairs = zip(wanted, names, strict=True)
            unlike = [f"{a!a} is {b!a} there" for a, b in pairs if a != b]
            difference = f"the same letters in another form: {'; '.join(unlike)}"
        report.errors.append(
            f"DATASETS ('{name}'): other classes than {first}: {difference}. Fix: give it the same list of categories "
            "(Pascal VOC: in a classes.txt); a category may have no object."
        )
    return not different


def _like_names(data: Fingerprint) -> Iterator[str]:
    """Warn of class names that differ only in case or spaces, such as a slip in one label."""
    groups: dict[str, dict[str, int]] = defaultdict(dict)
    for name, objects in zip(data.classes, data.per_class, strict=True):
        groups[_same_letters(name)][name] = objects

    for names in groups.values():
        if len(names) > 1:
            listed = [
                f"{name!a} ({objects} objects)" for name, objects in names.items()
            ]
            yield (
                f"classes {' and '.join(listed)} differ only in case, spaces or the form of letters. Fix: correct the "
                "labels, if they are one class."
            )


def _same_letters(name: str) -> str:
    """Return a name without case, spaces, invisible characters and the forms that Unicode has of a letter."""
    letters = unicodedata.normalize("NFKC", name).casefold()
    return "".join(
        letter
        for letter in letters
        if not letter.isspace() and unicodedata.category(letter) != "Cf"
    )


def _check_keypoint_names(
    cfg: CfgNode, datasets: Iterable[str], report: CheckReport
) -> None:
    """Compare the keypoint names of datasets with the model, their flips and each other."""
    points = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS
    first: list[str] = []
    for name in filter(DatasetCatalog.__contains__, datasets):
        names = list(MetadataCatalog.get(name).get("keypoint_names") or ())
        is_trained = name in cfg.DATASETS.TRAIN
        if not (names or is_trained):  # an evaluation needs none
            continue

        first = first or names
        is_unfit = is_trained and not _can_be_flipped(name, points)
        if names != first or is_unfit:
            listed = summarize_names(map(str, names), 20)
            report.errors.append(
                f"keypoint_names of {name} ({listed}): not one name for each of {points} keypoints "
                "(MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS), in at most one pair of keypoint_flip_map, the same in all "
                f"datasets. {_KEYPOINT_FIX}"
            )
        elif is_trained and points > 1 and _flips_no_pair(cfg, name):
            report.warnings.append(
                f"keypoint_names of {name} ({summarize_names(names, 20)}): no two are known as left and right, so each "
                "keeps its name in a flipped image. Fix: if some are sides, write keypoint_flip_map into --datasets "
                "FILE (docs/your_data.md), or set INPUT.RANDOM_FLIP none."
            )


def _flips_no_pair(cfg: CfgNode, name: str) -> bool:
    """Return whether images are mirrored and no keypoints are exchanged."""
    pairs = MetadataCatalog.get(name).keypoint_flip_map
    return cfg.INPUT.RANDOM_FLIP == "horizontal" and not pairs


def _can_be_flipped(name: str, points: int) -> bool:
    """Return whether two flips of a dataset's images bring each of ``points`` keypoints back."""
    try:
        order = create_keypoint_hflip_indices([name])
    # AttributeError: no names or pairs; ValueError: a name in a pair with an unknown one
    except (AttributeError, ValueError):
        return False

    metadata = MetadataCatalog.get(name)
    paired = set(itertools.chain(*metadata.keypoint_flip_map))
    twice = [order[index] for index in order]
    return twice == list(range(points)) and paired.issubset(metadata.keypoint_names)


def _check_trained_classes(
    cfg: CfgNode, fingerprints: Mapping[str, Fingerprint], report: CheckReport
) -> None:
    """Warn of classes without an object to train on, if all training data is known."""
    trained = [
        fingerprints[name] for name in cfg.DATASETS.TRAIN if name in fingerprints
    ]
    if not trained or len(trained) < len(cfg.DATASETS.TRAIN):
        return
    counts = np.sum([data.per_class for data in trained], axis=0)
    names = np.array(trained[0].classes, str)[counts == 0]
    if len(names):
        report.warnings.append(
            f"DATASETS: {len(names)} of {len(counts)} classes have no object to train on ({summarize_names(names)}): "
            "where the evaluation has some, an AP of 0 lowers the mean. Fix: move some to the training, or remove the "
            "categories."
        )


def _check_class_counts(
    cfg: CfgNode, datasets: Mapping[str, Sequence[str] | None], report: CheckReport
) -> None:
    """Compare the classes of each dataset with those of the config's heads."""
    for node, field_name in CLASS_COUNTS.get(cfg.MODEL.META_ARCHITECTURE, {}).items():
        key = f"MODEL.{node}.NUM_CLASSES"
        wanted = cfg.MODEL[node].NUM_CLASSES
        for name, objects in datasets.items():
            is_stuff = field_name == "stuff_classes"
            names = MetadataCatalog.get(name).get(field_name) if is_stuff else objects
            if names is not None and len(names) != wanted:
                report.errors.append(
                    f"{key} ({wanted}): dataset {name} has {len(names)} classes. Fix: set {key} {len(names)}."
                )


def wrong_evaluator(cfg: CfgNode, name: str) -> str:
    """Describe why a model's predictions cannot be evaluated on a dataset, or return ""."""
    proposals, heads = cfg.MODEL.PROPOSAL_GENERATOR.NAME, cfg.MODEL.ROI_HEADS.NAME
    if proposals == "RRPN" or heads == "RROIHeads":
        return (
            f"MODEL.PROPOSAL_GENERATOR.NAME ({proposals!r}), MODEL.ROI_HEADS.NAME ({heads!r}): predict rotated boxes, "
            "which the evaluation would take for upright ones. Fix: set RPN and StandardROIHeads, or write a trainer "
            "with your own mapper and Detectron2's RotatedCOCOEvaluator in build_evaluator."
        )

    kind = MetadataCatalog.get(name).get("evaluator_type")
    allowed = _EVALUATORS.get(cfg.MODEL.META_ARCHITECTURE, _COCO_EVALUATORS)
    if kind in allowed:
        return ""

    fix = "give a panoptic dataset, e.g. coco_2017_val_panoptic_separated"
    if allowed is _COCO_EVALUATORS:
        fix = f'if it has COCO annotations, set MetadataCatalog.get("{name}").evaluator_type = "coco"'
    return (
        f"DATASETS.TEST ('{name}'): evaluator_type {kind!r} is not one of {list(allowed)}. Fix: {fix}, else override "
        "build_evaluator."
    )
