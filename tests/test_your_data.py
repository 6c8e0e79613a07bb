"""docs/your_data.md: its commands run as they are written, in a folder with photos."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gw_detectron.workbench.commands.train import get_parser
from gw_detectron.workbench.dataset import read_datasets, register_datasets
from gw_detectron.workbench.dataset.annotation_checks import DatasetNeeds

from .documentation.pages import blocks, commands, read
from .photos import photo_names, write_photos
from .tiny_run import OPTS, ROOT, config_of, environment, key_words
from .workbench.sound_run import coco_faults

PAGE = read("docs/your_data.md")
RUNS = [
    words for words in commands("docs/your_data.md") if words[1] in ("train", "eval")
]
SMALL, ON_GPU, FINE_TUNED, TWO_FILES, *LATER = RUNS
RESUME, EVALUATE, OTHER_PHOTOS, TRAINING_PHOTOS = LATER


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
    one_file = (SMALL, ON_GPU, FINE_TUNED)
    for command in (*one_file, TWO_FILES):
        split = "custom" if command in one_file else "table"
        cfg = config(command)
        datasets = [*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST]
        assert datasets == [f"{split}_train", f"{split}_val"]
        assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 3


def test_the_configs_of_the_table_start_as_it_says(user):
    rows = re.findall(
        r"^\| .* \| `([\w/.-]+\.yaml)` \| (.*) \|$", PAGE, flags=re.MULTILINE
    )
    assert len(rows) == 7
    for name, start in rows:
        cfg = config([*SMALL[:4], "--config-file", f"configs/{name}"])
        weights = cfg.MODEL.WEIGHTS
        expected = f"`{weights}`" if weights else "random values"
        if weights.startswith("detectron2://COCO-"):
            expected = "a detector of COCO"
        assert start == expected


def test_the_example_of_a_json_is_sound():
    (example,) = blocks("docs/your_data.md", "json")
    for training in (True, False):
        faults = coco_faults(json.loads(example), DatasetNeeds(training, masks=True))
        assert faults == ([], [])


def test_the_example_of_a_yaml(user):
    (example,) = blocks("docs/your_data.md", "yaml")
    mydata = user / "mydata"
    (mydata / "datasets.yaml").write_text(example)
    write_photos(mydata / "garden", photo_names(5), "../garden.json")

    named = register_datasets(read_datasets("mydata/datasets.yaml"), "output")

    assert list(named.train) == ["kitchen", "garden"]
    assert list(named.val) == ["garden_val", "kitchen_val"]


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
