"""COCO's tasks, the names of their scores, and how many detections the scores count."""

from collections.abc import Iterable
from typing import NamedTuple

from detectron2.config import CfgNode

_SCORES = ("AP", "AP50", "AP75", "APs", "APm", "APl")  # as COCO's summary begins
# small objects have no keypoints
_KEYPOINT_SCORES = ("AP", "AP50", "AP75", "APm", "APl")


class CocoTask(NamedTuple):
    """A task: a noun for its predictions, their key in a result, and its scores."""

    noun: str
    result_key: str
    scores: tuple[str, ...]
    detections: int = 100  # per image and class that AP counts, best first


#: by the names of pycocotools and Detectron2; the last one of a model is its main task
COCO_TASKS = {
    "bbox": CocoTask("box", "bbox", _SCORES),
    "segm": CocoTask("mask", "segmentation", _SCORES),
    "keypoints": CocoTask("keypoint", "keypoints", _KEYPOINT_SCORES, 20),
}


def coco_tasks(cfg: CfgNode) -> tuple[str, ...]:
    """Return the names of COCO's tasks on which a config's model is evaluated."""
    is_on = {"segm": cfg.MODEL.MASK_ON, "keypoints": cfg.MODEL.KEYPOINT_ON}
    return tuple(task for task in COCO_TASKS if is_on.get(task, True))


def ap_name(task: str, logged: Iterable[str]) -> str:
    """Return the name of a task's AP among logged scores: its AP@N if there is one."""
    dense = (name for name in logged if name.startswith(f"{task}/AP@"))
    return next(dense, f"{task}/AP")
