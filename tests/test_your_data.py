"""docs/your_data.md: its commands run as they are written, in a folder with photos."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import ExifTags, Image
from pycocotools import mask as coco_mask

from gw_detectron.workbench.commands.train import get_parser
from gw_detectron.workbench.dataset import read_datasets, register_datasets
from gw_detectron.workbench.dataset.annotation_checks import DatasetNeeds, check_coco
from gw_detectron.workbench.images import read_image

from .documentation.pages import blocks, commands, read
from .photos import photo_names, write_photos
from .tiny_run import OPTS, ROOT, config_of, environment, key_words

PAGE = read("docs/your_data.md")
SMALL, ON_GPU, TWO_FILES, RESUME, EVALUATE, OTHER_PHOTOS, TRAINING_PHOTOS = (
    words for words in commands("docs/your_data.md") if words[1] in ("train", "eval")
)


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Go to a folder like that of a user: the repository and, in mydata and more, photos."""
    for name in ("configs", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    for file, first in (("annotations.json", 0), ("train.json", 0), ("val.json", 20)):
        write_photos(tmp_path / "mydata", photo_names(20, first), file)
    write_photos(tmp_path / "more", photo_names(3, first=60))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(command):
    assert command[:2] == ["gw-detectron", "train"]
    return config_of(get_parser().parse_args(command[2:]))


def test_the_commands_for_training(user):
    for command, split in ((SMALL, "custom"), (ON_GPU, "custom"), (TWO_FILES, "table")):
        cfg = config(command)
        datasets = [*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST]
        assert datasets == [f"{split}_train", f"{split}_val"]
        assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 3


def test_the_configs_of_the_table_start_as_it_says(user):
    rows = re.findall(
        r"^\| .* \| `([\w/.-]+\.yaml)` \| (.*) \|$", PAGE, flags=re.MULTILINE
    )
    assert len(rows) == 6
    for name, start in rows:
        cfg = config([*SMALL[:4], "--config-file", f"configs/{name}"])
        weights = cfg.MODEL.WEIGHTS
        assert start == (f"`{weights}`" if weights else "random values")


def test_the_example_of_a_json_is_sound():
    (example,) = blocks("docs/your_data.md", "json")
    for training in (True, False):
        faults = check_coco(json.loads(example), DatasetNeeds(training, masks=True))
        assert faults == ([], [])


def test_the_example_of_a_yaml(user):
    (example,) = blocks("docs/your_data.md", "yaml")
    mydata = user / "mydata"
    (mydata / "datasets.yaml").write_text(example)
    write_photos(mydata / "garden", photo_names(5), "../garden.json")

    named = register_datasets(read_datasets("mydata/datasets.yaml"), "output")

    assert list(named.train) == ["kitchen", "garden"]
    assert list(named.val) == ["garden_val", "kitchen_val"]


def test_voc_boxes_become_coco(tmp_path, monkeypatch):
    for name in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "ImageSets/Main/train.txt").write_text("a\n")
    Image.new("RGB", (40, 20)).save(tmp_path / "JPEGImages/a.jpg")
    objects = (
        voc_object("dog", 0, (1, 1, 40, 20)),
        voc_object("cat", 1, (11, 5, 20, 14)),
        voc_object("ant", 0, (5, 5, 4, 9)),  # has no area
    )
    annotation = f"<annotation>{''.join(objects)}</annotation>"
    (tmp_path / "Annotations/a.xml").write_text(annotation)

    content = convert(monkeypatch, "bccd", tmp_path, "--max-side", "20")

    assert [category["name"] for category in content["categories"]] == [
        "ant",
        "cat",
        "dog",
    ]
    annotations = content["annotations"]  # of dog and cat
    assert [annotation["category_id"] for annotation in annotations] == [3, 2]
    assert [annotation["iscrowd"] for annotation in annotations] == [0, 1]
    assert [annotation["bbox"] for annotation in annotations] == [
        [0, 0, 20, 10],
        [5, 2, 5, 5],
    ]


@pytest.mark.parametrize("size", [(40, 20), (20, 40), None])
def test_boxes_of_a_photo_that_exif_turns_stay_on_their_object(
    tmp_path, monkeypatch, size
):
    """The stored photo is 20 x 40 pixels, the upright one 40 x 20; the box is in the one of ``size``."""
    (tmp_path / "annots").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.txt").write_text("not a photo")
    box = (1, 1, 10, 20) if size == (20, 40) else (21, 1, 40, 10)
    photo = Image.new("RGB", (20, 40))
    # in the upright photo the upper right corner, where the stored one has its upper left corner
    photo.paste((255, 0, 0), (0, 0, 10, 20))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    photo.save(tmp_path / "images/a.png", exif=exif)
    width, height = size or ("", "")
    xml = f"<size><width>{width}</width><height>{height}</height></size>"
    (tmp_path / "annots/a.xml").write_text(
        f"<annotation>{xml}{voc_object('dog', 0, box)}</annotation>"
    )

    content = convert(monkeypatch, "bccd", tmp_path, split="annotations")

    (image,), (annotation,) = content["images"], content["annotations"]
    saved = read_image(tmp_path / "out/images/a.png", "RGB")
    assert saved.shape[:2] == (image["height"], image["width"])
    x, y, w, h = map(int, annotation["bbox"])
    assert (saved[y : y + h, x : x + w] == (255, 0, 0)).all()
    assert saved[:, :, 0].astype(bool).sum() == w * h


