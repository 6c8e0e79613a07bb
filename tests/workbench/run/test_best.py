"""The kept weights: averages, the best checkpoint, the end by patience, and losses on the validation data."""

import json
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetMapper
from detectron2.data.detection_utils import build_augmentation
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import nn

from gw_detectron.config import changed_config
from gw_detectron.errors import PreflightError
from gw_detectron.weights import detector_file
from gw_detectron.workbench.commands.train import run_here as main
from gw_detectron.workbench.report import RunFolder
from gw_detectron.workbench.run import Trainer
from gw_detectron.workbench.run.evaluation import validation_losses
from gw_detectron.workbench.run.hooks import BestWeights, WeightAverage

from ...photos import photo_names, write_photos
from ...tiny_run import RETINANET, arguments, config_of

pytestmark = pytest.mark.usefixtures("small_dataset", "one_thread")


def test_the_average_is_the_formula_for_weights_and_statistics_alike():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    hook, expected = WeightAverage(model, 0.6), None
    for count in range(30):
        model(torch.randn(8, 3, dtype=torch.double))
        with torch.no_grad():
            for value in model.parameters():
                value.add_(torch.randn_like(value))
        hook.after_step()
        now = {
            name: value.clone()
            for name, value in model.state_dict().items()
            if value.is_floating_point()
        }
        decay = min(0.6, (1 + count) / (10 + count)) if expected else 0
        expected = {
            name: decay * (expected or now)[name] + (1 - decay) * value
            for name, value in now.items()
        }
    averaged = hook.averaged.state_dict()
    assert len(expected) == 6 and all(
        torch.allclose(averaged[name], expected[name], atol=1e-12) for name in expected
    )
    assert not torch.allclose(
        averaged["1.running_mean"], model.state_dict()["1.running_mean"], atol=1e-3
    )


def test_averaged_weights_are_evaluated_and_saved_and_trained_weights_are_resumed(
    tmp_path, monkeypatch
):
    evaluated = []
    monkeypatch.setattr(Trainer, "test", lambda self, cfg, model: evaluated.append(model) or {})
    settings = {
        "SOLVER__EMA": 0.5,
        "SOLVER__MAX_ITER": 2,
        "SOLVER__STEPS": "()",
        "SOLVER__CHECKPOINT_PERIOD": 99,
    }
    trainer = Trainer(config_of(arguments(tmp_path, **settings)))
    trainer.resume_or_load(resume=False)
    trainer.train()
    trained, averaged = trainer.model.state_dict(), evaluated[0].state_dict()
    assert not torch.equal(
        trained["backbone.fpn_output2.weight"], averaged["backbone.fpn_output2.weight"]
    )
    saved = torch.load(tmp_path / "model_final.pth", weights_only=True)["model"]
    assert all(torch.equal(saved[name], value) for name, value in averaged.items())
    resumed = Trainer(config_of(arguments(tmp_path, **settings)))
    resumed.resume_or_load(resume=True)
    for model, expected in ((resumed.model, trained), (resumed.checkpointer.model, averaged)):
        assert all(
            torch.equal(value, expected[name]) for name, value in model.state_dict().items()
        )
    tuned = Trainer(
        config_of(
            arguments(tmp_path / "new", MODEL__WEIGHTS=tmp_path / "model_final.pth", **settings)
        )
    )
    tuned.resume_or_load(resume=False)
    assert all(
        torch.equal(value, averaged[name]) for name, value in tuned.model.state_dict().items()
    )


@pytest.fixture
def scripted(monkeypatch):
    """Give the evaluations these scores of ``bbox/AP``, and write them as predictions."""

    def script(*scores):
        left = list(scores)

        def test(self, cfg, model):
            score = left.pop(0)
            folder = Path(cfg.OUTPUT_DIR, "inference")
            folder.mkdir(exist_ok=True)
            (folder / "coco_instances_results.json").write_text(json.dumps(score))
            return {"bbox": {"AP": score}}

        monkeypatch.setattr(Trainer, "test", test)
        return left

    return script


EVALUATED = {
    "SOLVER__MAX_ITER": 6,
    "SOLVER__STEPS": "()",
    "TEST__EVAL_PERIOD": 1,
    "TEST__BEST": "bbox/AP",
}
EVALUATED |= {"SOLVER__CHECKPOINT_PERIOD": 99, "TEST__LOSS": False, **RETINANET}


