"""The study's dataset: what tells the class, bars, splits without leaks, registration."""

import hashlib
import itertools
import json

from detectron2.data import DatasetCatalog, MetadataCatalog

from experiments.small_batch.dataset import HardScene, HardSyntheticConfig
from gw_detectron.data.polygons import to_coco
from gw_detectron.data.synthetic import draw_scene

CONFIG = HardSyntheticConfig()


def test_the_scenes_are_those_of_the_study():
    """With NumPy 2 and Pillow 13."""
    pinned = hashlib.sha256()
    for split, index in itertools.product(CONFIG.splits, range(5)):
        drawn = draw_scene(CONFIG, split, index)
        pinned.update(drawn.image().tobytes())
        pinned.update(json.dumps([to_coco(obj, index, 1) for obj in drawn.objects]).encode())
    assert pinned.hexdigest() == "9dbf2619cecce4b113cd74b3836ff82fe5ef4f39127e848ab30376ff36363e50"


def test_neither_shape_nor_texture_alone_tells_the_class():
    kinds = [tuple(shape.name.split()) for shape in HardScene.shapes]
    classes = kinds[: HardScene.num_classes]
    assert len(set(kinds)) == len(kinds) == 24 and len(classes) == 8
    for texture, shape in classes:
        other_texture = [kind for kind in kinds if kind[1] == shape and kind[0] != texture]
        other_shape = [kind for kind in kinds if kind[0] == texture and kind[1] != shape]
        assert len(other_texture) == 3 and len(other_shape) == 5


def test_splits_share_no_image_and_no_layout():
    drawn = [draw_scene(CONFIG, split, index) for split in CONFIG.splits for index in range(15)]
    images = [each.image().tobytes() for each in drawn]
    placed = [obj.region.tobytes() for each in drawn for obj in each.objects]
    assert len(set(images)) == len(images) and len(set(placed)) == len(placed)


def test_the_study_registers_its_dataset():
    for split in ("train", "val", "tune"):
        assert f"gw_synthetic_hard_{split}" in DatasetCatalog
    assert MetadataCatalog.get("gw_synthetic_hard_tune").thing_classes == list(CONFIG.class_names)
