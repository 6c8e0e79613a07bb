"""Datasets of a user: read from a yaml, registered, recorded in a run folder, and their classes."""

import json
import os
import shutil
import statistics

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
from gw_detectron.workbench.dataset.coco_content import read_json
from gw_detectron.workbench.dataset.data_fit import training_scale
from gw_detectron.workbench.dataset.metadata import class_metadata, classes_of
from gw_detectron.workbench.dataset.registration import record_datasets
from gw_detectron.workbench.dataset.source import own_source

from ...photos import CLASSES, photo_names, write_photos

FILES = {"json": "annotations.json", "images": "photos"}


@pytest.fixture
def folder(tmp_path):
    write_photos(tmp_path, photo_names(12))
    return tmp_path


@pytest.fixture
def files(folder):
    """The paths of the annotations and of the folder of images."""
    return str(folder / "annotations.json"), str(folder / "photos")


@pytest.fixture
def write(folder):
    """Return a function that writes a yaml, given as its text or content, and returns its path."""

    def write(tree):
        path = folder / "datasets.yaml"
        path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
        return str(path)

    return write


def split_of(path, images):
    """Return a file with a quarter of its images for validation."""
    dataset = CocoDataset(path, images, 0.25)
    return CocoDatasets({"table_train": dataset})


def config_of(train, test):
    cfg = default_config()
    cfg.DATASETS.TRAIN = train
    cfg.DATASETS.TEST = test
    return cfg


def image_counts():
    train = DatasetCatalog.get("table_train")
    val = DatasetCatalog.get("table_val")
    return len(train), len(val)


def test_a_yaml_registers_datasets_for_detectron2(write, folder):
    points = {
        "keypoint_names": ["left", "right", "top"],
        "keypoint_flip_map": [["left", "right"]],
    }

    datasets = read_datasets(write({"train": {"table": FILES | points}}))
    register_datasets(datasets, str(folder / "run"))

    assert datasets.train["table"].json == str(folder / "annotations.json")
    records = DatasetCatalog.get("table")
    assert len(records) == 12
    assert os.path.isfile(records[0]["file_name"])

    metadata = MetadataCatalog.get("table")
    assert metadata.thing_classes == CLASSES
    assert metadata.thing_dataset_id_to_contiguous_id == {2: 0, 7: 1, 40: 2}
    assert metadata.keypoint_names == ["left", "right", "top"]
    assert metadata.keypoint_flip_map == [("left", "right")]
    assert metadata.evaluator_type == "coco"


@pytest.mark.parametrize(
    ("names", "flips"),
    [
        (["nose", "left_eye", "right_eye", "left_ear"], [("left_eye", "right_eye")]),
        (["LeftWing", "Tail", "RightWing"], [("LeftWing", "RightWing")]),
        (
            ["L_eye", "R_eye", "eye_l", "eye_r"],
            [("L_eye", "R_eye"), ("eye_l", "eye_r")],
        ),
        (["tail", "tair", "LA1", "RA1"], []),
    ],
)
def test_keypoints_are_named_by_the_categories(folder, files, names, flips):
    path = folder / "annotations.json"
    content = json.loads(path.read_text())
    for category in content["categories"]:
        category["keypoints"] = names
    path.write_text(json.dumps(content))
    datasets = split_of(*files)

    register_datasets(datasets, str(folder / "run"))

    for name in ("table_train", "table_val"):
        metadata = MetadataCatalog.get(name)
        assert metadata.keypoint_names == names
        assert metadata.keypoint_flip_map == flips

    # categories that disagree name none
    content["categories"][0]["keypoints"] = names[::-1]
    path.write_text(json.dumps(content))
    register_datasets(datasets, str(folder / "run"))
    assert MetadataCatalog.get("table_train").get("keypoint_names") is None


def test_the_scale_of_training_images_needs_no_second_parse(write, folder):
    register_datasets(read_datasets(write({"train": {"table": FILES}})), str(folder))
    sizes = read_json(str(folder / FILES["json"]))["images"]
    source = own_source("table")
    assert source.fingerprint
    DatasetCatalog.get("table")
    cfg = config_of(("table",), ())
    cfg.INPUT.MIN_SIZE_TRAIN = (40, 50, 60)

    factors = [50 / min(image["width"], image["height"]) for image in sizes]
    assert training_scale(cfg) == pytest.approx(statistics.median(factors))
    cfg.INPUT.MAX_SIZE_TRAIN = 30
    factors = [30 / max(image["width"], image["height"]) for image in sizes]
    assert training_scale(cfg) == pytest.approx(statistics.median(factors))
    cfg.INPUT.MIN_SIZE_TRAIN = (0,)
    assert training_scale(cfg) == 1
    assert source.labels.content is None

    # not of this package
    assert training_scale(config_of(("coco_2017_train",), ())) == 0
    assert training_scale(config_of((), ())) == 0


def test_a_split_has_two_names_and_one_record(write, folder):
    given = read_datasets(
        write({"train": {"table_train": FILES | {"val_fraction": 0.25}}})
    )
    run = folder / "run"
    run.mkdir()

    registered = register_datasets(given, str(run))

    assert list(registered.train) == ["table_train"]
    assert list(registered.val) == ["table_val"]
    assert list(run.iterdir()) == []
    assert sum(image_counts()) == 12
    assert min(image_counts()) > 0


