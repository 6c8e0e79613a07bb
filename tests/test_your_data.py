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
from PIL import Image
from pycocotools import mask as coco_mask

from gw_detectron.workbench.commands.train import get_parser
from gw_detectron.workbench.dataset import read_datasets, register_datasets
from gw_detectron.workbench.dataset.annotation_checks import DatasetNeeds, check_coco

from .documentation.pages import blocks, commands, read
from .photos import photo_names, write_photos
from .tiny_run import OPTS, ROOT, config_of, environment

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
    rows = re.findall(r"^\| .* \| `([\w/.-]+\.yaml)` \| (.*) \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) == 6
    for name, start in rows:
        weights = config([*SMALL[:4], "--config-file", f"configs/{name}"]).MODEL.WEIGHTS
        assert (f"`{weights}`" if weights else "random values") == start


def test_the_example_of_a_json_is_sound():
    (example,) = blocks("docs/your_data.md", "json")
    for training in (True, False):
        assert check_coco(json.loads(example), DatasetNeeds(training, masks=True)) == ([], [])


def test_the_example_of_a_yaml(user):
    (example,) = blocks("docs/your_data.md", "yaml")
    (user / "mydata" / "datasets.yaml").write_text(example)
    write_photos(user / "mydata" / "garden", photo_names(5))
    (user / "mydata" / "garden" / "annotations.json").rename(user / "mydata" / "garden.json")
    found = register_datasets(read_datasets("mydata/datasets.yaml"), "output")
    assert list(found.train) == ["kitchen", "garden"] and list(found.val) == [
        "garden_val",
        "kitchen_val",
    ]


def test_voc_boxes_become_coco(tmp_path, monkeypatch):
    for name in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (tmp_path / name).mkdir(parents=True)
    Image.new("RGB", (40, 20)).save(tmp_path / "JPEGImages" / "a.jpg")
    boxes = {
        "dog": (1, 1, 40, 20),
        "cat": (11, 5, 20, 14),
        "ant": (5, 5, 4, 9),
    }  # the last one has no area
    objects = "".join(
        f"<object><name>{name}</name><difficult>{int(name == 'cat')}</difficult><bndbox><xmin>{x}</xmin>"
        f"<ymin>{y}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
        for name, (x, y, right, bottom) in boxes.items()
    )
    (tmp_path / "Annotations" / "a.xml").write_text(f"<annotation>{objects}</annotation>")
    (tmp_path / "ImageSets" / "Main" / "train.txt").write_text("a\n")
    content = convert(monkeypatch, "bccd", tmp_path, "--max-side", "20")
    assert [each["name"] for each in content["categories"]] == ["ant", "cat", "dog"]
    assert [each["bbox"] for each in content["annotations"]] == [[0, 0, 20, 10], [5, 2, 5, 5]]
    assert [(each["category_id"], each["iscrowd"]) for each in content["annotations"]] == [
        (3, 0),
        (2, 1),
    ]


@pytest.mark.parametrize(
    ("value", "name"),
    [(255, "n{}"), (1, "n{}"), (255, "photo")],
    ids=["255", "1", "same names"],
)
def test_masks_become_coco(tmp_path, monkeypatch, value, name):
    mask = np.zeros((20, 30), np.uint8)
    mask[4:10, 6:9] = value
    for number in range(5):
        folder = tmp_path / "source" / f"n{number}"
        for each in ("images", "masks"):
            (folder / each).mkdir(parents=True)
        Image.new("RGBA", (30, 20), (number, 0, 0)).save(
            folder / "images" / f"{name.format(number)}.png"
        )
        Image.fromarray(mask).save(folder / "masks" / "m.png")
    content = convert(monkeypatch, "nuclei", tmp_path / "source")
    val = json.loads((tmp_path / "source" / "out" / "val.json").read_text())
    assert (len(content["images"]), len(val["images"])) == (4, 1)
    for image in (*content["images"], *val["images"]):
        with Image.open(tmp_path / "source" / "out" / "images" / image["file_name"]) as photo:
            assert f"n{photo.getpixel((0, 0))[0]}.png" == image["file_name"]
    (found,) = val["annotations"]
    assert (found["bbox"], found["area"]) == ([6, 4, 3, 6], 18)
    assert (coco_mask.decode(found["segmentation"]) == (mask > 0)).all()
    Image.fromarray(np.full((20, 30), 700, np.uint16)).save(
        folder / "images" / f"{name.format(number)}.png"
    )
    with pytest.raises(SystemExit, match="8 bits"):
        convert(monkeypatch, "nuclei", tmp_path / "source")
    Image.new("L", (30, 20)).save(folder / "images" / "other.png")
    with pytest.raises(SystemExit, match="2 png files"):
        convert(monkeypatch, "nuclei", tmp_path / "source")


def convert(monkeypatch, name, folder, *flags):
    """Run an example; return its train.json, which has to pass the checks."""
    monkeypatch.setattr(sys, "argv", ["", str(folder), str(folder / "out"), *flags])
    runpy.run_path(str(ROOT / "examples" / f"{name}_to_coco.py"), run_name="__main__")
    content = json.loads((folder / "out" / "train.json").read_text())
    assert not check_coco(content, DatasetNeeds(True, masks=name == "nuclei"))[0]
    return content


@pytest.mark.slow
def test_the_commands_run_in_their_order(user):
    tiny = {**OPTS, "SOLVER.MAX_ITER": 4, "TEST.EVAL_PERIOD": 2}
    del tiny["MODEL.DEVICE"]  # the commands say --num-gpus 0

    def run(command, **changes):
        words = [
            *command[1:],
            *(str(word) for pair in {**tiny, **changes}.items() for word in pair),
        ]
        ended = subprocess.run(
            [sys.executable, "-m", "gw_detectron", *words],
            env=environment(user),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        return ended.stdout

    run(SMALL)
    names = os.listdir("output/small")
    assert {
        "config.yaml",
        "datasets.yaml",
        "datasets",
        "model_final.pth",
        "metrics.json",
    } <= set(names)
    assert "Starting training from iteration 4" in run(RESUME, **{"SOLVER.MAX_ITER": 6})
    for command, dataset in (
        (EVALUATE, "custom_val"),
        (OTHER_PHOTOS, "more_val"),
        (TRAINING_PHOTOS, "custom_train"),
    ):
        printed = run(command)
        assert f" on {dataset}. " in printed and "Evaluation results for segm" in printed
        assert (
            dataset
            in yaml.safe_load(Path("output/small/inference/config.yaml").read_text())[
                "DATASETS"
            ]["TEST"]
        )
