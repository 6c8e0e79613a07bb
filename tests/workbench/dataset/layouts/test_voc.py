"""Pascal VOC: boxes, classes and photos of .xml files in any folders, and files that are refused."""

import numpy as np
import pytest
from PIL import ExifTags, Image

from gw_detectron.errors import DataError
from gw_detectron.workbench.dataset.layouts import read_labels
from gw_detectron.workbench.images import read_image

ROTATED = "<object><name>dog</name><robndbox><cx>5</cx></robndbox></object>"


def voc_object(name="dog", box=(1, 1, 9, 9), difficult=0):
    x, y, right, bottom = box
    return f"""
        <object>
          <name>{name}</name><difficult>{difficult}</difficult>
          <bndbox><xmin>{x}</xmin><ymin>{y}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox>
        </object>"""


def voc_text(*objects, size=None):
    width, height = size or ("", "")
    size = f"<size><width>{width}</width><height>{height}</height></size>"
    return f"<annotation>{size}{''.join(objects)}</annotation>"


def write_photo(path, size=(40, 20)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(path)


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a photo of 40 x 20 pixels and its .xml file."""

    def write(text, name="a", folder="."):
        write_photo(tmp_path / folder / f"{name}.jpg")
        path = tmp_path / folder / f"{name}.xml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path

    return write


def test_boxes_classes_and_difficult_objects(write):
    objects = (
        voc_object("dog", (1, 1, 40, 20)),
        voc_object("cat", (11, 5, 20, 14), difficult=1),
        # ends before it begins
        voc_object("ant", (5, 5, 4, 9)),
    )

    content = read_labels(str(write(voc_text(*objects)))).content

    names = [category["name"] for category in content["categories"]]
    assert names == ["ant", "cat", "dog"]
    rows = content["annotations"]
    assert [row["category_id"] for row in rows] == [3, 2, 1]
    assert [row["iscrowd"] for row in rows] == [0, 1, 0]
    boxes = [row["bbox"] for row in rows]
    assert boxes == [[0, 0, 40, 20], [10, 4, 10, 10], [4, 4, 0, 5]]


@pytest.mark.parametrize("size", [(40, 20), (20, 40), (0, 0), None])
def test_boxes_of_a_photo_that_exif_turns_stay_on_their_object(tmp_path, size):
    """The stored photo is 20 x 40 pixels, the upright one 40 x 20; the box is in the one of ``size``."""
    box = (1, 1, 10, 20) if size == (20, 40) else (21, 1, 40, 10)
    photo = Image.new("RGB", (20, 40))
    # in the upright photo the upper right corner, where the stored one has its upper left corner
    photo.paste((255, 0, 0), (0, 0, 10, 20))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photo.save(tmp_path / "a.png", exif=exif)
    (tmp_path / "a.xml").write_text(voc_text(voc_object(box=box), size=size))

    content = read_labels(str(tmp_path)).content

    (image,), (annotation,) = content["images"], content["annotations"]
    pixels = read_image(tmp_path / "a.png", "RGB")
    assert pixels.shape[:2] == (image["height"], image["width"])
    x, y, width, height = map(int, annotation["bbox"])
    assert (pixels[y : y + height, x : x + width] == (255, 0, 0)).all()
    assert pixels[:, :, 0].astype(bool).sum() == width * height


@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_boxes_of_the_stored_photo_are_turned_by_every_orientation(
    tmp_path, orientation
):
    photo = Image.new("RGB", (20, 40))
    photo.paste((255, 0, 0), (2, 5, 8, 17))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    photo.save(tmp_path / "a.png", exif=exif)
    text = voc_text(voc_object(box=(3, 6, 8, 17)), size=(20, 40))
    (tmp_path / "a.xml").write_text(text)

    (annotation,) = read_labels(str(tmp_path)).content["annotations"]

    rows, columns = np.nonzero(read_image(tmp_path / "a.png", "RGB")[:, :, 0])
    x, y, width, height = annotation["bbox"]
    assert [x, y] == [columns.min(), rows.min()]
    assert [x + width, y + height] == [columns.max() + 1, rows.max() + 1]


@pytest.mark.parametrize(
    ("orientation", "sides", "size", "is_told"),
    [
        (1, (20, 40), (20, 40), False),
        (2, (20, 40), (20, 40), True),
        (3, (20, 40), (20, 40), True),
        (6, (20, 20), (20, 20), True),
        (6, (20, 40), None, True),
        (6, (20, 40), (40, 20), False),
        (6, (20, 40), (20, 40), False),
    ],
)
def test_photos_whose_turn_cannot_be_known_are_counted(
    tmp_path, orientation, sides, size, is_told
):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.new("RGB", sides).save(tmp_path / "a.jpg", exif=exif)
    (tmp_path / "a.xml").write_text(voc_text(voc_object(box=(3, 6, 8, 17)), size=size))

    notes = read_labels(str(tmp_path)).notes

    assert any("1 photos are turned by EXIF" in note for note in notes) is is_told


@pytest.mark.parametrize("encoding", ["gb2312", "shift_jis", "utf-8", "utf-16"])
def test_encodings_and_forms_of_difficult(write, encoding):
    forms = ["Unspecified", "", "False", "True", " 1 "]
    objects = [voc_object("\u5929", difficult=form) for form in forms]
    text = f'<?xml version="1.0" encoding="{encoding}"?>\n{voc_text(*objects)}'

    content = read_labels(str(write(text.encode(encoding)))).content

    assert content["categories"][0]["name"] == "\u5929"
    assert [row["iscrowd"] for row in content["annotations"]] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<annotation>", "a.xml': cannot be read"),
        ("", "a.xml': cannot be read"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><annotation/>", "defines entities"),
        ("<annotations/>", "root is <annotations>"),
        (voc_text(voc_object(), ROTATED), r"a.xml', object 2 \('dog'\): rotated"),
        (voc_text(voc_object(box=("", 1, 2, 3))), "not numbers"),
        (voc_text(voc_object(box=("nan", 1, 2, 3))), "not numbers"),
        (voc_text(voc_object("")), "object 1 .*: has no name"),
        (voc_text(voc_object(), size=(80, 40)), "another size than their photo"),
    ],
)
def test_files_that_are_refused(write, text, told):
    with pytest.raises(DataError, match=told):
        read_labels(str(write(text)))


def test_a_few_wrong_sizes_are_a_note(write):
    write(voc_text(voc_object(), size=(40, 20)), "a")
    write(voc_text(voc_object(), size=(400, 200)), "b")
    folder = write(voc_text(voc_object(), size=(40, 20)), "c")

    labels = read_labels(str(folder))

    assert len(labels.content["annotations"]) == 3
    assert "1 of 3 .xml files have another size" in labels.notes[0]


def test_a_list_of_pascal_voc_chooses_photos(tmp_path):
    for name in ("a", "b", "c", "my photo"):
        write_photo(tmp_path / "JPEGImages" / f"{name}.jpg")
        # masks of the same name
        write_photo(tmp_path / "SegmentationClass" / f"{name}.png")
        xml = tmp_path / "Annotations" / f"{name}.xml"
        xml.parent.mkdir(exist_ok=True)
        xml.write_text(voc_text(voc_object()))
    lists = tmp_path / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    (lists / "val.txt").write_text("a 1\nc -1\nmy photo\n")
    (lists / "wrong.txt").write_text("a\n\nz\n")

    labels = read_labels(str(lists / "val.txt"))

    names = [image["file_name"] for image in labels.content["images"]]
    assert names == [f"JPEGImages/{name}.jpg" for name in ("a", "c", "my photo")]
    assert labels.notes == []
    with pytest.raises(DataError, match=r"wrong.txt', line 3: no file 'z.xml'"):
        read_labels(str(lists / "wrong.txt"))


def test_a_list_of_pascal_voc_takes_annotations_not_a_backup(tmp_path):
    write_photo(tmp_path / "JPEGImages/a.jpg")
    for folder in ("Annotations", "Annotations_old", "backup"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.xml").write_text(voc_text(voc_object(folder)))
    path = tmp_path / "ImageSets/Main/train.txt"
    path.parent.mkdir(parents=True)
    path.write_text("a\n")

    labels = read_labels(str(path))

    (category,) = labels.content["categories"]
    assert category["name"] == "Annotations"
    (tmp_path / "Annotations/a.xml").unlink()
    with pytest.raises(DataError, match="backup/a.xml' and .*_old/a.xml'"):
        read_labels(str(path))


def test_class_names_beside_the_files_are_used_if_they_have_all(write):
    folder = write(voc_text(voc_object("dog")))
    names_file = folder / "classes.txt"

    names_file.write_text("dog\ncat\n")
    both = read_labels(str(folder)).content["categories"]
    names_file.write_text("cat\n")
    only = read_labels(str(folder)).content["categories"]

    assert [category["name"] for category in both] == ["dog", "cat"]
    assert [category["name"] for category in only] == ["dog"]