def test_a_run_folder_is_enough_elsewhere_and_when_the_source_has_changed(
    folder, files
):
    given = split_of(*files)
    run = folder / "run"
    (run / "inference").mkdir(parents=True)
    register_datasets(given, str(run))
    before = image_counts()

    trained = config_of(("table_train",), ("table_val", "coco_2017_val"))
    record_datasets(trained, str(run))
    inference = str(run / "inference")
    record_datasets(config_of((), ("table_val",)), inference, str(run))
    write_photos(folder, photo_names(12, first=50))
    moved = shutil.move(run, folder / "moved")

    again = read_datasets(str(moved / "datasets.yaml"))
    val = str(moved / "datasets" / "table_val.json")
    assert again.val["table_val"].json == val
    inference = moved / "inference" / "datasets.yaml"
    assert read_datasets(str(inference)).val["table_val"].json == val

    register_datasets(again, "unused")
    assert image_counts() == before
    assert not os.path.exists("unused")


def test_derived_files_are_written_when_the_run_begins(folder, files):
    run = folder / "run"
    run.mkdir()
    register_datasets(split_of(*files), str(run))
    cfg = config_of(("table_train",), ("table_val",))
    train, val = own_source("table_train"), own_source("table_val")
    digest = val.sha256()

    records = DatasetCatalog.get("table_train")
    assert list(run.iterdir()) == []
    record_datasets(cfg, str(run))

    names = {path.name for path in (run / "datasets").iterdir()}
    assert names == {"table_train.json", "table_val.json"}
    assert val.sha256() == digest
    assert DatasetCatalog.get("table_train") == records  # read from the file
    assert own_source("coco_2017_val") is None
    assert train.labels.path == files[0]


def test_a_split_does_not_replace_its_source(folder, files):
    annotations, images = files
    own = folder / "run" / "datasets" / "table_train.json"
    own.parent.mkdir(parents=True)
    shutil.copy(annotations, own)
    datasets = split_of(str(own), images)

    with pytest.raises(ConfigError, match="'table_train'"):
        register_datasets(datasets, str(folder / "run"))
    register_datasets(datasets, str(folder / "other"))


@pytest.mark.parametrize("content", [b"{", b"\x1f\x8b", b"null"])
def test_a_file_that_cannot_be_split(folder, files, content):
    path = folder / "annotations.json"
    path.write_bytes(content)
    datasets = split_of(*files)

    with pytest.raises(DataError, match=f"'{path}'"):
        register_datasets(datasets, str(folder / "run"))


@pytest.mark.parametrize(
    "name", ["coco_2017_train", "a/b", "n" * 201, "\N{CJK UNIFIED IDEOGRAPH-732B}" * 67]
)
def test_names_that_cannot_be_registered(tmp_path, files, name):
    datasets = CocoDatasets({name: CocoDataset(*files)})
    folder = str(tmp_path)

    with pytest.raises(ConfigError, match=f"'{name}'"):
        register_datasets(datasets, folder)


def test_the_validation_of_a_split_needs_a_name_of_its_own(tmp_path, files):
    datasets = split_of(*files)
    datasets.val["table_val"] = CocoDataset(*files)
    folder = str(tmp_path)

    with pytest.raises(ConfigError, match="'table_val'"):
        register_datasets(datasets, folder)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("train: [", "datasets.yaml"),
        ("train: !!python/name:os.system", "os.system"),
        ({"trian": {}}, "'trian'. Similar: train"),
        ({"train": {"a": "annotations.json"}}, r"train\.a"),
        (
            {"train": {"a": FILES | {"image": "x"}}},
            r"'train\.a\.image'. Similar: images",
        ),
        ({"val": {"a": FILES | {"val_fraction": 0.5}}}, r"val\.a\.val_fraction"),
        ({"train": {"a": FILES | {"val_fraction": 1}}}, "val_fraction"),
        ({"train": {"a": FILES | {"val_fraction": "0.1"}}}, "val_fraction"),
    ],
)
def test_a_yaml_that_cannot_be_used(write, tree, words):
    path = write(tree)

    with pytest.raises(ConfigError, match=words) as raised:
        read_datasets(path)

    assert "datasets.yaml'" in str(raised.value)


def test_a_yaml_that_does_not_exist():
    with pytest.raises(MissingFileError, match="none.yaml"):
        read_datasets("none.yaml")


# --- the classes of a config ---


def metadata_of(train, test=(), trained=None):
    return class_metadata(config_of(train, test), trained)


def test_the_classes_of_a_registered_dataset(small_dataset):
    DatasetCatalog.get("gw_synthetic_val")
    val = metadata_of(("coco_2017_train",), ("gw_synthetic_val",))
    assert val.thing_classes[0] == "disk"
    assert 1 in val.thing_dataset_id_to_contiguous_id

    train = metadata_of(("coco_2017_train",), ("unknown",))
    assert len(train.thing_classes) == 80

    assert classes_of(metadata_of(("unknown",))) == {}
    assert classes_of(Metadata(thing_classes=["a", "b"])) == {0: "a", 1: "b"}


def test_the_classes_of_a_checkpoint_decide():
    coco = ("coco_2017_train",)
    other = {7: "cup", 2: "fork"}
    same = classes_of(metadata_of(coco))

    assert classes_of(metadata_of(coco, trained=other)) == other
    assert metadata_of(coco, trained=same).thing_colors  # which only the dataset has
