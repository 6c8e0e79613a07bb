"""The small dataset of shapes that tests train on: its files, and its registration in a process."""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances

from examples.shapes import ShapesConfig, draw_scene, write_shapes
from examples.shapes.polygons import to_coco

from .other_tasks import KEYPOINTS, register_panoptic, write_other_tasks

SHAPES = ShapesConfig(
    num_train=12, num_val=3, min_side=64, max_side=80, max_objects=3, min_size=0.3
)


def scenes_digest(config: ShapesConfig, count: int) -> str:
    """Hash pixels and annotations of the first scenes of every split."""
    digest = hashlib.sha256()
    for split, index in itertools.product(config.splits, range(count)):
        scene = draw_scene(config, split, index)
        digest.update(scene.image().tobytes())
        annotations = [to_coco(shown, index, 1) for shown in scene.objects]
        digest.update(json.dumps(annotations).encode())
    return digest.hexdigest()


def write_small_shapes(folder: Path) -> None:
    """Write the dataset with ground truth for all tasks."""
    write_shapes(folder, SHAPES)
    write_other_tasks(folder, SHAPES)


def register_shapes(folder: Path) -> None:
    """Register the dataset of a folder by the names that our configs have."""
    classes = SHAPES.class_names
    metadata = {
        "thing_classes": list(classes),
        "thing_dataset_id_to_contiguous_id": {i + 1: i for i in range(len(classes))},
    }
    for split in SHAPES.splits:
        name = f"{SHAPES.name}_{split}"
        file = folder / "annotations" / f"instances_{split}.json"
        register_coco_instances(
            name, metadata | KEYPOINTS, str(file), str(folder / split)
        )
        register_panoptic(f"{name}_panoptic", metadata, folder, split)


@contextlib.contextmanager
def registered(folder: Path) -> Iterator[None]:
    """Register the dataset for a while."""
    before = set(DatasetCatalog)
    register_shapes(folder)
    yield
    for name in set(DatasetCatalog) - before:
        DatasetCatalog.pop(name)
        MetadataCatalog.pop(name)
