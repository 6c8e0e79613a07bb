"""The kept weights: averages, the best checkpoint, the end by patience, and losses on the validation data."""

import json
import signal
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetMapper
from detectron2.data.detection_utils import build_augmentation
from detectron2.utils.events import EventStorage
from torch import nn

from gw_detectron.atomic import AtomicPathManager
from gw_detectron.config import changed_config
from gw_detectron.errors import ConfigError, PreflightError
from gw_detectron.weights import detector_file
from gw_detectron.workbench.commands.train import run_here as main
from gw_detectron.workbench.report import RunFolder
from gw_detectron.workbench.run import Trainer
from gw_detectron.workbench.run.evaluation import validation_losses
from gw_detectron.workbench.run.hooks import WeightAverage
from gw_detectron.workbench.signals import Interrupted

from ...photos import photo_names, write_photos
from ...tiny_run import RETINANET, arguments, config_of

pytestmark = pytest.mark.usefixtures("small_dataset", "one_thread")


def test_the_average_is_the_formula_for_weights_and_statistics_alike():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    hook = WeightAverage(model, 0.6)
    expected = {}

    for count in range(30):
        model(torch.randn(8, 3, dtype=torch.double))
        with torch.no_grad():
            for value in model.parameters():
                value.add_(torch.randn_like(value))
        hook.after_step()
        decay = min(0.6, (1 + count) / (10 + count))
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                # the average starts with the first weights
                before = expected.get(name, value)
                expected[name] = decay * before + (1 - decay) * value

    averaged = hook.averaged.state_dict()
    name = "1.running_mean"
    assert len(expected) == 6
    for key, value in expected.items():
        torch.testing.assert_close(averaged[key], value, rtol=0, atol=1e-12)
    assert not torch.allclose(averaged[name], model.state_dict()[name], atol=1e-3)


def test_averaged_weights_are_evaluated_and_saved_and_trained_weights_are_resumed(
    tmp_path, monkeypatch
):
    def trainer(folder, *, resume=False, **changes):
        schedule = {
            "SOLVER__EMA": 0.5,
            "SOLVER__MAX_ITER": 2,
            "SOLVER__STEPS": "()",
            "SOLVER__CHECKPOINT_PERIOD": 99,
        }
        built = Trainer(config_of(arguments(folder, **schedule, **changes)))
        built.resume_or_load(resume=resume)
        return built

    def state(model):
        return {name: value.clone() for name, value in model.state_dict().items()}

    evaluated = []
    monkeypatch.setattr(
        Trainer, "test", lambda self, cfg, model: evaluated.append(model) or {}
    )
    first = trainer(tmp_path)
    first.train()
    trained, averaged = state(first.model), state(evaluated[0])
    name = "backbone.fpn_output2.weight"
    assert not torch.equal(trained[name], averaged[name])

    file = tmp_path / "model_final.pth"
    saved = torch.load(file, weights_only=True)["model"]
    resumed = trainer(tmp_path, resume=True)
    tuned = trainer(tmp_path / "new", MODEL__WEIGHTS=file)

    def assert_equal(found, expected):
        torch.testing.assert_close(dict(found), expected, rtol=0, atol=0)

    assert_equal(saved, averaged)
    assert_equal(state(resumed.model), trained)
    assert_equal(state(resumed.checkpointer.model), averaged)
    assert_equal(state(tuned.model), averaged)


@pytest.fixture
def scripted(monkeypatch):
    """Give the evaluations these scores, and write them as predictions."""

    def script(*scores):
        left = list(scores)

        def test(self, cfg, model):
            score = left.pop(0)
            folder = Path(cfg.OUTPUT_DIR, "inference")
            folder.mkdir(exist_ok=True)
            (folder / "coco_instances_results.json").write_text(json.dumps(score))
            return {"bbox": {"AP": score, "AP-floss": score}}

        monkeypatch.setattr(Trainer, "test", test)
        return left

    return script


EVALUATED = {
    "SOLVER__MAX_ITER": 6,
    "SOLVER__STEPS": "()",
    "SOLVER__CHECKPOINT_PERIOD": 99,
    "TEST__EVAL_PERIOD": 1,
    "TEST__BEST": "bbox/AP",
    "TEST__LOSS": False,
    **RETINANET,
}


