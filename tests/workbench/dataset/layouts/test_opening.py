"""Layouts of labels are recognized, paired with photos, and become the dataset of a run."""

import json
import shutil
from pathlib import Path

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from gw_detectron.errors import ConfigError, DataError
from gw_detectron.workbench.dataset import (
    CocoDataset,
    CocoDatasets,
    auto_config,
    read_datasets,
    register_datasets,
)
from gw_detectron.workbench.dataset.layouts import read_labels
from gw_detectron.workbench.dataset.source import own_source
from gw_detectron.workbench.run.request import DatasetFlags

from ....photos import photo_names, write_photos
from ...sound_run import config
from .test_voc import voc_object, voc_text, write_photo

BOX = "0 0.5 0.5 0.5 0.5\n"
LABELME = '{"version": "5.5.0", "shapes": [], "imagePath": "a.jpg"}'


@pytest.fixture
def voc(tmp_path):
    """A folder with five photos of 40 x 20 pixels, and .xml files of cats and dogs."""
    for number in range(5):
        write_photo(tmp_path / f"voc/photos/{number}.jpg")
        name = "cat" if number % 2 else "dog"
        text = voc_text(voc_object(name), voc_object("cat", (5, 5, 20, 20)))
        (tmp_path / f"voc/photos/{number}.xml").write_text(text)
    return str(tmp_path / "voc")


@pytest.fixture
def yolo(tmp_path):
    """A data.yaml with a photo to train on and one for validation."""
    for part in ("train", "val"):
        write_photo(tmp_path / f"yolo/images/{part}/0.jpg")
        label = tmp_path / f"yolo/labels/{part}/0.txt"
        label.parent.mkdir(parents=True)
        label.write_text(BOX)
    path = tmp_path / "yolo/data.yaml"
    path.write_text("train: images/train\nval: images/val\nnames: [cat]\n")
    return str(path)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "found: no file"),
        ({"a.jpg": "", "b.csv": "", "c.jpg": ""}, "found: 2 .jpg, 1 .csv"),
        # of KITTI
        ({"a.txt": "Car 0.00 0 -1.57 614.24"}, "found: 1 .txt"),
        ({"a.json": "{}", "b.json": "{}"}, "found: 2 .json"),
        (dict.fromkeys(("a.json", "b.json"), LABELME), "2 files of LabelMe"),
        ({"a.xml": "<annotation/>", "b.txt": BOX}, "Pascal VOC .* and of YOLO"),
        ({"labels/a.txt": BOX}, "no photos for the labels"),
    ],
)
def test_folders_that_are_refused(tmp_path, files, told):
    (tmp_path / "data").mkdir()
    for name, text in files.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    with pytest.raises(DataError, match=told):
        read_labels(str(tmp_path / "data"))


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.xml", "<annotation/>", "the labels of one photo"),
        ("a.txt", BOX, "the labels of one photo"),
        ("list.txt", "a.jpg\n", "line 1: no photo"),
        ("list.txt", "\n", "list.txt': names no photo"),
        ("ImageSets/list.txt", "\n", "list.txt': names no photo"),
    ],
)
def test_files_in_place_of_folders_are_refused(tmp_path, name, text, told):
    write_photo(tmp_path / "a.png")
    (tmp_path / "classes.txt").write_text("cat\n")
    (tmp_path / "ImageSets").mkdir()
    (tmp_path / name).write_text(text)

    with pytest.raises(DataError, match=told):
        read_labels(str(tmp_path / name))


def test_the_only_json_of_a_folder_is_read(tmp_path):
    content = write_photos(tmp_path, photo_names(2))
    (tmp_path / "annotations.json").rename(tmp_path / "photos/_annotations.coco.json")

    labels = read_labels(str(tmp_path / "photos"))

    assert labels.content == content
    assert labels.path == str(tmp_path / "photos/_annotations.coco.json")


def test_photos_of_one_name_are_told_apart_by_their_folders(tmp_path):
    (tmp_path / "classes.txt").write_text("cat\n")
    for part in ("cam1", "cam2"):
        write_photo(tmp_path / part / "images/0.jpg")
        (tmp_path / part / "labels").mkdir()
        (tmp_path / part / "labels/0.txt").write_text(BOX)
    labels = read_labels(str(tmp_path))
    assert len(labels.content["annotations"]) == 2

    # of which it could be either
    (tmp_path / "cam2/labels/0.txt").rename(tmp_path / "0.txt")
    with pytest.raises(DataError, match="several photos have its name"):
        read_labels(str(tmp_path))


def test_labels_of_the_validation_do_not_fit_photos_of_the_training(tmp_path):
    (tmp_path / "classes.txt").write_text("cat\n")
    write_photo(tmp_path / "images/train/0.jpg")
    (tmp_path / "labels/val").mkdir(parents=True)
    (tmp_path / "labels/val/0.txt").write_text(BOX)

    with pytest.raises(DataError, match="none has the name of one of 1 photos"):
        read_labels(str(tmp_path / "labels/val"), str(tmp_path / "images/train"))


