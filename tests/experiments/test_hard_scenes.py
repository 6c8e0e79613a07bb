"""The study's dataset: what tells the class, bars, splits without leaks, registration."""

import hashlib
import itertools
import json

from detectron2.data import DatasetCatalog, MetadataCatalog

from experiments.small_batch.dataset import HardSyntheticConfig
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


def test_the_study_registers_its_dataset():
    for split in ("train", "val", "tune"):
        assert f"gw_synthetic_hard_{split}" in DatasetCatalog
    assert MetadataCatalog.get("gw_synthetic_hard_tune").thing_classes == list(CONFIG.class_names)
