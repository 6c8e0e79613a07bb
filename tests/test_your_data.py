"""docs/your_data.md: its commands run as they are written, in a folder with photos."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from detectron2.data import DatasetCatalog, MetadataCatalog

from gw_detectron.data import read_datasets, register_datasets
from gw_detectron.engine import get_parser
from gw_detectron.engine.train import run_config
from gw_detectron.preflight.annotation_checks import DatasetNeeds, check_coco

from .documentation.pages import blocks, commands, read
from .photos import photo_names, write_photos
from .tiny_run import OPTS, ROOT, environment

PAGE = read("docs/your_data.md")
SMALL, ON_GPU, TWO_FILES, RESUME, EVALUATE, OTHER_PHOTOS, TRAINING_PHOTOS = commands("docs/your_data.md")


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Go to a folder like that of a user: the repository and, in mydata and more, photos."""
    for name in ("configs", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    for file, first in (("annotations.json", 0), ("train.json", 0), ("val.json", 20)):
        write_photos(tmp_path / "mydata", photo_names(20, first), file)
    write_photos(tmp_path / "more", photo_names(3, first=60))
    monkeypatch.chdir(tmp_path)
    before = set(DatasetCatalog)
    yield tmp_path
    for name in set(DatasetCatalog) - before:
        DatasetCatalog.pop(name)
        MetadataCatalog.pop(name)


def config(command):
    assert command[:2] == ["python", "tools/train_net.py"]
    return run_config(get_parser().parse_args(command[2:]))


def test_the_commands_for_training(user):
    for command, split in ((SMALL, "custom"), (ON_GPU, "custom"), (TWO_FILES, "table")):
        cfg = config(command)
        datasets = [*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST]
        assert datasets == [f"{split}_train", f"{split}_val"]
        assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 3


def test_the_configs_of_the_table_start_as_it_says(user):
    rows = re.findall(r"^\| .* \| `([\w/.-]+\.yaml)` \| (.*) \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) == 5
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
    assert list(found.train) == ["kitchen", "garden"] and list(found.val) == ["garden_val", "kitchen_val"]


@pytest.mark.slow
def test_the_commands_run_in_their_order(user):
    tiny = {**OPTS, "SOLVER.MAX_ITER": 4, "TEST.EVAL_PERIOD": 2}
    del tiny["MODEL.DEVICE"]  # the commands say --num-gpus 0

    def run(command, **changes):
        words = [*command[1:], *(str(word) for pair in {**tiny, **changes}.items() for word in pair)]
        ended = subprocess.run(
            [sys.executable, *words], env=environment(user), capture_output=True, text=True, timeout=300
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        return ended.stdout

    run(SMALL)
    names = os.listdir("output/small")
    assert {"config.yaml", "datasets.yaml", "datasets", "model_final.pth", "metrics.json"} <= set(names)
    assert "Starting training from iteration 4" in run(RESUME, **{"SOLVER.MAX_ITER": 6})
    for command, dataset in ((EVALUATE, "custom_val"), (OTHER_PHOTOS, "more_val"), (TRAINING_PHOTOS, "custom_train")):
        printed = run(command)
        assert f"dataset {dataset}: " in printed and "Evaluation results for segm" in printed
        assert dataset in yaml.safe_load(Path("output/small/inference/config.yaml").read_text())["DATASETS"]["TEST"]