def run(folder, *flags, **changes):
    return main(arguments(folder, *flags, **{**EVALUATED, **changes}))


def checkpoint(folder, name):
    return torch.load(folder / f"model_{name}.pth", weights_only=True)


def best_predictions(folder):
    return json.loads((folder / "inference" / "model_best_results.json").read_text())


def test_the_best_weights_are_kept_and_used_and_patience_ends_the_run(
    tmp_path, scripted
):
    nan = float("nan")  # does not count for patience
    left = scripted(nan, nan, 5.0, 5.0, 4.0, 9.0)

    assert run(tmp_path, TEST__PATIENCE=2)["bbox"]["AP"] == 4
    assert left == [9.0]

    best, final = checkpoint(tmp_path, "best"), checkpoint(tmp_path, "final")
    name = "backbone.fpn_output3.weight"
    assert (best["iteration"], final["iteration"]) == (2, 4)
    assert "trainer" not in best and best["record"]["seed"] == 7
    assert best["norms"] == final["norms"]
    assert not torch.equal(best["model"][name], final["model"][name])
    assert best_predictions(tmp_path) == 5
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"

    kept = str(tmp_path / "model_best.pth")
    assert detector_file(tmp_path) == RunFolder(tmp_path).weights == kept

    scripted()
    assert run(tmp_path, "--resume", TEST__PATIENCE=2) is None  # it has ended

    left = scripted(6.0)
    run(tmp_path, "--resume", TEST__PATIENCE=3)
    assert not left and checkpoint(tmp_path, "best")["iteration"] == 5
    assert RunFolder(tmp_path).best_iteration == 6  # of 6


def test_a_stop_while_the_best_weights_are_written_repeats_the_evaluation(
    tmp_path, scripted, monkeypatch
):
    write, stops = AtomicPathManager.open, [True, False, True, False]

    def stopped(manager, path, mode="r", **options):
        if "w" in mode and path.endswith("model_best.pth") and stops.pop(0):
            kept = Path(path).with_name("inference") / "model_best_results.json"
            assert not kept.exists(), "of earlier weights"
            signal.raise_signal(signal.SIGTERM)
        return write(manager, path, mode, **options)

    monkeypatch.setattr(AtomicPathManager, "open", stopped)
    left = scripted(2.0, 2.0, 5.0, 5.0, 4.0)

    for _ in range(2):
        with pytest.raises(Interrupted):
            run(tmp_path, "--resume", SOLVER__MAX_ITER=3)
    run(tmp_path, "--resume", SOLVER__MAX_ITER=3)

    assert not left and not stops
    assert checkpoint(tmp_path, "best")["iteration"] == 1
    assert best_predictions(tmp_path) == 5


def test_a_finished_run_that_is_resumed_counts_no_further_iteration(tmp_path, scripted):
    scripted(5.0)
    run(tmp_path, SOLVER__MAX_ITER=1)
    with (tmp_path / "metrics.json").open("a") as file:
        file.write('{"bbox/AP": 6.0, "itera')  # of a kill

    scripted(9.0)
    run(tmp_path, "--resume", SOLVER__MAX_ITER=1)

    assert checkpoint(tmp_path, "best")["iteration"] == 0
    last = RunFolder(tmp_path).metrics[-1]
    assert (last["iteration"], last["bbox/AP"]) == (1, 9)


def test_a_run_is_not_resumed_for_fewer_iterations_than_it_has(tmp_path, scripted):
    scripted(5.0, 6.0)
    run(tmp_path, SOLVER__MAX_ITER=2)
    kept = {path: path.read_bytes() for path in tmp_path.rglob("model_best*")}

    scripted(9.0)
    with pytest.raises(ConfigError, match=r"MAX_ITER \(1\): .* 2 iterations"):
        run(tmp_path, "--resume", SOLVER__MAX_ITER=1)

    assert {path: path.read_bytes() for path in kept} == kept


