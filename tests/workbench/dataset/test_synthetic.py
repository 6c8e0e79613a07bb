"""Synthetic dataset: the pinned scenes, rendering, annotations, files, registration with Detectron2."""

import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pycocotools.mask as mask_util
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import Image

from gw_detectron.errors import ConfigError, DataError
from gw_detectron.workbench.dataset import (
    SyntheticConfig,
    make_synthetic,
    register_synthetic,
    synthetic,
)
from gw_detectron.workbench.dataset.polygons import to_coco
from gw_detectron.workbench.dataset.scene import SHAPES
from gw_detectron.workbench.dataset.synthetic import draw_scene

SIZES = {"num_train": 24, "num_val": 16, "min_side": 64, "max_side": 100}
OBJECTS = {
    "min_objects": 2,
    "max_objects": 6,
    "min_size": 0.1,
    "max_size": 0.9,
    "min_visible": 0.5,
}
TINY = SyntheticConfig(**SIZES, **OBJECTS, crowd_fraction=0.3)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    make_synthetic(root, TINY)
    return root


@pytest.fixture(autouse=True)
def restore_registration():
    """Undo the registration of other roots for the rest of the suite."""
    yield
    register_synthetic()


def json_file(root: Path, split: str) -> Path:
    return root / "gw_synthetic" / "annotations" / f"instances_{split}.json"


def read(root: Path, split: str) -> dict:
    return json.loads(json_file(root, split).read_text())


def all_files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def iou(first: np.ndarray, second: np.ndarray) -> float:
    return (first & second).sum() / (first | second).sum()


def rasterize(polygons: list, height: int, width: int) -> np.ndarray:
    return mask_util.decode(
        mask_util.merge(mask_util.frPyObjects(polygons, height, width))
    ).astype(bool)


def test_the_demo_has_the_images_and_annotations_of_version_0_2():
    """With NumPy 2 and Pillow 13. A scene that changes on purpose needs another _FORMAT."""
    pinned = hashlib.sha256()
    for split, index in itertools.product(("train", "val"), range(20)):
        scene = draw_scene(SyntheticConfig(), split, index)
        pinned.update(scene.image().tobytes())
        pinned.update(json.dumps([to_coco(obj, index, 1) for obj in scene.objects]).encode())
    assert (
        pinned.hexdigest() == "f5367558bb0c32b018c191dfde9a218ea1f3bace97f3130c7c3e455a61b5fc77"
    )


def test_too_many_objects_for_the_image_is_an_error():
    config = SyntheticConfig(
        min_objects=20, max_objects=20, min_size=0.8, max_size=0.9, min_visible=1.0
    )
    with pytest.raises(ConfigError, match=r"min_objects \(20\)"):
        draw_scene(config, "train", 0)


def test_polygons_and_boxes_agree_with_the_visible_masks():
    for index in range(60):
        for obj in draw_scene(TINY, "train", index).objects:
            if obj.crowd:
                continue
            annotation = to_coco(obj, image_id=1, annotation_id=1)
            height, width = obj.mask.shape
            mask = rasterize(annotation["segmentation"], height, width)
            # The COCO API rasterizes to about a tenth of a pixel, which small objects feel.
            assert iou(mask, obj.mask) > (0.95 if obj.mask.sum() > 300 else 0.85)
            assert annotation["area"] == mask.sum()
            x, y, w, h = annotation["bbox"]
            assert 0 <= x < x + w <= width + 1e-6 and 0 <= y < y + h <= height + 1e-6
            rows, columns = np.nonzero(mask)
            tight = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
            # Tips thinner than a pixel lie in the polygon but cover no pixel center.
            np.testing.assert_allclose([x, y, x + w, y + h], tight, atol=2.5)


def test_the_content_is_complete_and_varied(root):
    files, ids = set(), set()
    for split in TINY.splits:
        content = read(root, split)
        objects = [a for a in content["annotations"] if not a["iscrowd"]]
        assert {a["category_id"] for a in objects} == {
            each["id"] for each in content["categories"]
        }
        for record in content["images"]:
            path = root / "gw_synthetic" / split / record["file_name"]
            with Image.open(path) as image:
                assert (image.format, image.size) == (
                    "JPEG",
                    (record["width"], record["height"]),
                )
            files.add(path.read_bytes())
            ids.add(record["id"])
    assert (
        len(files) == len(ids) == TINY.num_train + TINY.num_val
    )  # no image twice, in one split or both


def test_an_existing_set_is_reused_and_needs_no_write_permission(root, monkeypatch):
    monkeypatch.setattr(synthetic, "draw_scene", None)
    monkeypatch.setattr(synthetic, "file_lock", None)
    before = all_files(root)
    assert make_synthetic(root, TINY) == root / "gw_synthetic"
    assert all_files(root) == before


def start(root: Path, config: SyntheticConfig) -> multiprocessing.process.BaseProcess:
    """Make the set in another process; forked, since a fresh one would import torch for seconds."""
    process = multiprocessing.get_context("fork").Process(
        target=make_synthetic, args=(root, config), daemon=True
    )
    process.start()
    return process


def test_two_processes_that_start_at_once_make_one_set(root, tmp_path, monkeypatch):
    write = synthetic._generate

    def noted_write(folder, *args):
        (tmp_path / f"written by {os.getpid()}").touch()
        write(folder, *args)

    monkeypatch.setattr(synthetic, "_generate", noted_write)
    processes = [start(tmp_path / "sets", TINY) for _ in range(2)]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list(tmp_path.glob("written by *"))) == 1
    assert all_files(tmp_path / "sets") == all_files(root)


def test_a_set_with_other_parameters_is_refused_and_kept(root, monkeypatch):
    before = all_files(root)
    with pytest.raises(DataError, match=r"num_val=16 \(now 17\), seed=0 \(now 5\)"):
        make_synthetic(root, dataclasses.replace(TINY, num_val=17, seed=5))
    monkeypatch.setattr(synthetic, "_FORMAT", 1000)
    with pytest.raises(DataError, match=r"format=\d+ \(now 1000\)"):
        make_synthetic(root, TINY)
    assert all_files(root) == before


def test_registered_below_the_folder_of_the_environment_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    register_synthetic()
    metadata = MetadataCatalog.get("gw_synthetic_val")
    assert metadata.json_file == str(json_file(tmp_path, "val"))
    assert metadata.image_root == str(tmp_path / "gw_synthetic" / "val")
    assert metadata.evaluator_type == "coco" and metadata.thing_classes == [
        shape.name for shape in SHAPES
    ]
    assert not os.listdir(tmp_path), "registering must not make files"


def test_the_loader_makes_the_set(root, tmp_path):
    register_synthetic(tmp_path, TINY)
    assert len(DatasetCatalog.get("gw_synthetic_val")) == TINY.num_val
    assert all_files(tmp_path) == all_files(root)
