"""A sound run of two images: its config and its annotations."""

from pathlib import Path

from detectron2.config import CfgNode, get_cfg

from gw_detectron import add_gw_config
from gw_detectron.errors import CheckReport
from gw_detectron.workbench.dataset.annotation_checks import DatasetNeeds, check_coco

from ..tiny_run import CONFIG, OPTS


def square(number: int, image: int, category: int) -> dict:
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "bbox": [2, 2, 10, 10],
        "area": 100,
        "iscrowd": 0,
        "segmentation": [[2, 2, 12, 2, 12, 12, 2, 12]],
    }


def coco_content() -> dict:
    size = {"height": 20, "width": 30}
    return {
        "images": [
            {"id": 1, "file_name": "a.jpg", **size},
            {"id": 2, "file_name": "sub/b.jpg", **size},
        ],
        "annotations": [square(1, 1, 5), square(2, 2, 9)],
        "categories": [{"id": 9, "name": "dog"}, {"id": 5, "name": "cat"}],
    }


def config(folder: Path, **changes: object) -> CfgNode:
    cfg = get_cfg()
    add_gw_config(cfg)
    cfg.merge_from_file(str(CONFIG))
    plain = {
        **OPTS,
        "INPUT.MIN_SIZE_TRAIN": "(128,)",  # in smaller images the last layers have too few pixels
        "INPUT.MIN_SIZE_TEST": 128,
        "MODEL.ROI_HEADS.NUM_CLASSES": 2,
        "DATASETS.TRAIN": ("tiny_coco",),
        "DATASETS.TEST": ("tiny_coco",),
        "OUTPUT_DIR": str(folder / "output"),
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    cfg.merge_from_list([word for pair in plain.items() for word in pair])
    return cfg


def only_error(report: CheckReport) -> str:
    assert len(report.errors) == 1, report.errors
    return report.errors[0]


def coco_faults(content: object, needs: DatasetNeeds) -> tuple[list[str], list[str]]:
    """Return the errors and warnings of a COCO content."""
    report = CheckReport()
    check_coco(content, needs, report)
    return report.errors, report.warnings
