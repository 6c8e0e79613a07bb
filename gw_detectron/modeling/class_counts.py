"""The config keys that count the classes of a dataset."""

from detectron2.config import CfgNode

#: architecture -> node of MODEL that counts the classes, and their names in a dataset's metadata
CLASS_COUNTS = {
    "RetinaNet": {"RETINANET": "thing_classes"},
    "GWRetinaNet": {"RETINANET": "thing_classes"},
    "GeneralizedRCNN": {"ROI_HEADS": "thing_classes"},
    "PanopticFPN": {"ROI_HEADS": "thing_classes", "SEM_SEG_HEAD": "stuff_classes"},
    "SemanticSegmentor": {"SEM_SEG_HEAD": "stuff_classes"},
}


def object_count_keys(cfg: CfgNode) -> list[str]:
    """Return the keys that count the classes of objects, such as MODEL.ROI_HEADS.NUM_CLASSES."""
    nodes = CLASS_COUNTS.get(cfg.MODEL.META_ARCHITECTURE, {})
    return [f"MODEL.{node}.NUM_CLASSES" for node, field in nodes.items() if field == "thing_classes"]
