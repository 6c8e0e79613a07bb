"""YOLO: data.yaml and folders of .txt files, boxes and polygons, and rows that are refused."""

import pytest
import yaml
from PIL import ExifTags, Image

from gw_detectron.errors import ConfigError, DataError, UserError
from gw_detectron.workbench.dataset.layouts import (
    labels_digest,
    names_validation,
    read_labels,
)

BOX = "1 0.5 0.5 0.5 0.5"
TILTED = "0 0.5 0.2 0.65 0.5 0.5 0.8 0.35 0.5"


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a photo of 40 x 20 pixels in images and its rows in labels."""

    def write(rows, name="train/a"):
        photo = tmp_path / "images" / f"{name}.jpg"
        label = tmp_path / "labels" / f"{name}.txt"
        for path in (photo, label):
            path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 20)).save(photo)
        if rows is not None:
            label.write_text(rows)
        return tmp_path

    return write


def write_yaml(folder, name="data.yaml", **tree):
    path = folder / name
    path.write_text(yaml.safe_dump({"names": ["cat", "dog"], **tree}))
    return str(path)


def file_names(labels):
    return [image["file_name"] for image in labels.content["images"]]


def test_boxes_and_polygons_become_pixels(write):
    folder = write(f"{BOX}\n\n0 0.25 0 1 0 1 0.5 0.25 0.5\n0 0 0 1.004 0 0.5 1\n")
    path = write_yaml(folder, train="images/train")

    box, quad, triangle = read_labels(path).content["annotations"]

    assert (box["category_id"], box["bbox"]) == (2, [10, 5, 20, 10])
    assert "segmentation" not in box
    assert quad["category_id"] == 1
    assert quad["segmentation"] == [[10, 0, 40, 0, 40, 10, 10, 10]]
    assert quad["bbox"] == [10, 0, 30, 10]
    assert triangle["bbox"] == [0, 0, 40, 20]


@pytest.mark.parametrize(
    "given",
    [
        {"train": "images/train", "val": "images/val"},
        {"train": "../images/train", "val": ["../images/val"], "nc": 2},
        {"train": "/content/x/images/train", "val": "/content/x/images/val"},
        {"path": "elsewhere", "train": "images/train", "val": "images/val"},
        {"train": "train.txt", "val": "val.txt", "names": {1: "dog", 0: "cat"}},
    ],
)
def test_a_data_yaml_names_the_photos_of_its_parts(write, given):
    write(BOX, "train/a")
    write(None, "train/empty")
    folder = write(BOX, "val/b")
    (folder / "train.txt").write_text("./images/train/a.jpg\nimages/train/empty.jpg\n")
    # as Darknet and Windows write it
    (folder / "val.txt").write_text("data\\images\\val\\b.jpg\n")
    path = write_yaml(folder, download="import os; os.abort()", **given)

    train, val = read_labels(path), read_labels(path, part="val")
    of_folder = read_labels(str(folder))

    # a photo without a file has no object
    assert file_names(train) == ["images/train/a.jpg", "images/train/empty.jpg"]
    assert file_names(val) == ["images/val/b.jpg"]
    assert of_folder.content == train.content
    names = [category["name"] for category in train.content["categories"]]
    assert names == ["cat", "dog"]
    assert names_validation(path)


@pytest.mark.parametrize(
    ("photo", "label"),
    [
        ("a.jpg", "a.TXT"),
        ("a.jpg", "a.jpg.txt"),
        ("caf\u00e9.jpg", "cafe\u0301.txt"),
        ("at 9.41\u202fPM.png", "at 9.41 PM.txt"),
    ],
)
@pytest.mark.parametrize("with_yaml", [True, False])
def test_label_files_are_found_by_every_name_that_tools_write(
    write, photo, label, with_yaml
):
    folder = write(BOX, "train/b")
    Image.new("RGB", (40, 20)).save(folder / "images/train" / photo)
    (folder / "labels/train" / label).write_text(BOX)
    (folder / "labels/classes.txt").write_text("cat\ndog\n")
    path = str(folder / "labels")
    if with_yaml:
        path = write_yaml(folder, train="images/train")

    labels = read_labels(path)

    assert len(labels.content["annotations"]) == 2
    assert labels.notes == []


@pytest.mark.parametrize("place", ["data.yaml", "labels"])
def test_two_label_files_of_one_photo_are_refused(write, place):
    folder = write(BOX)
    (folder / "labels/train/a.jpg.txt").write_text(BOX)
    write_yaml(folder, train="images/train")

    with pytest.raises(DataError, match="both are labels of .*images/train/a.jpg'"):
        read_labels(str(folder / place))


@pytest.mark.parametrize("with_yaml", [True, False])
def test_a_photo_named_img_does_not_take_the_labels_of_another(write, with_yaml):
    write(BOX, "train/a")
    write(None, "train/a_img")
    write(None, "train/b_img")
    folder = write(BOX, "train/c-image")
    (folder / "labels/train/b.txt").write_text(f"{BOX}\n{BOX}")
    (folder / "labels/classes.txt").write_text("cat\ndog\n")
    path = str(folder / "labels")
    if with_yaml:
        path = write_yaml(folder, train="images/train")

    content = read_labels(path).content

    names = {image["id"]: image["file_name"] for image in content["images"]}
    owners = [names[row["image_id"]].split("/")[-1] for row in content["annotations"]]
    assert sorted(owners) == ["a.jpg", "b_img.jpg", "b_img.jpg", "c-image.jpg"]


def test_a_listed_photo_named_img_does_not_take_the_labels_of_one_beside_it(write):
    write(BOX, "train/a")
    write(None, "train/a_img")
    folder = write(BOX, "train/b")
    (folder / "train.txt").write_text("images/train/a_img.jpg\nimages/train/b.jpg\n")

    content = read_labels(write_yaml(folder, train="train.txt")).content

    (row,) = content["annotations"]
    assert content["images"][row["image_id"] - 1]["file_name"] == "images/train/b.jpg"


def test_label_files_that_are_left_over_are_named(write):
    write(BOX, "train/A")
    write(BOX, "train/of_another_list")
    folder = write(None, "train/B")
    (folder / "labels/train/b.txt").write_text(BOX)
    (folder / "train.txt").write_text("images/train/A.jpg\nimages/train/B.jpg\n")

    labels = read_labels(write_yaml(folder, train="train.txt"))

    assert len(labels.content["annotations"]) == 1
    assert labels.notes == ["1 label files without a photo are left out: b.txt."]


def test_photos_that_are_turned_by_exif_are_told(write):
    folder = write(BOX)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 3
    Image.new("RGB", (40, 20)).save(folder / "images/train/a.jpg", exif=exif)

    labels = read_labels(write_yaml(folder, train="images/train"))

    told = "1 photos are turned by EXIF (images/train/a.jpg). Their labels are taken"
    assert any(note.startswith(told) for note in labels.notes)


@pytest.mark.parametrize("images", ["", "images/train"])
@pytest.mark.parametrize("names_file", ["classes.txt", "obj.names", "names.yaml"])
def test_a_folder_of_labels_has_names_beside_it(write, images, names_file):
    folder = write(BOX)
    (folder / names_file).write_text("cat\ndog\n")
    if names_file.endswith("yaml"):
        write_yaml(folder, names_file)

    labels = read_labels(str(folder / "labels/train"), images and str(folder / images))

    assert file_names(labels) == ["a.jpg"]
    assert labels.images == str(folder / "images/train")
    assert labels.content["annotations"][0]["category_id"] == 2


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_labels_that_begin_with_a_mark(tmp_path, encoding):
    Image.new("RGB", (40, 20)).save(tmp_path / "a.jpg")
    (tmp_path / "a.txt").write_text(BOX, encoding=encoding)
    (tmp_path / "classes.txt").write_text("cat\ndog\n", encoding=encoding)

    labels = read_labels(str(tmp_path))

    assert [category["name"] for category in labels.content["categories"]] == [
        "cat",
        "dog",
    ]
    assert len(labels.content["annotations"]) == 1


def test_labels_beside_photos(tmp_path):
    Image.new("RGB", (40, 20)).save(tmp_path / "a.jpg")
    Image.new("RGB", (40, 20)).save(tmp_path / "b.jpg")
    (tmp_path / "a.txt").write_bytes(f"{BOX}\r\n".encode("utf-16"))
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    (tmp_path / "README.txt").write_text("exported\n")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints/a.txt").write_text(BOX)
    (tmp_path / "c.txt").write_text(BOX)

    labels = read_labels(str(tmp_path))

    assert file_names(labels) == ["a.jpg"]
    assert labels.notes == [
        "1 label files without a photo are left out: c.txt.",
        "1 photos without labels are left out: b.jpg.",
    ]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("2 0.5 0.5 0.5 0.5", r"line 2: class 2, but the 2 names \(cat, dog\)"),
        ("-1 0.5 0.5 0.5 0.5", "line 2: class -1"),
        ("0.5 0.5 0.5 0.5 0.5", "line 2: class 0.5"),
        ("nan 0.5 0.5 0.5 0.5", "line 2: class nan"),
        ("0 0.5 1.5 0.5 0.5", "line 2: 1.5 is not between 0 and 1"),
        ("0 120 80 40 20", "line 2: 120 is not between 0 and 1"),
        ("0 0.5 nan 0.5 0.5", "line 2: nan is not between 0 and 1"),
        ("0 0.5 0.5 0.5 0.5 0.9", "line 2: 6 numbers.*Fix: leave out the confidence"),
        ("0 0.5 0.5 0.5", "line 2: 4 numbers"),
        ("0 0.5 0.5 0.5 0.5 0.5 0.5 0.5", "line 2: 8 numbers"),
        ("cat 0.5 0.5 0.5 0.5", "line 2: not a row of numbers"),
        ("0,0.5,0.5,0.5,0.5", "line 2: not a row of numbers"),
    ],
)
def test_rows_that_are_refused(write, rows, told):
    folder = write(f"{BOX}\n{rows}\n")

    with pytest.raises(DataError, match=rf"labels/train/a.txt', {told}"):
        read_labels(write_yaml(folder, train="images/train"))


def test_rotated_boxes_are_refused_and_other_quadrangles_are_polygons(write):
    folder = write(f"{TILTED}\n{TILTED}\n")
    path = write_yaml(folder, train="images/train")

    with pytest.raises(DataError, match=r"a.txt', line 1: four corners of a rotated"):
        read_labels(path)

    # a plate in perspective, and a polygon of other length beside a rectangle
    write("0 0.1 0.1 0.9 0.2 0.8 0.9 0.2 0.7\n")
    labels = read_labels(path)
    assert len(labels.content["annotations"]) == 1
    assert "four corners" in labels.notes[0]
    write(f"{TILTED}\n0 0.1 0.1 0.9 0.2 0.8 0.9\n")
    assert len(read_labels(path).content["annotations"]) == 2


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"train": "nowhere"}, r"train \('nowhere'\): no folder"),
        ({"train": None}, r"train \(None\): not a folder"),
        ({"train": 3}, r"train \(3\): not a folder"),
        ({"train": [1]}, r"train \(\[1\]\): not a folder"),
        ({"train": "images/empty"}, "holds no photos"),
        ({"train": "list.txt"}, r"list.txt', line 1: no photo"),
        ({"train": "images/train", "names": {0: "cat", 2: "dog"}}, "names: not a list"),
        ({"train": "images/train", "names": "cat"}, "names: not a list"),
        ({"train": "images/train", "names": ["cat", True]}, "yes, no, on and off"),
        ({"train": "images/train", "names": ["cat", ["dog"]]}, "names: not a list"),
        ({"train": "images/train", "names": {}}, "names: not a list"),
        ({"train": "images/train", "kpt_shape": [17, 3]}, "keypoints of YOLO"),
        ({"train": "images/bare"}, "1 photos have no labels"),
    ],
)
def test_a_data_yaml_that_is_refused(write, tree, told):
    write(None, "bare/a")
    folder = write(BOX)
    (folder / "images/empty").mkdir()
    (folder / "list.txt").write_text("gone.jpg\n")

    with pytest.raises(UserError, match=told):
        read_labels(write_yaml(folder, **tree))


@pytest.mark.parametrize("place", [".", "labels/train"])
@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("data.yaml", "names: [cat, dog]\nkpt_shape: [17, 3]\n", "keypoints of YOLO"),
        ("pose.yml", "names: [cat, dog]\nkpt_shape: [17, 3]\n", "keypoints of YOLO"),
        ("data.yaml", "names:\n\t- cat\n", "not a yaml file"),
        ("data.yml", "names: {0: cat, 2: dog}\n", "names: not a list"),
        ("data.yaml", "nc: 2\n", "no names of classes"),
    ],
)
def test_errors_of_a_data_yaml_count_in_its_folders_too(write, place, name, text, told):
    folder = write(BOX)
    (folder / name).write_text(f"{text}train: images/train\n")
    (folder / "classes.txt").write_text("dog\ncat\n")

    with pytest.raises(ConfigError, match=f"{name}'.*{told}"):
        read_labels(str(folder / place))


@pytest.mark.parametrize("place", [".", "labels/train"])
def test_yamls_of_other_programs_are_passed_over(write, place):
    folder = write(BOX)
    (folder / "classes.txt").write_text("dog\ncat\n")
    (folder / "data.yaml").write_text("train: {a: {json: a.json, images: photos}}\n")
    (folder / "network.yaml").write_text("nc: 2\nkpt_shape: [17, 3]\n")
    (folder / "template.yaml").write_text("{{ names }}\n")

    labels = read_labels(str(folder / place))

    assert labels.content["categories"][0]["name"] == "dog"


def test_keypoints_are_told_from_polygons_by_a_yaml_above_classes_txt(write):
    folder = write("0 0.5 0.5 0.2 0.2 0.1 0.1 0.9 0.9")
    (folder / "labels/train/classes.txt").write_text("cat\n")
    write_yaml(folder, kpt_shape=[2, 2])

    with pytest.raises(ConfigError, match="keypoints of YOLO are not read"):
        read_labels(str(folder / "labels/train"))


@pytest.mark.parametrize("place", [".", "labels/train"])
def test_data_yaml_comes_first_and_of_others_there_may_be_one(write, place):
    folder = write(BOX)
    path = str(folder / place)
    write_yaml(folder, "backup.yaml", train="images/train", names=["old", "older"])
    write_yaml(folder, train="images/train")
    categories = read_labels(path).content["categories"]
    assert [category["name"] for category in categories] == ["cat", "dog"]

    (folder / "data.yaml").rename(folder / "new.yaml")
    with pytest.raises(DataError, match=r"several files .*\(backup.yaml, new.yaml\)"):
        read_labels(path)


def test_folds_of_a_cross_validation_have_the_same_names(write):
    folder = write(BOX)
    for name in ("fold1.yaml", "fold2.yaml"):
        write_yaml(folder, name, train="images/train")

    labels = read_labels(str(folder / "labels/train"))

    assert labels.content["categories"][0]["name"] == "cat"
    with pytest.raises(DataError, match="several files"):
        read_labels(str(folder))


def test_several_files_of_names_are_refused(write):
    folder = write(BOX)
    for name in ("new.names", "old.names"):
        (folder / name).write_text(f"cat\n{name}\n")

    with pytest.raises(DataError, match=r"several files .*\(new.names, old.names\)"):
        read_labels(str(folder / "labels"))


def test_blank_lines_may_only_follow_the_names(write):
    folder = write(BOX)
    names_file = folder / "classes.txt"

    names_file.write_text("cat\n dog\n\n \n")
    categories = read_labels(str(folder / "labels")).content["categories"]
    assert [category["name"] for category in categories] == ["cat", "dog"]

    names_file.write_text("cat\n \ndog\n")
    with pytest.raises(DataError, match="classes.txt', line 2: blank"):
        read_labels(str(folder / "labels"))


def test_another_yaml_is_refused(tmp_path):
    path = tmp_path / "datasets.yaml"
    path.write_text("train: {a: {json: a.json, images: photos}}\n")

    with pytest.raises(ConfigError, match="belongs to --datasets"):
        read_labels(str(path))


def test_labels_without_names_are_refused(write):
    folder = write(BOX)

    with pytest.raises(DataError, match="no names of the classes"):
        read_labels(str(folder))


def test_the_digest_covers_labels_and_names_not_photos(write):
    folder = write(BOX)
    path = write_yaml(folder, train="images/train")
    images = str(folder)
    first = labels_digest(path, images)

    Image.new("RGB", (40, 20), "red").save(folder / "images/train/a.jpg")
    assert labels_digest(path, images) == first
    write(BOX.replace("1", "0", 1))
    second = labels_digest(path, images)
    write_yaml(folder, train="images/train", names=["cow", "dog"])
    third = labels_digest(path, images)
    (folder / "labels/train/a.txt").unlink()

    assert len({first, second, third}) == 3
    assert labels_digest(path, images) == ""
