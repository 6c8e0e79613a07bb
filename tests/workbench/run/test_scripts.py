"""A script with Trainer(cfg) is protected as the command is: checks, folder, labels of its own run."""

import json
import time

import pytest
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json

from gw_detectron.config import changed_config
from gw_detectron.errors import ConfigError, PreflightError
from gw_detectron.workbench.run import Trainer

from ...photos import CLASSES, photo_names, write_photos
from ...tiny_run import arguments, config_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Script:
    """A dataset that is a Python function, and the config of a script that trains on it."""

    def __init__(self, folder, cfg: CfgNode) -> None:
        write_photos(folder, photo_names(6))
        self.cfg = cfg
        self.unset = set()
        self.records = load_coco_json(
            f"{folder}/annotations.json", f"{folder}/photos", "mine_train"
        )

    def register(self) -> None:
        for name in ("mine_train", "mine_val"):
            DatasetCatalog.pop(name, None)
            MetadataCatalog.pop(name, None)
            DatasetCatalog.register(name, lambda: self.records)
            metadata = {"thing_classes": CLASSES, "evaluator_type": "coco"}
            for key in metadata.keys() - self.unset:
                MetadataCatalog.get(name).set(**{key: metadata[key]})

    def start(self, kind: type[Trainer] = Trainer, **options) -> Trainer:
        self.register()
        return kind(self.cfg, **options)

    def annotations(self):
        return [
            annotation
            for record in self.records
            for annotation in record["annotations"]
        ]


@pytest.fixture
def script(tmp_path):
    cfg = changed_config(
        config_of(arguments(tmp_path / "run", SOLVER__MAX_ITER=1, SOLVER__STEPS="()")),
        {
            "DATASETS.TRAIN": ("mine_train",),
            "DATASETS.TEST": ("mine_val",),
            "MODEL.ROI_HEADS.NUM_CLASSES": 3,
        },
    )
    return Script(tmp_path, cfg)


MISTAKES = {
    "no comma": (
        lambda script: setattr(script.cfg.DATASETS, "TEST", ("mine_val")),
        "DATASETS.TEST",
    ),
    "no evaluator_type": (
        lambda script: script.unset.add("evaluator_type"),
        "evaluator_type",
    ),
}


@pytest.mark.parametrize(("mistake", "named"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_refused_within_seconds_and_nothing_is_written(
    script, tmp_path, mistake, named
):
    mistake(script)
    begin = time.process_time()
    with pytest.raises(PreflightError) as raised:
        script.start()
    assert any(named in problem for problem in raised.value.problems), raised.value
    assert time.process_time() - begin < 10 and not (tmp_path / "run").exists()


def test_checks_can_be_left_out_and_an_own_evaluator_needs_no_type(script):
    class Own(Trainer):
        @classmethod
        def build_evaluator(cls, cfg, dataset_name, output_folder=None):
            return None

    script.unset.add("evaluator_type")
    script.start(Own)
    script.cfg.SOLVER.IMS_PER_BATCH = 1
    script.start(Own, ignore_preflight=True)


def test_a_second_run_in_a_folder_is_refused_or_replaces_the_first(script, tmp_path):
    folder = tmp_path / "run"
    first = script.start()
    first.resume_or_load(resume=False)
    first.train()
    log = (folder / "log.txt").read_text()
    script.cfg.SOLVER.BASE_LR = 0.25

    with pytest.raises(ConfigError, match="earlier run"):
        script.start().resume_or_load(resume=False)
    with pytest.raises(ConfigError, match="earlier run"):
        script.start().train()
    script.start().resume_or_load(resume=True)
    assert log in (folder / "log.txt").read_text()

    script.start(overwrite=True).train()
    lines = (folder / "metrics.json").read_text().splitlines()
    trained = [record for record in map(json.loads, lines) if "lr" in record]
    assert [record["iteration"] for record in trained] == [0]
    assert "BASE_LR: 0.25" in (folder / "config.yaml").read_text()


def test_weights_that_a_script_does_not_load_are_named(script, tmp_path, capsys):
    script.start().train()
    script.cfg.MODEL.WEIGHTS = f"{tmp_path}/run/model_final.pth"
    script.cfg.OUTPUT_DIR = f"{tmp_path}/other"

    script.start().train()

    assert "WARNING: MODEL.WEIGHTS" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["run", "other"])
def test_each_run_is_evaluated_against_its_own_labels(script, tmp_path, folder):
    script.register()
    first = Trainer.build_evaluator(script.cfg, "mine_val")._coco_api
    script.cfg.OUTPUT_DIR = str(tmp_path / folder)
    for annotation in script.annotations():
        annotation["category_id"] = 2
    del script.records[3:]

    second = Trainer.build_evaluator(script.cfg, "mine_val")._coco_api

    assert (len(first.imgs), len(second.imgs)) == (6, 3)
    assert {annotation["category_id"] for annotation in second.anns.values()} == {2}
    assert "json_file" not in MetadataCatalog.get("mine_val").as_dict()