def test_the_best_weights_are_kept_and_used_and_patience_ends_the_run(tmp_path, scripted):
    left = scripted(float("nan"), 2.0, 5.0, 5.0, 4.0, 9.0)
    assert main(arguments(tmp_path, **EVALUATED, TEST__PATIENCE=2)) == {"bbox": {"AP": 4.0}}
    assert left == [9.0]
    best, final = (
        torch.load(tmp_path / f"model_{name}.pth", weights_only=True)
        for name in ("best", "final")
    )
    assert (best["iteration"], final["iteration"]) == (2, 4) and "trainer" not in best
    assert best["norms"] == final["norms"] and best["record"]["seed"] == 7
    name = "backbone.fpn_output3.weight"
    assert not torch.equal(best["model"][name], final["model"][name])
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"
    assert json.loads((tmp_path / "inference" / "model_best_results.json").read_text()) == 5.0
    assert (
        detector_file(tmp_path)
        == RunFolder(tmp_path).weights
        == str(tmp_path / "model_best.pth")
    )
    scripted()
    assert (
        main(arguments(tmp_path, "--resume", **EVALUATED, TEST__PATIENCE=2)) is None
    )  # it has ended
    left = scripted(6.0)
    main(arguments(tmp_path, "--resume", **EVALUATED, TEST__PATIENCE=3))
    assert (
        not left
        and torch.load(tmp_path / "model_best.pth", weights_only=True)["iteration"] == 6
    )


def test_a_score_that_never_comes_does_not_end_the_run(tmp_path, scripted):
    left = scripted(*range(6))
    main(
        arguments(
            tmp_path,
            "--ignore-preflight",
            **{**EVALUATED, "TEST__BEST": "bbox/APx"},
            TEST__PATIENCE=1,
        )
    )
    assert (
        not left
        and "bbox/APx" in (tmp_path / "log.txt").read_text().rpartition("Given val metric")[2]
    )


def test_an_ended_run_is_evaluated_with_augmentation(tmp_path, scripted, monkeypatch):
    scripted(2.0, 1.0)
    monkeypatch.setattr(
        Trainer, "test_with_TTA", lambda self, cfg, model: {"bbox_TTA": {"AP": 7.0}}
    )
    changes = {"TEST__PATIENCE": 1, "TEST__AUG__ENABLED": True}
    main(
        arguments(tmp_path, "--ignore-preflight", **EVALUATED, **changes)
    )  # RetinaNet has none
    assert RunFolder(tmp_path).metrics[-1]["bbox_TTA/AP"] == 7


def test_other_processes_leave_the_best_predictions(tmp_path, scripted, monkeypatch):
    scripted(5.0)
    cfg = config_of(arguments(tmp_path, **{**EVALUATED, "SOLVER__MAX_ITER": 1}))
    trainer = Trainer(cfg)
    trainer.train()
    (tmp_path / "inference" / "coco_instances_results.json").write_text("of other weights")
    other = BestWeights(cfg, trainer.checkpointer, [])
    other.trainer = trainer
    monkeypatch.setattr(comm, "is_main_process", lambda: False)
    other._best_checking()
    assert (tmp_path / "inference" / "model_best_results.json").read_text() == "5.0"


def test_an_extended_run_keeps_the_best_weights_of_the_finished_one(tmp_path, scripted):
    """The checkpoint of a finished run is written before its last evaluation."""
    schedule = {**EVALUATED, "TEST__EVAL_PERIOD": 2}
    scripted(10.0, 40.0)
    main(arguments(tmp_path, **{**schedule, "SOLVER__MAX_ITER": 3}))
    left = scripted(40.0, 20.0, 5.0)  # of the 3rd iteration again, the 4th and the last one
    main(arguments(tmp_path, "--resume", **schedule))
    assert (
        not left
        and torch.load(tmp_path / "model_best.pth", weights_only=True)["iteration"] == 2
    )
    assert json.loads((tmp_path / "inference" / "model_best_results.json").read_text()) == 40.0


def test_best_weights_of_other_validation_images_or_without_a_score_are_not_kept(
    tmp_path, scripted
):
    write_photos(tmp_path / "data", photo_names(6))
    write_photos(tmp_path / "data", photo_names(3, 6), "val.json")
    flags = [f"--{part}-images={tmp_path}/data/photos" for part in ("train", "val")]
    flags += [
        f"--train-json={tmp_path}/data/annotations.json",
        f"--val-json={tmp_path}/data/val.json",
    ]
    own = {**EVALUATED, "MODEL__RETINANET__NUM_CLASSES": 3}
    scripted(40.0, 50.0)
    main(arguments(tmp_path / "run", *flags, **{**own, "SOLVER__MAX_ITER": 2}))
    with pytest.raises(PreflightError, match=r"TEST.BEST \(''\): the run kept model_best.pth"):
        main(arguments(tmp_path / "run", "--resume", *flags, **{**own, "TEST__BEST": "''"}))
    write_photos(tmp_path / "data", photo_names(3, 9), "val.json")
    scripted(4.0, 6.0, 5.0)
    main(arguments(tmp_path / "run", "--resume", *flags, **{**own, "SOLVER__MAX_ITER": 4}))
    assert torch.load(tmp_path / "run" / "model_best.pth", weights_only=True)["iteration"] == 2
    assert (tmp_path / "run" / "inference" / "model_best_results.json").read_text() == "6.0"


