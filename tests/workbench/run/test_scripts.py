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
from ...tiny_run import RETINANET, arguments, config_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Script:
    """A dataset that is a Python function, and the config of a script that trains on it."""

    def __init__(self, folder, cfg: CfgNode) -> None:
        write_photos(folder, photo_names(6))
        self.cfg, self.images, self.unset = cfg, folder / "photos", set()
        self.records = load_coco_json(
            f"{folder}/annotations.json", str(self.images), "mine_train"
        )

    def register(self) -> None:
        for name in ("mine_train", "mine_val"):
            DatasetCatalog.pop(name, None)
            MetadataCatalog.pop(name, None)
            DatasetCatalog.register(name, lambda: self.records)
            metadata = {"thing_classes": CLASSES, "evaluator_type": "coco"}
            MetadataCatalog.get(name).set(
                **{key: metadata[key] for key in metadata if key not in self.unset}
            )

    def start(self, kind: type[Trainer] = Trainer, **options) -> Trainer:
        self.register()
        return kind(self.cfg, **options)

    def annotations(self):
        return [each for record in self.records for each in record["annotations"]]


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


def corners(script):
    for each in script.annotations():
        x, y, width, height = each["bbox"]
        each["bbox"] = [x, y, x + width, y + height]


def keys(**changes):
    return lambda script: script.cfg.merge_from_list(
        [w for k, v in changes.items() for w in (k.replace("__", "."), v)]
    )


MISTAKES = {
    "no comma": (
        lambda script: setattr(script.cfg.DATASETS, "TEST", ("mine_val")),
        "DATASETS.TEST",
    ),
    "no evaluator_type": (lambda script: script.unset.add("evaluator_type"), "evaluator_type"),
    "no image_id": (
        lambda script: [record.pop("image_id") for record in script.records],
        "image_id",
    ),
    "no class names": (lambda script: script.unset.add("thing_classes"), "thing_classes"),
    "wrong class count": (
        keys(MODEL__ROI_HEADS__NUM_CLASSES=80),
        "MODEL.ROI_HEADS.NUM_CLASSES",
    ),
    "boxes as corners": (corners, "bbox"),
    "missing photos": (
        lambda script: [path.unlink() for path in script.images.iterdir()],
        "IMG_0000.jpg",
    ),
    "no masks": (
        lambda script: [each.pop("segmentation") for each in script.annotations()],
        "MODEL.MASK_ON",
    ),
    "frozen norms from scratch": (keys(MODEL__RESNETS__NORM="FrozenBN"), "MODEL.RESNETS.NORM"),
    "one image per batch": (keys(SOLVER__IMS_PER_BATCH=1), "SOLVER.IMS_PER_BATCH"),
    "augmented tests of RetinaNet": (
        keys(TEST__AUG__ENABLED=True, **RETINANET),
        "TEST.AUG.ENABLED",
    ),
    "no learning rate": (keys(SOLVER__BASE_LR=0.0), "SOLVER.BASE_LR"),
    "frozen layers from scratch": (
        keys(MODEL__BACKBONE__FREEZE_AT=2),
        "MODEL.BACKBONE.FREEZE_AT",
    ),
    "drops after the end": (keys(SOLVER__STEPS=(5,)), "SOLVER.STEPS"),
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
    first = script.start()
    first.resume_or_load(resume=False)
    first.train()
    log, config = (tmp_path / "run" / "log.txt").read_text(), tmp_path / "run" / "config.yaml"
    script.cfg.SOLVER.BASE_LR = 0.25
    for begin in (
        lambda trainer: trainer.resume_or_load(resume=False),
        lambda trainer: trainer.train(),
    ):
        with pytest.raises(ConfigError, match="earlier run"):
            begin(script.start())
    script.start().resume_or_load(resume=True)
    assert log in (tmp_path / "run" / "log.txt").read_text()
    script.start(overwrite=True).train()
    metrics = [
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.json").read_text().splitlines()
    ]
    assert [each["iteration"] for each in metrics if "lr" in each] == [
        0
    ] and "BASE_LR: 0.25" in config.read_text()


def test_weights_that_a_script_does_not_load_are_named(script, tmp_path, capsys):
    first = script.start()
    first.train()
    script.cfg.MODEL.WEIGHTS, script.cfg.OUTPUT_DIR = (
        f"{tmp_path}/run/model_final.pth",
        f"{tmp_path}/other",
    )
    script.start().train()
    assert "WARNING: MODEL.WEIGHTS" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["run", "other"])
def test_each_run_is_evaluated_against_its_own_labels(script, tmp_path, folder):
    script.register()
    first = Trainer.build_evaluator(script.cfg, "mine_val")
    script.cfg.OUTPUT_DIR = str(tmp_path / folder)
    for each in script.annotations():
        each["category_id"] = 2
    del script.records[3:]
    second = Trainer.build_evaluator(script.cfg, "mine_val")
    assert (len(first._coco_api.imgs), len(second._coco_api.imgs)) == (6, 3)
    assert {each["category_id"] for each in second._coco_api.anns.values()} == {2}
    assert "json_file" not in MetadataCatalog.get("mine_val").as_dict()