@pytest.mark.parametrize("encoding", ["gb2312", "shift_jis", "utf-8", "utf-16"])
def test_annotations_of_voc_in_other_encodings_and_forms(
    tmp_path, monkeypatch, encoding, capsys
):
    Image.new("RGB", (40, 20)).save(tmp_path / "a.jpg")
    forms = ["Unspecified", "", "False", "True", " 1 "]
    objects = [voc_object("\u5929", form, (1, 1, 9, 9)) for form in forms]
    rotated = "<object><name>\u5929</name><robndbox><cx>5</cx></robndbox></object>"
    text = f'<?xml version="1.0" encoding="{encoding}"?>\n<annotation>{"".join(objects)}{rotated}</annotation>'
    (tmp_path / "a.xml").write_bytes(text.encode(encoding))

    content = convert(monkeypatch, "bccd", tmp_path, split="annotations")

    assert content["categories"][0]["name"] == "\u5929"
    assert [row["iscrowd"] for row in content["annotations"]] == [0, 0, 0, 1, 1]
    assert "a: left out the box" in capsys.readouterr().out


def test_a_broken_annotation_of_voc_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.xml").write_text("<annotation>")

    with pytest.raises(SystemExit, match=r"a\.xml"):
        convert(monkeypatch, "bccd", tmp_path)


def voc_object(name, difficult, box):
    x, y, right, bottom = box
    return f"""
        <object>
          <name>{name}</name><difficult>{difficult}</difficult>
          <bndbox><xmin>{x}</xmin><ymin>{y}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox>
        </object>"""


@pytest.fixture(params=[(255, "n{}"), (1, "n{}"), (255, "photo")])
def nuclei(request, tmp_path):
    """Write five images with one mask each, of this value; return the folder and the name of an image."""
    value, name = request.param
    mask = np.zeros((20, 30), np.uint8)
    mask[4:10, 6:9] = value
    for number in range(5):
        folder = tmp_path / f"n{number}"
        (folder / "images").mkdir(parents=True)
        (folder / "masks").mkdir()
        file = f"{name.format(number)}.png"
        image = Image.new("RGBA", (30, 20), (number, 0, 0))
        image.save(folder / "images" / file)
        Image.fromarray(mask).save(folder / "masks" / "m.png")
    return tmp_path


def test_masks_become_coco(nuclei, monkeypatch):
    train = convert(monkeypatch, "nuclei", nuclei)

    val = json.loads((nuclei / "out" / "val.json").read_text())
    assert len(train["images"]) == 4
    assert len(val["images"]) == 1
    for image in train["images"] + val["images"]:
        with Image.open(nuclei / "out" / "images" / image["file_name"]) as photo:
            red, *_ = photo.getpixel((0, 0))
        assert image["file_name"] == f"n{red}.png"

    (annotation,) = val["annotations"]
    assert annotation["bbox"] == [6, 4, 3, 6]
    assert annotation["area"] == 18
    mask = coco_mask.decode(annotation["segmentation"])
    assert mask.sum() == mask[4:10, 6:9].sum() == 18


@pytest.mark.parametrize(
    ("name", "mode", "told"),
    [("photo.png", "I;16", "8 bits"), ("other.png", "L", "2 png files")],
)
def test_images_of_nuclei_that_are_refused(tmp_path, monkeypatch, name, mode, told):
    images = tmp_path / "n0" / "images"
    images.mkdir(parents=True)
    (tmp_path / "n0" / "masks").mkdir()
    Image.new("L", (30, 20)).save(images / "photo.png")
    Image.new(mode, (30, 20), 700).save(images / name)

    with pytest.raises(SystemExit, match=told):
        convert(monkeypatch, "nuclei", tmp_path)


@pytest.mark.parametrize("given", [".", "all/n0"])
def test_the_folder_of_nuclei_is_named(tmp_path, monkeypatch, given):
    (tmp_path / "all/n0/masks").mkdir(parents=True)

    with pytest.raises(SystemExit, match="Fix: give .*/all\\."):
        convert(monkeypatch, "nuclei", tmp_path / given)


def convert(monkeypatch, name, folder, *flags, split="train"):
    """Run an example; return a json of it, which has to pass the checks."""
    output = folder / "out"
    monkeypatch.setattr(sys, "argv", ["", str(folder), str(output), *flags])
    script = ROOT / "examples" / f"{name}_to_coco.py"
    runpy.run_path(str(script), run_name="__main__")

    content = json.loads((output / f"{split}.json").read_text())
    errors, _ = check_coco(content, DatasetNeeds(True, masks=name == "nuclei"))
    assert not errors
    return content


@pytest.mark.slow
def test_the_commands_run_in_their_order(user):
    tiny = {**OPTS, "SOLVER.MAX_ITER": 4, "TEST.EVAL_PERIOD": 2}
    del tiny["MODEL.DEVICE"]  # the commands say --num-gpus 0

    def run(command, **changes):
        ended = subprocess.run(
            [
                sys.executable,
                "-m",
                "gw_detectron",
                *command[1:],
                *key_words(tiny | changes),
            ],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        return ended.stdout

    run(SMALL)
    written = {
        "config.yaml",
        "datasets.yaml",
        "datasets",
        "model_final.pth",
        "metrics.json",
    }
    assert written <= set(os.listdir("output/small"))
    assert "Starting training from iteration 4" in run(RESUME, **{"SOLVER.MAX_ITER": 6})

    for command, dataset in (
        (EVALUATE, "custom_val"),
        (OTHER_PHOTOS, "more_val"),
        (TRAINING_PHOTOS, "custom_train"),
    ):
        printed = run(command)
        assert f" on {dataset}. " in printed
        assert "Evaluation results for segm" in printed
        record = yaml.safe_load(Path("output/small/inference/config.yaml").read_text())
        assert dataset in record["DATASETS"]["TEST"]
