"""Datasets of a user: read from a yaml, registered with Detectron2, recorded in a run folder, and their classes."""

import json
import os
import shutil

import pytest
import yaml
from detectron2.data import DatasetCatalog, Metadata, MetadataCatalog

from gw_detectron.config import default_config
from gw_detectron.errors import ConfigError, DataError, MissingFileError
from gw_detectron.workbench.dataset import (
    CocoDataset,
    CocoDatasets,
    read_datasets,
    register_datasets,
)
from gw_detectron.workbench.dataset.datasets_yaml import record_datasets
from gw_detectron.workbench.dataset.source import (
    class_metadata,
    classes_of,
    registered_datasets,
)

from ...photos import CLASSES, photo_names, write_photos


@pytest.fixture
def folder(tmp_path):
    write_photos(tmp_path, photo_names(12))
    return tmp_path


@pytest.fixture
def write(folder):
    def write(tree):
        path = folder / "datasets.yaml"
        path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
        return str(path)

    return write


FILES = {"json": "annotations.json", "images": "photos"}


def test_what_detectron2_reads(write, folder):
    points = {
        "keypoint_names": ["left", "right", "top"],
        "keypoint_flip_map": [["left", "right"]],
    }
    found = read_datasets(write({"train": {"table": FILES | points}}))
    assert found.train["table"].json == str(folder / "annotations.json")
    register_datasets(found, str(folder / "run"))
    records = DatasetCatalog.get("table")
    assert len(records) == 12 and os.path.isfile(records[0]["file_name"])
    metadata = MetadataCatalog.get("table")
    assert metadata.thing_classes == CLASSES
    assert metadata.thing_dataset_id_to_contiguous_id == {2: 0, 7: 1, 40: 2}
    assert metadata.keypoint_names == [
        "left",
        "right",
        "top",
    ] and metadata.keypoint_flip_map == [("left", "right")]
    assert metadata.evaluator_type == "coco"


@pytest.mark.parametrize(
    ("names", "flips"),
    [
        (["nose", "left_eye", "right_eye", "left_ear"], [("left_eye", "right_eye")]),
        (["LeftWing", "Tail", "RightWing"], [("LeftWing", "RightWing")]),
    ],
)
def test_keypoints_are_named_by_the_categories(folder, names, flips):
    path = folder / "annotations.json"
    content = json.loads(path.read_text())
    content["categories"] = [each | {"keypoints": names} for each in content["categories"]]
    path.write_text(json.dumps(content))
    dataset = CocoDataset(str(path), str(folder / "photos"), 0.25)
    register_datasets(CocoDatasets({"table_train": dataset}), str(folder / "run"))
    for name in ("table_train", "table_val"):
        metadata = MetadataCatalog.get(name)
        assert (metadata.keypoint_names, metadata.keypoint_flip_map) == (names, flips)
    content["categories"][0]["keypoints"] = names[::-1]
    path.write_text(json.dumps(content))
    register_datasets(CocoDatasets({"table_train": dataset}), str(folder / "run"))
    assert MetadataCatalog.get("table_train").get("keypoint_names") is None


def test_a_split_has_two_names_and_one_record(write, folder):
    given = read_datasets(write({"train": {"table_train": FILES | {"val_fraction": 0.25}}}))
    run = folder / "run"
    run.mkdir()
    found = register_datasets(given, str(run))
    assert list(found.train) == ["table_train"] and list(found.val) == ["table_val"]
    assert list(run.iterdir()) == []
    record_datasets(
        registered_datasets(["table_train"], ["table_val", "coco_2017_val"]), str(run)
    )
    first = [len(DatasetCatalog.get(name)) for name in ("table_train", "table_val")]
    assert sum(first) == 12 and min(first) > 0

    # the run folder alone is enough, elsewhere and when the source has changed
    (run / "inference").mkdir()
    record_datasets(registered_datasets([], ["table_val"]), str(run / "inference"), str(run))
    write_photos(folder, photo_names(12, first=50))
    moved = shutil.move(run, folder / "moved")
    again = read_datasets(str(moved / "datasets.yaml"))
    for found in (again, read_datasets(str(moved / "inference" / "datasets.yaml"))):
        assert found.val["table_val"].json == str(moved / "datasets" / "table_val.json")
    register_datasets(again, "unused")
    assert [len(DatasetCatalog.get(name)) for name in ("table_train", "table_val")] == first
    assert not os.path.exists("unused")


