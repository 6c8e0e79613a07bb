"""Whether the data sets of a run are there, whole, and the ones the model is made for."""

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog

from .coco_json import check_dataset
from .findings import Findings

# values of a data set's metadata "evaluator_type" for which boxes and masks are evaluated by the COCO rules
_FORMATS = ("RGB", "BGR", "L", "YUV-BT.601")  # what Detectron2 reads images as
COCO_EVALUATORS = ("coco", "coco_panoptic_seg")


def check_data(cfg: CfgNode, findings: Findings, *, eval_only: bool) -> None:
    """Adds what is wrong with the data sets of training (unless ``eval_only``) and evaluation."""
    if cfg.INPUT.FORMAT not in _FORMATS:
        findings.problems.append(f"INPUT.FORMAT is {cfg.INPUT.FORMAT!r}. Set it to one of {', '.join(_FORMATS)}.")
    names_train = () if eval_only else tuple(cfg.DATASETS.TRAIN)
    names_test = tuple(cfg.DATASETS.TEST)
    if not names_train and not eval_only:
        findings.problems.append("DATASETS.TRAIN is empty. Name at least one data set to train on.")
    if not names_test and eval_only:
        findings.problems.append("DATASETS.TEST is empty. Name at least one data set to evaluate on.")
    classes: dict[str, list[str] | None] = {}
    for name in names_train:
        classes[name] = check_dataset(name, findings.problems, for_training=True, masks=cfg.MODEL.MASK_ON)
    for name in names_test:
        classes[name] = check_dataset(name, findings.problems, for_training=False, masks=cfg.MODEL.MASK_ON)
    key, wanted = _num_classes(cfg)
    for name, found in classes.items():
        if key and found is not None and len(found) != wanted:
            findings.problems.append(
                f"{key} is {wanted}, but data set {name} has {len(found)} classes. Set {key} {len(found)}."
            )
    for name in names_test:
        kind = MetadataCatalog.get(name).get("evaluator_type")
        if name in classes and classes[name] is not None and kind not in COCO_EVALUATORS:
            findings.problems.append(
                f"Data set {name} in DATASETS.TEST has evaluator_type {kind!r}, and only "
                f"{list(COCO_EVALUATORS)} are evaluated here. If it has COCO annotations, set "
                f'MetadataCatalog.get("{name}").evaluator_type = "coco".'
            )


def _num_classes(cfg: CfgNode) -> tuple[str, int]:
    """The key that says how many classes the model has, and its value; "" where no key is known."""
    if cfg.MODEL.META_ARCHITECTURE == "RetinaNet":
        return "MODEL.RETINANET.NUM_CLASSES", cfg.MODEL.RETINANET.NUM_CLASSES
    if cfg.MODEL.META_ARCHITECTURE == "GeneralizedRCNN":
        return "MODEL.ROI_HEADS.NUM_CLASSES", cfg.MODEL.ROI_HEADS.NUM_CLASSES
    return "", 0
