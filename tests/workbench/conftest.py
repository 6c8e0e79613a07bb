"""A sound run of two images, whose config and annotations the tests change."""

import json

import pytest
from detectron2.data import DatasetCatalog
from detectron2.data.datasets import register_coco_instances
from PIL import Image

from gw_detectron.errors import CheckReport
from gw_detectron.weights import open_start_weights
from gw_detectron.workbench.run.checks import check_run
from gw_detectron.workbench.run.folder import check_output

from .sound_run import coco_content, config


@pytest.fixture
def content() -> dict:
    return coco_content()


@pytest.fixture
def coco(tmp_path, content):
    """Return a function that registers ``content`` as tiny_coco and returns the JSON path."""
    path = tmp_path / "data" / "tiny.json"
    images = tmp_path / "data" / "images"
    (images / "sub").mkdir(parents=True)
    for image in content["images"]:
        color = (90 * image["id"], 0, 0)
        photo = Image.new("RGB", (image["width"], image["height"]), color)
        photo.save(images / image["file_name"])

    def register(text: str | None = None):
        path.write_text(json.dumps(content) if text is None else text)
        register_coco_instances("tiny_coco", {}, str(path), str(images))
        return path

    return register


@pytest.fixture
def other_coco(coco):
    """Register the first image as the dataset other_coco, too; return the JSON path."""
    path = coco().with_name("other.json")
    first = coco_content()
    del first["images"][1], first["annotations"][1]
    path.write_text(json.dumps(first))
    register_coco_instances("other_coco", {}, str(path), str(path.parent / "images"))
    return path


@pytest.fixture
def check(tmp_path, coco):
    """Return a function that checks a sound run with some keys changed."""

    def run(
        eval_only: bool = False,
        resume: bool = False,
        overwrite: bool = False,
        allow_partial: bool = False,
        **changes,
    ) -> CheckReport:
        if "tiny_coco" not in DatasetCatalog:
            coco()
        cfg = config(tmp_path, **changes)
        folder = cfg.OUTPUT_DIR
        start = open_start_weights(cfg.MODEL.WEIGHTS, folder if resume else "")
        report = CheckReport()
        keeps = not (eval_only or overwrite)
        check_output(folder, start, report, resume=resume, keeps=keeps)
        return check_run(
            cfg, start, report, eval_only=eval_only, allow_partial=allow_partial
        )

    return run