def test_the_highest_score_of_a_class_named_loss_is_the_best(tmp_path, scripted):
    scripted(5.0, 9.0, 1.0)

    run(tmp_path, "--ignore-preflight", TEST__BEST="bbox/AP-floss", SOLVER__MAX_ITER=3)

    assert checkpoint(tmp_path, "best")["iteration"] == 1


def test_a_score_that_never_comes_does_not_end_the_run(tmp_path, scripted):
    left = scripted(*range(6))

    run(tmp_path, "--ignore-preflight", TEST__BEST="bbox/APx", TEST__PATIENCE=1)

    assert not left
    assert (
        "bbox/APx"
        in (tmp_path / "log.txt").read_text().rpartition("Given val metric")[2]
    )


def test_an_ended_run_is_evaluated_with_augmentation(tmp_path, scripted, monkeypatch):
    scripted(2.0, 1.0)
    augmented = {"bbox_TTA": {"AP": 7.0}}
    monkeypatch.setattr(Trainer, "test_with_TTA", lambda self, cfg, model: augmented)

    # RetinaNet has none
    run(tmp_path, "--ignore-preflight", TEST__PATIENCE=1, TEST__AUG__ENABLED=True)

    assert RunFolder(tmp_path).metrics[-1]["bbox_TTA/AP"] == 7


def test_the_metrics_have_the_scores_of_all_evaluations(tmp_path, scripted):
    scripted(10.0, 40.0, 20.0)
    run(tmp_path, SOLVER__MAX_ITER=3)

    lines = RunFolder(tmp_path).metrics
    scores = [line["bbox/AP"] for line in lines if "bbox/AP" in line]
    assert scores == [10, 40, 20]


def test_an_extended_run_keeps_the_best_weights_of_the_finished_one(tmp_path, scripted):
    """The checkpoint of a finished run is written before its last evaluation."""
    scripted(10.0, 40.0)
    run(tmp_path, TEST__EVAL_PERIOD=2, SOLVER__MAX_ITER=3)

    # of the 3rd iteration again, the 4th and the last one
    left = scripted(40.0, 20.0, 5.0)
    run(tmp_path, "--resume", TEST__EVAL_PERIOD=2)

    assert not left and checkpoint(tmp_path, "best")["iteration"] == 2
    assert best_predictions(tmp_path) == 40


def test_best_weights_of_other_validation_images_or_without_a_score_are_not_kept(
    tmp_path, scripted
):
    data, folder = tmp_path / "data", tmp_path / "run"
    flags = [f"--{part}-images={data}/photos" for part in ("train", "val")]
    flags += [f"--train-json={data}/annotations.json", f"--val-json={data}/val.json"]
    write_photos(data, photo_names(6))
    write_photos(data, photo_names(3, 6), "val.json")
    classes = {"MODEL__RETINANET__NUM_CLASSES": 3}
    scripted(40.0, 50.0)
    run(folder, *flags, SOLVER__MAX_ITER=2, **classes)

    with pytest.raises(PreflightError, match="TEST.BEST.*model_best.pth"):
        run(folder, "--resume", *flags, TEST__BEST="''", **classes)

    write_photos(data, photo_names(3, 9), "val.json")
    scripted(4.0, 6.0, 5.0)
    run(folder, "--resume", *flags, SOLVER__MAX_ITER=4, **classes)
    assert checkpoint(folder, "best")["iteration"] == 2
    assert best_predictions(folder) == 6


@pytest.mark.parametrize("best", ["bbox/AP", "bbox/APl", "validation/total_loss"])
def test_a_score_of_objects_that_the_validation_lacks_is_refused(tmp_path, best):
    write_photos(tmp_path, photo_names(6))
    train = tmp_path / "annotations.json"
    without_objects = {**json.loads(train.read_text()), "annotations": []}
    (tmp_path / "val.json").write_text(json.dumps(without_objects))
    flags = [f"--{part}-images={tmp_path}/photos" for part in ("train", "val")]
    flags += [f"--train-json={train}", f"--val-json={tmp_path}/val.json"]

    with pytest.raises(PreflightError, match=rf"TEST.BEST \('{best}'\).*no object"):
        run(tmp_path / "run", *flags, TEST__BEST=best, TEST__LOSS=True)