def test_a_trainer_with_its_own_validation_data_has_no_losses_on_it(tmp_path):
    class Own(Trainer):
        @classmethod
        def build_test_loader(cls, cfg, dataset_name):
            return super().build_test_loader(cfg, dataset_name)

    changes = {**EVALUATED, "TEST__LOSS": True, "SOLVER__MAX_ITER": 2}
    with pytest.raises(PreflightError, match="TEST.BEST"):
        Own(
            config_of(arguments(tmp_path, **{**changes, "TEST__BEST": "validation/total_loss"}))
        )
    Own(config_of(arguments(tmp_path, **changes))).train()
    assert "validation" not in (tmp_path / "metrics.json").read_text()


def test_the_lowest_loss_is_the_best(tmp_path):
    changes = {"TEST__BEST": "validation/total_loss", "TEST__LOSS": True, "SOLVER__MAX_ITER": 2}
    main(arguments(tmp_path, **{**EVALUATED, **changes}))
    run = RunFolder(tmp_path)
    losses = [
        record["validation/total_loss"]
        for record in run.metrics
        if "validation/total_loss" in record
    ]
    best = torch.load(tmp_path / "model_best.pth", weights_only=True)["iteration"]
    assert len(losses) == 2 and run.best_iteration == best + 1
    assert (
        "validation"
        not in (tmp_path / "log.txt").read_text().partition("iter: 1 ")[2].partition("\n")[0]
    )


TWO = "('gw_synthetic_val', 'gw_synthetic_train')"


def test_the_best_of_two_datasets_is_named_by_its_dataset(tmp_path, monkeypatch):
    def scores(self, cfg, model):
        return {name: {"bbox": {"AP": 5.0}} for name in cfg.DATASETS.TEST}

    monkeypatch.setattr(Trainer, "test", scores)
    changes = {
        "DATASETS__TEST": TWO,
        "TEST__BEST": "gw_synthetic_train/bbox/AP",
        "SOLVER__MAX_ITER": 1,
    }
    main(arguments(tmp_path, **{**EVALUATED, **changes}))
    assert (tmp_path / "model_best.pth").is_file()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"TEST__BEST": "segm/AP", "DATASETS__TEST": TWO},
            r"TEST.BEST \('segm/AP'\).*gw_synthetic_train/segm/AP,",
        ),
        (
            {"TEST__BEST": "box/AP"},
            r"TEST.BEST \('box/AP'\).*bbox/AP, .*bbox/AP-star, .*segm/APl",
        ),
        ({"TEST__BEST": "segm/AP", "MODEL__MASK_ON": False}, r"TEST.BEST \('segm/AP'\)"),
        ({"TEST__BEST": "bbox/AP", "TEST__EVAL_PERIOD": 0}, "TEST.EVAL_PERIOD is 0"),
        ({"TEST__BEST": "bbox/AP", "DATASETS__TEST": "()"}, r"DATASETS.TEST \(\)"),
        ({"TEST__PATIENCE": 3}, r"TEST.PATIENCE \(3\).*TEST.BEST"),
        ({"SOLVER__EMA": 1.0}, r"SOLVER.EMA \(1.0\)"),
        ({"SOLVER__AMP__ENABLED": True}, r"SOLVER.AMP.ENABLED \(True\).*needs a GPU"),
    ],
)
def test_scores_and_numbers_that_cannot_be_used_are_refused_before_the_run(
    tmp_path, changes, named
):
    with pytest.raises(PreflightError, match=named):
        main(arguments(tmp_path / "run", **{"TEST__EVAL_PERIOD": 1, **changes}))
    assert not (tmp_path / "run").exists()


def test_validation_losses_are_means_over_images_that_change_nothing(tmp_path):
    """RetinaNet samples nothing, so that each image can be computed alone."""
    trainer = Trainer(config_of(arguments(tmp_path, MODEL__RESNETS__NORM="BN", **RETINANET)))
    model = trainer.checkpointer.model
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.loss_normalizer = normalizer = 20.0
    losses = validation_losses(trainer.cfg, model, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.loss_normalizer == normalizer and all(
        module.training for module in model.modules()
    )

    mapper = DatasetMapper(
        changed_config(trainer.cfg, {}),
        True,
        augmentations=build_augmentation(trainer.cfg, False),
    )
    records = Trainer.build_test_loader(trainer.cfg, "gw_synthetic_val").dataset._dataset
    expected = []
    for module in model.modules():
        module.training = not isinstance(module, nn.BatchNorm2d)
    for record in records:
        model.loss_normalizer = normalizer
        with torch.no_grad(), EventStorage(1):
            expected.append(sum(model([mapper(record)]).values()))
    assert losses["validation/total_loss"] == pytest.approx(
        float(sum(expected)) / len(expected), rel=1e-6
    )
    assert losses.keys() == {
        f"validation/{name}" for name in ("loss_cls", "loss_box_reg", "total_loss")
    }
    trainer.cfg = changed_config(trainer.cfg, {"DATASETS.TEST": ()})
    assert validation_losses(trainer.cfg, model, 0) == {}
