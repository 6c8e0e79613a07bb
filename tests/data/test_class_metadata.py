"""Names and ids of the classes of a config: registered datasets first, then the record of a run."""

import json

import pytest

from gw_detectron.config import default_config
from gw_detectron.data import read_datasets, record_datasets
from gw_detectron.data.class_metadata import class_metadata
from gw_detectron.errors import ConfigError

from ..photos import CATEGORIES, CLASSES


def config(train=(), test=()):
    cfg = default_config()
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = train, test
    return cfg


def write_record(folder, val="val.json", train="train.json"):
    text = (
        f"train:\n  photos_train: {{json: {train}, images: none}}\nval:\n  photos_val: {{json: {val}, images: none}}\n"
    )
    (folder / "datasets.yaml").write_text(text)
    return str(folder / "config.yaml")


def test_a_registered_dataset():
    found = class_metadata(config(("coco_2017_train",), ("gw_synthetic_val",)))
    assert found.thing_classes[0] == "disk" and found.thing_dataset_id_to_contiguous_id[1] == 0
    assert len(class_metadata(config(("coco_2017_train",), ("unknown",))).thing_classes) == 80


def test_the_record_beside_the_config_whose_images_are_elsewhere(tmp_path):
    config_file = write_record(tmp_path)
    (tmp_path / "train.json").write_text(json.dumps({"categories": CATEGORIES}))
    found = class_metadata(config(("photos_train",), ("photos_val",)), config_file)  # there is no val.json
    assert found.thing_classes == CLASSES
    assert found.thing_dataset_id_to_contiguous_id == {2: 0, 7: 1, 40: 2}


@pytest.mark.parametrize("content", ["no json", "[]", "{}", '{"categories": [{"id": 1}]}', '{"categories": 3}'])
def test_unusable_annotation_files_give_no_names(tmp_path, content):
    config_file = write_record(tmp_path)
    (tmp_path / "val.json").write_text(content)
    assert class_metadata(config(test=("photos_val",)), config_file).get("thing_classes", None) is None


def test_a_config_without_a_record(tmp_path):
    for file in (None, str(tmp_path / "config.yaml")):
        assert class_metadata(config(test=("photos_val",)), file).get("thing_classes", None) is None


def test_a_record_with_an_unknown_key(tmp_path):
    (tmp_path / "datasets.yaml").write_text("trian: {}\n")
    with pytest.raises(ConfigError, match="unknown key 'trian'"):
        class_metadata(config(test=("photos_val",)), str(tmp_path / "config.yaml"))


def test_recorded_classes_are_those_of_the_training(tmp_path):
    """Not those that its files have now."""
    config_file = write_record(tmp_path)
    (tmp_path / "val.json").write_text(json.dumps({"categories": CATEGORIES}))
    record_datasets(read_datasets(str(tmp_path / "datasets.yaml"), needed=()), str(tmp_path))
    (tmp_path / "val.json").write_text(json.dumps({"categories": [{"id": 2, "name": "other"}]}))
    found = class_metadata(config(test=("photos_val",)), config_file)
    assert found.thing_classes == CLASSES and found.thing_dataset_id_to_contiguous_id == {2: 0, 7: 1, 40: 2}
    assert read_datasets(str(tmp_path / "datasets.yaml"), needed=()).val.keys() == {"photos_val"}


@pytest.mark.parametrize("categories", ["3", "[1]", "[{id: 1}]"])
def test_recorded_classes_that_somebody_edited(tmp_path, categories):
    (tmp_path / "datasets.yaml").write_text(f"categories: {categories}\n")
    with pytest.raises(ConfigError, match=r"categories: not a list of \{id: 1, name: cup\}. Fix: "):
        class_metadata(config(test=("photos_val",)), str(tmp_path / "config.yaml"))
