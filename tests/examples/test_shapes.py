"""The dataset of shapes: its pinned scenes, annotations and files, and the configs that train on it."""

import json
import os
import shutil
import sys

import numpy as np
import pycocotools.mask as mask_util
import pytest
from detectron2.data import DatasetCatalog
from PIL import Image

from examples.shapes import ShapesConfig, draw_scene, write_shapes
from examples.shapes.__main__ import main
from examples.shapes.polygons import to_coco
from gw_detectron.errors import ConfigError, FileAccessError, PreflightError
from gw_detectron.workbench.run import Trainer

from ..shapes import scenes_digest
from ..tiny_run import CONFIG, arguments, config_of

TINY = ShapesConfig(
    num_train=24,
    num_val=16,
    min_side=64,
    max_side=100,
    min_objects=2,
    max_objects=6,
    min_size=0.1,
    max_size=0.9,
    min_visible=0.5,
    crowd_fraction=0.3,
)
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in vars(TINY).items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets") / "shapes"
    write_shapes(folder, TINY)
    return folder


def all_files(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_demo_has_the_images_and_annotations_of_version_0_2():
    """With NumPy 2 and Pillow 13. A scene that changes on purpose needs another _FORMAT."""
    expected = "f5367558bb0c32b018c191dfde9a218ea1f3bace97f3130c7c3e455a61b5fc77"
    assert scenes_digest(ShapesConfig(), 20) == expected


def test_too_many_objects_for_the_image_is_an_error():
    sizes = {"min_side": 64, "max_side": 64, "min_size": 0.8, "max_size": 0.9}
    config = ShapesConfig(min_objects=6, max_objects=6, min_visible=1.0, **sizes)
    with pytest.raises(ConfigError, match=r"min_objects \(6\)"):
        draw_scene(config, "train", 0)


def test_polygons_and_boxes_agree_with_the_visible_masks():
    scenes = [draw_scene(TINY, "train", index) for index in range(30)]
    objects = [shown for scene in scenes for shown in scene.objects]
    for shown in objects:
        if shown.crowd:
            continue
        annotation = to_coco(shown, image_id=1, annotation_id=1)

        polygons = mask_util.frPyObjects(annotation["segmentation"], *shown.mask.shape)
        encoded = mask_util.merge(polygons)
        mask = mask_util.decode(encoded).astype(bool)
        # The COCO API rasterizes to about a tenth of a pixel, which small objects feel.
        common = (mask & shown.mask).sum()
        either = (mask | shown.mask).sum()
        is_large = shown.mask.sum() > 300
        assert common > (0.95 if is_large else 0.85) * either
        assert annotation["area"] == mask.sum()

        # Tips thinner than a pixel lie in the polygon but cover no pixel center.
        x, y, w, h = annotation["bbox"]
        height, width = mask.shape
        assert 0 <= x < x + w <= width + 1e-6
        assert 0 <= y < y + h <= height + 1e-6
        tight = mask_util.toBbox(encoded)
        np.testing.assert_allclose([x, y, w, h], tight, atol=2.5)


def test_the_content_is_complete_and_varied(folder):
    photos = set()
    for split in TINY.splits:
        file = folder / "annotations" / f"instances_{split}.json"
        content = json.loads(file.read_text())
        objects = [a for a in content["annotations"] if not a["iscrowd"]]
        drawn = {annotation["category_id"] for annotation in objects}
        listed = {category["id"] for category in content["categories"]}
        assert drawn == listed

        for record in content["images"]:
            path = folder / split / record["file_name"]
            photos.add(path.read_bytes())
            with Image.open(path) as image:
                assert image.format == "JPEG"
                assert image.size == (record["width"], record["height"])

    assert len(photos) == TINY.num_train + TINY.num_val  # no image twice


def test_the_command_writes_the_same_files_again_but_replaces_none(
    folder, tmp_path, monkeypatch
):
    again = tmp_path / "again"
    monkeypatch.setattr(sys, "argv", ["shapes", str(again), *FLAGS])
    main()
    assert all_files(again) == all_files(folder)

    with pytest.raises(FileAccessError, match=str(again)):
        write_shapes(again, ShapesConfig(num_train=1, num_val=1))
    assert all_files(again) == all_files(folder)


def test_a_stopped_command_leaves_nothing(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dumps", stop)  # after the photos of the first split
    with pytest.raises(KeyboardInterrupt):
        write_shapes(tmp_path / "shapes", ShapesConfig(num_train=1))
    assert not os.listdir(tmp_path)


def config_beside(tmp_path, data):
    """Copy the configs, so that their datasets are in the folder ``data``; return the config of a run."""
    configs = tmp_path / "configs"
    shutil.copytree(CONFIG.parent, configs)
    listing = configs / "datasets.yaml"
    paths = listing.read_text().replace("../../datasets/gw_synthetic", str(data))
    listing.write_text(paths)

    args = arguments(tmp_path / "output")
    args.config_file = str(configs / CONFIG.name)
    return config_of(args)


def test_a_run_without_the_files_names_the_command(tmp_path):
    cfg = config_beside(tmp_path, tmp_path / "nothing")
    with pytest.raises(
        PreflightError, match="python -m examples.shapes datasets/gw_synthetic"
    ):
        Trainer(cfg)


def test_a_run_finds_the_files_beside_its_config(folder, tmp_path):
    Trainer(config_beside(tmp_path, folder))

    assert len(DatasetCatalog.get("gw_synthetic_train")) == TINY.num_train
    assert not (tmp_path / "output" / "datasets").exists()  # nothing was corrected