def test_a_file_that_cannot_be_split(folder):
    own = folder / "run" / "datasets" / "table_train.json"
    own.parent.mkdir(parents=True)
    shutil.copy(folder / "annotations.json", own)
    given = CocoDatasets({"table_train": CocoDataset(str(own), str(folder / "photos"), 0.25)})
    with pytest.raises(ConfigError, match=r"'table_train'"):
        register_datasets(given, str(folder / "run"))
    register_datasets(given, str(folder / "other"))
    for text in (b"{", b"\x1f\x8b"):
        own.write_bytes(text)
        with pytest.raises(DataError, match=rf"'{own}': invalid JSON"):
            register_datasets(given, str(folder / "other"))


@pytest.mark.parametrize(
    ("train", "val", "words"),
    [
        (["coco_2017_train"], [], "'coco_2017_train'"),
        (["a/b"], [], "'a/b'"),
        (["split:table_train"], ["table_val"], "'table_val'"),
    ],
)
def test_names_that_cannot_be_registered(folder, train, val, words):
    def named(names):
        files = (str(folder / "annotations.json"), str(folder / "photos"))
        return {
            name.removeprefix("split:"): CocoDataset(*files, 0.5 * name.startswith("split:"))
            for name in names
        }

    with pytest.raises(ConfigError, match=words):
        register_datasets(CocoDatasets(named(train), named(val)), str(folder))


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("train: [", "datasets.yaml"),
        ("train: !!python/name:os.system", "os.system"),
        ({"trian": {}}, "'trian'. Similar: train"),
        ({"train": {"a": "annotations.json"}}, r"train\.a"),
        ({"train": {"a": FILES | {"image": "x"}}}, r"'train\.a\.image'. Similar: images"),
        ({"val": {"a": FILES | {"val_fraction": 0.5}}}, r"val\.a\.val_fraction"),
        ({"train": {"a": FILES | {"val_fraction": 1}}}, "val_fraction"),
        ({"train": {"a": FILES | {"val_fraction": "0.1"}}}, "val_fraction"),
    ],
)
def test_a_yaml_that_cannot_be_used(write, tree, words):
    with pytest.raises(ConfigError, match=words) as raised:
        read_datasets(write(tree))
    assert "datasets.yaml'" in str(raised.value)


def test_a_yaml_that_does_not_exist():
    with pytest.raises(MissingFileError, match=r"--datasets \('none.yaml'\)"):
        read_datasets("none.yaml")


# --- the classes of a config ----------------------------------------------------------------------------


def config(train=(), test=()):
    cfg = default_config()
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = train, test
    return cfg


def test_the_classes_of_a_registered_dataset():
    val, train = (
        config(("coco_2017_train",), ("gw_synthetic_val",)),
        config(("coco_2017_train",), ("unknown",)),
    )
    assert (
        class_metadata(val).thing_classes[0] == "disk"
        and 1 in class_metadata(val).thing_dataset_id_to_contiguous_id
    )
    assert len(class_metadata(train).thing_classes) == 80
    assert classes_of(class_metadata(config(("unknown",)))) == {}
    # of a checkpoint: they decide, and where they are those of the dataset, the dataset has the colors
    trained = {7: "cup", 2: "fork"}
    assert classes_of(class_metadata(train, trained)) == trained
    assert class_metadata(train, classes_of(class_metadata(train))).thing_colors
    assert classes_of(Metadata(thing_classes=["a", "b"])) == {0: "a", 1: "b"}