def test_two_labels_of_one_photo_are_refused(tmp_path):
    (tmp_path / "classes.txt").write_text("cat\n")
    write_photo(tmp_path / "0.jpg")
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.txt").write_text(BOX)

    with pytest.raises(DataError, match="both are labels of"):
        read_labels(str(tmp_path))


def test_a_split_of_a_folder_is_registered_and_written(tmp_path, voc, caplog):
    given = CocoDatasets({"table_train": CocoDataset(voc, val_fraction=0.4)})

    register_datasets(given, str(tmp_path / "run"))

    records = DatasetCatalog.get("table_train") + DatasetCatalog.get("table_val")
    assert len(records) == 5
    assert all(record["annotations"] for record in records)
    source = own_source("table_train")
    with caplog.at_level("INFO"):
        source.write()
    written = json.loads((tmp_path / "run/datasets/table_train.json").read_text())
    assert written == source.content
    photos = len(written["images"])
    summary = f"Pascal VOC, {photos} photos in '{voc}/photos', {2 * photos} objects"
    assert summary in caplog.text
    assert "classes: cat, dog" in caplog.text
    assert MetadataCatalog.get("table_val").thing_classes == ["cat", "dog"]


def test_a_validation_of_fewer_classes_has_those_of_the_training(tmp_path, voc):
    write_photo(tmp_path / "val/9.jpg")
    (tmp_path / "val/9.xml").write_text(voc_text(voc_object("dog")))
    given = CocoDatasets(
        {"table_train": CocoDataset(voc)},
        {"table_val": CocoDataset(str(tmp_path / "val"))},
    )

    register_datasets(given, str(tmp_path / "run"))

    assert MetadataCatalog.get("table_val").thing_classes == ["cat", "dog"]
    (record,) = DatasetCatalog.get("table_val")
    assert record["annotations"][0]["category_id"] == 1


def test_the_folder_of_the_photos_is_told(tmp_path, voc):
    labels = tmp_path / "labels only"
    labels.mkdir()
    for xml in Path(voc).rglob("*.xml"):
        shutil.copy(xml, labels)

    summary = read_labels(str(labels)).summary()

    assert f"5 photos in '{tmp_path / 'voc/photos'}', 10 objects" in summary


def test_a_data_yaml_brings_its_validation(yolo):
    datasets = DatasetFlags(train_json=yolo).read()
    split = DatasetFlags(train_json=yolo, val_fraction=0.5).read()

    assert datasets == CocoDatasets(
        {"custom_train": CocoDataset(yolo)}, {"custom_val": CocoDataset(yolo)}
    )
    assert not split.val


def test_the_parts_of_a_data_yaml_are_registered(tmp_path, yolo):
    register_datasets(DatasetFlags(train_json=yolo).read(), str(tmp_path / "run"))

    for part in ("train", "val"):
        (record,) = DatasetCatalog.get(f"custom_{part}")
        assert record["file_name"].endswith(f"/images/{part}/0.jpg")


def test_errors_of_labels_are_kept_for_the_checks(tmp_path, voc):
    (tmp_path / "voc/photos/3.xml").write_text("<annotation>")

    register_datasets(CocoDatasets({"t": CocoDataset(voc)}), str(tmp_path / "run"))

    with pytest.raises(DataError, match=r"3\.xml': cannot be read"):
        own_source("t").records()


def test_a_datasets_yaml_takes_folders(tmp_path, voc, yolo):
    path = tmp_path / "datasets.yaml"
    path.write_text("train: {a: {json: voc}, b: {json: yolo, images: yolo}}\n")
    datasets = read_datasets(str(path))
    assert datasets.train["a"] == CocoDataset(voc)
    assert datasets.train["b"].images == str(tmp_path / "yolo")

    path.write_text("train: {a: {json: voc.json}}\n")
    with pytest.raises(ConfigError, match=r"train.a.images: not given.*'voc\.json'"):
        read_datasets(str(path))
    path.write_text("train: {a: {images: voc}}\n")
    with pytest.raises(ConfigError, match="train.a.json: not given"):
        read_datasets(str(path))
    with pytest.raises(ConfigError, match="a data.yaml of YOLO"):
        read_datasets(yolo)


def test_auto_config_reads_a_folder(tmp_path, voc):
    cfg = config(tmp_path)

    auto_config(cfg, voc, "")

    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 2


def test_a_truncated_photo_is_named(tmp_path, voc):
    (tmp_path / "voc/photos/2.jpg").write_bytes(b"\xff\xd8")

    with pytest.raises(DataError, match=r"2\.jpg"):
        read_labels(voc)


def test_linked_folders_are_followed_once(tmp_path, voc):
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/data").symlink_to(voc)
    (tmp_path / "voc/again").symlink_to(voc)

    labels = read_labels(str(tmp_path / "linked"))

    images = labels.content["images"]
    assert len(images) == 5
    assert all(Path(labels.images, image["file_name"]).is_file() for image in images)