def test_a_trainer_with_its_own_validation_data_has_no_losses_on_it(tmp_path):
    class Own(Trainer):
        @classmethod
        def build_test_loader(cls, cfg, dataset_name):
            return super().build_test_loader(cfg, dataset_name)

    def own(**changes):
        schedule = {**EVALUATED, "TEST__LOSS": True, "SOLVER__MAX_ITER": 2, **changes}
        return Own(config_of(arguments(tmp_path, **schedule)))

    with pytest.raises(PreflightError, match="TEST.BEST"):
        own(TEST__BEST="validation/total_loss")

    own().train()
    assert "validation" not in (tmp_path / "metrics.json").read_text()


def test_the_lowest_loss_is_the_best(tmp_path):
    name = "validation/total_loss"

    run(tmp_path, TEST__BEST=name, TEST__LOSS=True, SOLVER__MAX_ITER=2)

    folder = RunFolder(tmp_path)
    losses = {
        record[name]: record["iteration"] for record in folder.metrics if name in record
    }
    best = checkpoint(tmp_path, "best")["iteration"]
    assert len(losses) == 2 and losses[min(losses)] == best == folder.best_iteration - 1
    line = (
        (tmp_path / "log.txt").read_text().partition("iter: 1 ")[2].partition("\n")[0]
    )
    assert "validation" not in line


TWO = "('gw_synthetic_val', 'gw_synthetic_train')"


def test_the_best_of_two_datasets_is_named_by_its_dataset(tmp_path, monkeypatch):
    def scores(self, cfg, model):
        return {name: {"bbox": {"AP": 5.0}} for name in cfg.DATASETS.TEST}

    monkeypatch.setattr(Trainer, "test", scores)

    best = "gw_synthetic_train/bbox/AP"
    run(tmp_path, DATASETS__TEST=TWO, TEST__BEST=best, SOLVER__MAX_ITER=1)

    assert (tmp_path / "model_best.pth").is_file()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"TEST__BEST": "segm/AP", "DATASETS__TEST": TWO},
            "gw_synthetic_train/segm/AP,",
        ),
        ({"TEST__BEST": "box/AP"}, "TEST.BEST.*bbox/AP, .*bbox/AP-star, .*segm/APl"),
        ({"TEST__BEST": "segm/AP", "MODEL__MASK_ON": False}, "TEST.BEST"),
        ({"TEST__BEST": "bbox/AP", "TEST__EVAL_PERIOD": 0}, "TEST.EVAL_PERIOD"),
        ({"TEST__BEST": "bbox/AP", "DATASETS__TEST": "()"}, "DATASETS.TEST"),
        ({"TEST__PATIENCE": 3}, "TEST.PATIENCE.*TEST.BEST"),
        ({"SOLVER__EMA": 1.0}, "SOLVER.EMA"),
        ({"SOLVER__AMP__ENABLED": True}, "SOLVER.AMP.ENABLED"),
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
    trainer = Trainer(
        config_of(arguments(tmp_path, MODEL__RESNETS__NORM="BN", **RETINANET))
    )
    model = trainer.checkpointer.model
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in norms:
        layer.running_mean.normal_(0, 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.loss_normalizer = normalizer = 20.0

    losses = validation_losses(trainer.cfg, model, 0)

    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert model.loss_normalizer == normalizer
    assert all(module.training for module in model.modules())
    names = ("loss_cls", "loss_box_reg", "total_loss")
    assert losses.keys() == {f"validation/{name}" for name in names}

    augmentations = build_augmentation(trainer.cfg, False)
    mapper = DatasetMapper(trainer.cfg, True, augmentations=augmentations)
    records = Trainer.build_test_loader(
        trainer.cfg, "gw_synthetic_val"
    ).dataset._dataset
    for layer in norms:
        layer.eval()
    expected = []
    for record in records:
        model.loss_normalizer = normalizer
        with torch.no_grad(), EventStorage(1):
            expected.append(float(sum(model([mapper(record)]).values())))
    mean = sum(expected) / len(expected)
    assert losses["validation/total_loss"] == pytest.approx(mean, rel=1e-6)

    without_data = changed_config(trainer.cfg, {"DATASETS.TEST": ()})
    assert validation_losses(without_data, model, 0) == {}
