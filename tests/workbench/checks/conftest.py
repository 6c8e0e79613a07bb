"""A sound run of two images, whose config and annotations the tests change."""

import json

import pytest
from detectron2.data import DatasetCatalog
from detectron2.data.datasets import register_coco_instances
from PIL import Image

from gw_detectron.weights import open_start_weights
from gw_detectron.workbench.preflight import PreflightReport
from gw_detectron.workbench.run.config_checks import preflight
from gw_detectron.workbench.run.folder import check_output

from .sound_run import coco_content, config


@pytest.fixture
def content() -> dict:
    return coco_content()


@pytest.fixture
def coco(tmp_path, content):
    """Return a function that registers ``content`` as the dataset tiny_coco and returns the JSON path."""
    path = tmp_path / "data" / "tiny.json"
    images = tmp_path / "data" / "images"
    (images / "sub").mkdir(parents=True)
    for image in content["images"]:
        color = (90 * image["id"], 0, 0)
        Image.new("RGB", (image["width"], image["height"]), color).save(
            images / image["file_name"]
        )

    def register(text: str | None = None):
        path.write_text(json.dumps(content) if text is None else text)
        register_coco_instances("tiny_coco", {}, str(path), str(images))
        return path

    return register


@pytest.fixture
def other_coco(coco):
    """Register the first image of ``content`` as the dataset other_coco, too; return the JSON path."""
    path = coco().with_name("other.json")
    content = coco_content()
    path.write_text(
        json.dumps(
            {
                **content,
                "images": content["images"][:1],
                "annotations": content["annotations"][:1],
            }
        )
    )
    register_coco_instances("other_coco", {}, str(path), str(path.parent / "images"))
    return path


@pytest.fixture
def check(tmp_path, coco):
    """Return a function that checks a sound run with some keys changed."""

    def run(
        eval_only: bool = False, resume: bool = False, overwrite: bool = False, **changes
    ) -> PreflightReport:
        if "tiny_coco" not in DatasetCatalog:
            coco()
        cfg = config(tmp_path, **changes)
        start, report = (
            open_start_weights(cfg.MODEL.WEIGHTS, cfg.OUTPUT_DIR if resume else ""),
            PreflightReport(),
        )
        check_output(
            cfg.OUTPUT_DIR, start, report, resume=resume, keeps=not (eval_only or overwrite)
        )
        return preflight(cfg, start, report, eval_only=eval_only)

    return run
