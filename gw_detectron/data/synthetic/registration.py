"""Register the synthetic datasets with Detectron2."""

import os
from pathlib import Path
from typing import IO, Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances, register_coco_panoptic_separated
from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler

from .annotations import KEYPOINTS
from .generation import image_folders, json_file, make_synthetic
from .panoptic import SEMANTIC_CLASSES
from .synthetic_config import HardSyntheticConfig, SyntheticConfig


class _SyntheticPathHandler(PathHandler):
    """Generate a dataset when one of its JSON files is opened.

    Detectron2 opens it in the loader or the evaluator. Not a ``NativePathHandler``: iopath would then use it for all
    local files.
    """

    def __init__(self, root: str, config: SyntheticConfig) -> None:
        super().__init__()
        self.root, self.config = root, config

    def _get_supported_prefixes(self) -> list[str]:
        return [str(json_file(Path(self.root, self.config.folder), split)) for split in self.config.splits]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        make_synthetic(self.root, self.config)
        return path

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> IO[Any]:
        return open(self._get_local_path(path), mode, buffering, **kwargs)

    def _exists(self, path: str, **kwargs: Any) -> bool:
        return os.path.exists(path)

    def _isfile(self, path: str, **kwargs: Any) -> bool:
        return os.path.isfile(path)


def register_synthetic(root: str | os.PathLike[str] | None = None, config: SyntheticConfig | None = None) -> None:
    """Register a synthetic dataset, or both; the files are generated on first use.

    The names are `gw_synthetic_train` and `gw_synthetic_val`, and `gw_synthetic_hard_train`, `gw_synthetic_hard_val`
    and `gw_synthetic_hard_tune`. Names that end in `_panoptic_separated`, such as
    `gw_synthetic_val_panoptic_separated`, are the same images with panoptic and semantic ground truth, registered as
    Detectron2 registers COCO's for Panoptic FPN.

    A second call replaces the root and the parameters of the first.

    Args:
        root: folder of datasets; None means the variable DETECTRON2_DATASETS, else "datasets".
        config: the dataset and its parameters; None means both datasets with the defaults.
    """
    if root is None:
        root = os.getenv("DETECTRON2_DATASETS", "datasets")
    root = os.path.expanduser(os.fspath(root))
    for each in (config,) if config else (SyntheticConfig(), HardSyntheticConfig()):
        _register(root, each)


def _register(root: str, config: SyntheticConfig) -> None:
    PathManager.register_handler(_SyntheticPathHandler(root, config), allow_override=True)
    background_id = len(config.class_names) + 1
    class_ids = {i: i - 1 for i in range(1, background_id)}
    things = {"thing_classes": list(config.class_names), "thing_dataset_id_to_contiguous_id": class_ids}
    stuff = {"stuff_classes": list(SEMANTIC_CLASSES), "stuff_dataset_id_to_contiguous_id": {0: 0, background_id: 1}}
    keypoints = {"keypoint_names": list(KEYPOINTS), "keypoint_flip_map": [("left", "right")]}
    for split in config.splits:
        name, folder = f"{config.folder}_{split}", Path(root, config.folder)
        instances, panoptic = (str(json_file(folder, split, task)) for task in ("instances", "panoptic"))
        images, segments, semantic = (str(path) for path, _ in image_folders(folder, split))
        if MetadataCatalog.get(name).get("json_file") == instances:
            continue
        # Metadata cannot be changed: remove the entries of another root first.
        for variant in ("", "_panoptic_separated", "_panoptic_stuffonly"):
            DatasetCatalog.pop(name + variant, None)
            MetadataCatalog.pop(name + variant, None)
        register_coco_instances(name, things | keypoints, instances, images)
        register_coco_panoptic_separated(
            f"{name}_panoptic", things | stuff, images, segments, panoptic, semantic, instances
        )
