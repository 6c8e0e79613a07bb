"""main() and Trainer in this process: flags, weights, evaluation, checkpoints."""

import importlib.util
import logging
import os
import re
import shutil

import numpy as np
import pytest
import torch
import torchvision
import yaml
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine.train_loop import TrainerBase
from detectron2.evaluation import (
    COCOEvaluator,
    COCOPanopticEvaluator,
    SemSegEvaluator,
)
from detectron2.structures import Boxes, Instances
from detectron2.utils import comm
from pycocotools.coco import COCO
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from gw_detectron.config import read_config
from gw_detectron.errors import ConfigError, MissingFileError, PreflightError, UserError
from gw_detectron.weights import convert_file, opening, read_weights_file
from gw_detectron.workbench.commands.train import get_parser
from gw_detectron.workbench.commands.train import run_here as main
from gw_detectron.workbench.run import Trainer
from gw_detectron.workbench.run.evaluation import DenseCOCOEvaluator
from gw_detectron.workbench.run.folder import read_metrics

from ...loggers import reset_loggers
from ...tiny_run import CONFIG, arguments, config_of

pytestmark = pytest.mark.usefixtures("small_dataset", "one_thread")
SHORT = {"SOLVER__MAX_ITER": 1, "SOLVER__STEPS": "()", "DATASETS__TEST": "()"}
RESNET = {"MODEL__RESNETS__WHITEN_POSITIONS": "", **SHORT}
AUGMENTED = {"TEST__AUG__ENABLED": True, "TEST__AUG__MIN_SIZES": "(64,)"}
PANOPTIC = "gw_synthetic_val_panoptic_separated"


@pytest.fixture(scope="module")
def finished(small_dataset, tmp_path_factory):
    """The output folder of a finished run without evaluation; not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    main(arguments(folder, DATASETS__TEST="()"))
    reset_loggers()  # pytest has added its own handlers
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the finished run in ``tmp_path``."""
    return shutil.copytree(finished, tmp_path, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def resnet18(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    state = torchvision.models.resnet18(weights=None).state_dict()
    for name, value in state.items():
        if "running" in name:  # untouched statistics are those of Caffe's files
            value.uniform_(0.5, 1.0)
    torch.save(state, path)
    return path


def trainer_for(folder) -> Trainer:
    cfg = config_of(arguments(folder))
    return Trainer(cfg)


class TestFlags:
    def test_deterministic(self, tmp_path, monkeypatch):
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
        try:
            main(arguments(tmp_path, "--deterministic", **SHORT, CUDNN_BENCHMARK=True))
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.backends.cudnn.benchmark
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
        finally:
            torch.use_deterministic_algorithms(False)

    def test_the_saved_config_starts_the_same_run(self, finished):
        first = config_of(arguments(finished, DATASETS__TEST="()"))
        args = arguments(finished)
        args.config_file = str(finished / "config.yaml")
        args.opts = []
        again = config_of(args)

        assert yaml.safe_load(again.dump()) == yaml.safe_load(first.dump())

    def test_a_refused_run_leaves_the_folder_as_it_was(self, copy, tmp_path):
        def times():
            return {
                path.name: path.stat().st_mtime_ns for path in tmp_path.glob("[!.]*")
            }

        before = times()
        with pytest.raises(PreflightError, match=r"MODEL.FPN.NORM \('XX'\)"):
            main(arguments(tmp_path, DATASETS__TEST="()", MODEL__FPN__NORM="XX"))
        assert times() == before

        new = tmp_path / "new"
        with pytest.raises(PreflightError):
            main(arguments(new, MODEL__FPN__NORM="XX"))
        assert not new.exists()

    def test_problems_that_are_ignored_become_warnings(self, tmp_path):
        main(
            arguments(
                tmp_path, "--ignore-preflight", MODEL__BACKBONE__FREEZE_AT=2, **SHORT
            )
        )

        log = (tmp_path / "log.txt").read_text()
        assert re.search(r"WARNING.*MODEL.BACKBONE.FREEZE_AT \(2\)", log)

    def test_unreadable_weights_cannot_be_ignored(self, tmp_path):
        with pytest.raises(MissingFileError, match="'x.pth'"):
            main(arguments(tmp_path, "--ignore-preflight", MODEL__WEIGHTS="x.pth"))

    def test_a_config_of_detectron2_alone_is_refused(self):
        with pytest.raises(ConfigError, match="add_gw_config"):
            Trainer(get_cfg())

    @pytest.mark.parametrize("device", ["mps", "xpu", "cuda:1"])
    def test_no_gpu_of_cuda_leaves_another_device_that_is_named(self, device):
        flags = [
            "--num-gpus",
            "0",
            "--config-file",
            str(CONFIG),
            "MODEL.DEVICE",
            device,
        ]
        args = get_parser().parse_args(flags)
        assert device == config_of(args).MODEL.DEVICE

    @pytest.mark.parametrize(("gpus", "told"), [("1", True), ("0", False)])
    def test_a_gpu_that_the_config_leaves_idle_is_told(
        self, monkeypatch, caplog, gpus, told
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(logging.getLogger("gw_detectron"), "propagate", True)
        args = get_parser().parse_args(
            ["--num-gpus", gpus, "--config-file", str(CONFIG)]
        )

        cfg = config_of(args)

        assert cfg.MODEL.DEVICE == "cpu"  # as the config of the demo says
        assert ("MODEL.DEVICE ('cpu')" in caplog.text) == told

    @pytest.mark.parametrize("start", ["scratch", "weights", "resume"])
    def test_the_screen_has_few_lines_before_the_first_loss_and_log_txt_the_rest(
        self, copy, tmp_path, capsys, start
    ):
        folder = tmp_path / "new"
        flags = []
        changes = {"SOLVER__MAX_ITER": 5, "DATASETS__TEST": "()"}
        if start == "resume":
            folder = tmp_path
            flags = ["--resume"]
        elif start == "weights":
            changes["MODEL__WEIGHTS"] = f"{tmp_path}/model_final.pth"

        main(arguments(folder, *flags, **changes))

        before, loss, _ = capsys.readouterr().out.partition("total_loss")
        assert loss
        assert before.count("\n") <= 25
        if start != "resume":
            assert "eta: " in before
        log = (folder / "log.txt").read_text()
        for words in (
            "sys.platform",
            "Model:",
            "(backbone)",
            "Serializing",
            "total_loss",
        ):
            assert words in log
        assert "\x1b" not in log + before


def test_outputs_of_other_classes_are_told(copy, tmp_path):
    weights = copy / "model_final.pth"
    content = torch.load(weights, weights_only=True)
    for entry in content["record"]["classes"]:
        entry["name"] = f"old {entry['name']}"
    torch.save(content, weights)

    main(arguments(tmp_path / "new", MODEL__WEIGHTS=weights, **SHORT))

    assert "was trained for old " in (tmp_path / "new" / "log.txt").read_text()


def test_screen_says_time_left_and_epochs(tmp_path, capsys):
    given = arguments(tmp_path, SOLVER__MAX_ITER=8, DATASETS__TEST="()")
    main(given)

    shown = capsys.readouterr().out
    assert re.search(r"an iteration takes \S+ s, the rest of the run 0:0\d:\d\d", shown)
    cfg = read_config(tmp_path / "config.yaml")
    images = sum(len(DatasetCatalog.get(name)) for name in cfg.DATASETS.TRAIN)
    passes = 8 * cfg.SOLVER.IMS_PER_BATCH * cfg.SOLVER.ACCUMULATE / images
    assert re.search(rf"epoch: {passes:.3g} of {passes:.3g}  .*iter: 7", shown)


def test_tensorboard_shows_a_step_that_a_resumed_run_repeats_once(copy, tmp_path):
    with SummaryWriter(str(tmp_path)) as killed:
        killed.add_scalar("bbox/AP", 5.0, 3)
        killed.add_scalar("total_loss", 9.0, 4)

    main(arguments(tmp_path, "--resume", SOLVER__MAX_ITER=5, DATASETS__TEST="()"))

    events = EventAccumulator(str(tmp_path)).Reload()
    # of the evaluation after the last iteration
    assert [event.step for event in events.Scalars("bbox/AP")] == [3]
    losses = {event.step: event.value for event in events.Scalars("total_loss")}
    assert len(losses) == len(events.Scalars("total_loss"))
    assert losses[4] != 9


class TestWeights:
    """Loaded tensors are reported, missing ones are an error."""

    def test_a_converted_file_is_loaded_whole(self, tmp_path, resnet18):
        path = tmp_path / "r18.safetensors"
        converted = tmp_path / "r18.pkl"
        output = tmp_path / "out"
        save_file(torch.load(resnet18, weights_only=True), path)
        with pytest.raises(PreflightError, match=f"weights convert {path}"):
            main(arguments(output, MODEL__WEIGHTS=path, **RESNET))

        convert_file(path, converted)  # the fix
        main(arguments(output, MODEL__WEIGHTS=converted, **RESNET))

        assert "backbone: 100/100 tensors" in (output / "log.txt").read_text()

    def test_an_evaluation_needs_a_whole_detector(self, tmp_path, resnet18):
        weights = tmp_path / "r18.pkl"
        convert_file(resnet18, weights)
        options = {**RESNET, "DATASETS__TEST": "('gw_synthetic_val',)"}

        with pytest.raises(UserError, match="MODEL.WEIGHTS .*missing"):
            main(
                arguments(
                    tmp_path / "out", "--eval-only", MODEL__WEIGHTS=weights, **options
                )
            )

    def test_an_evaluation_needs_tensors_of_its_shapes(self, copy, tmp_path):
        options = {
            "MODEL__WEIGHTS": f"{tmp_path}/model_final.pth",
            "MODEL__ROI_HEADS__NUM_CLASSES": 3,
        }
        with pytest.raises(UserError, match="roi_heads.box_predictor.cls_score.weight"):
            main(arguments(tmp_path, "--eval-only", "--ignore-preflight", **options))

    @pytest.mark.parametrize(
        "flags",
        [["--resume"], ["--eval-only"], []],
        ids=["resume", "evaluate", "fine-tune"],
    )
    def test_norms_that_tensors_do_not_tell_apart(self, copy, tmp_path, flags):
        """GN has the parameters of GW, and 16 groups those of 64."""
        resumes = flags == ["--resume"]
        folder = tmp_path if resumes else tmp_path / "another"
        weights = {"MODEL__WEIGHTS": str(tmp_path / "model_final.pth")}
        config = (tmp_path / "config.yaml").read_text()
        theirs = "fpn_lateral2.norm GW:groups=16,iters=5,eps=1e-05,solver=newton"

        for norm in ("GN", "GW:groups=8"):
            with pytest.raises(UserError, match=theirs):
                main(arguments(folder, *flags, MODEL__FPN__NORM=norm, **weights))

        assert (tmp_path / "config.yaml").read_text() == config
        if not resumes:
            flags = [*flags, "--allow-partial"]
            main(arguments(folder, *flags, MODEL__FPN__NORM="GN", **weights))

    def test_a_checkpoint_is_read_once(self, copy, tmp_path, monkeypatch):
        paths = []

        def read(path):
            paths.append(path)
            return read_weights_file(path)

        monkeypatch.setattr(opening, "read_weights_file", read)
        weights = str(tmp_path / "model_final.pth")

        main(arguments(tmp_path, "--resume", SOLVER__MAX_ITER=4, DATASETS__TEST="()"))
        assert paths == [weights]

        main(arguments(tmp_path / "new", MODEL__WEIGHTS=weights, **SHORT))
        assert paths == [weights] * 2


class TestEvaluation:
    @pytest.fixture(scope="class")
    def evaluated(self, small_dataset, tmp_path_factory):
        """The folder of a finished run with evaluations, and its results; not to be changed."""
        folder = tmp_path_factory.mktemp("evaluated")
        results = main(arguments(folder, TEST__EVAL_PERIOD=2, **AUGMENTED))
        reset_loggers()  # pytest has added its own handlers
        return folder, results

    def test_a_training_evaluates_boxes_and_masks(self, evaluated):
        folder, results = evaluated

        assert set(results) == {"bbox", "segm"}
        assert 0 <= results["bbox"]["AP"] <= 100
        lines = read_metrics(folder / "metrics.json")
        assert [line["iteration"] for line in lines if "total_loss" in line] == [1, 2]
        augmented = [line for line in lines if "bbox_TTA/AP" in line]
        assert "segm_TTA/AP" in augmented[-1]
        assert list(folder.glob("events.out.tfevents.*"))
        log = (folder / "log.txt").read_text()
        assert re.search(
            r"norms: \d+ .*GW:groups=16,iters=5,eps=1e-05,solver=newton", log
        )

    def test_an_evaluation_repeats_the_results_and_leaves_the_record(
        self, evaluated, tmp_path
    ):
        folder, trained = evaluated
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        record = ("config.yaml", "metrics.json", "model_final.pth", "last_checkpoint")

        results = main(arguments(tmp_path, "--eval-only", "--resume", **AUGMENTED))

        assert "bbox_TTA" in results
        for task in trained:
            assert results[task]["AP"] == pytest.approx(trained[task]["AP"])
        for name in record:
            assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
        config = read_config(tmp_path / "inference" / "config.yaml")
        assert str(tmp_path) == config.OUTPUT_DIR
        assert f"{tmp_path}/model_final.pth" == config.MODEL.WEIGHTS
        assert "Evaluation results" in (tmp_path / "inference" / "log.txt").read_text()

    def test_a_finished_run_is_evaluated_when_it_is_resumed(self, evaluated, tmp_path):
        folder, trained = evaluated
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        final = tmp_path / "model_final.pth"
        written = final.stat().st_mtime_ns

        results = main(arguments(tmp_path, "--resume"))

        assert results["segm"]["AP"] == pytest.approx(trained["segm"]["AP"])
        assert final.stat().st_mtime_ns == written
        assert "SOLVER.MAX_ITER (3)" in (tmp_path / "log.txt").read_text()

    def test_an_evaluation_compiles_the_backbone(self, copy, tmp_path, monkeypatch):
        compiled = []
        monkeypatch.setattr(
            torch.nn.Module, "compile", lambda module: compiled.append(module)
        )

        results = main(
            arguments(tmp_path, "--eval-only", "--resume", MODEL__COMPILE=True)
        )

        assert results
        assert compiled

    @pytest.mark.parametrize("ema", [0.0, 0.9])
    def test_precise_statistics_are_saved(self, tmp_path, ema):
        def trained(precise):
            folder = tmp_path / str(precise)
            keys = {
                "TEST__PRECISE_BN__ENABLED": precise,
                "TEST__PRECISE_BN__NUM_ITER": 2,
                "SOLVER__EMA": ema,
            }
            main(arguments(folder, **keys, **SHORT))
            return read_weights_file(folder / "model_final.pth").value["model"]

        without = trained(False)
        precise = trained(True)

        changed = [
            name for name in precise if not torch.equal(precise[name], without[name])
        ]
        assert changed
        assert all("running_" in name or "num_batches" in name for name in changed)

    @pytest.mark.parametrize(
        ("architecture", "panopticapi", "expected"),
        [
            ("GeneralizedRCNN", None, [DenseCOCOEvaluator]),
            ("GWRetinaNet", None, [DenseCOCOEvaluator]),
            ("SemanticSegmentor", None, [SemSegEvaluator]),
            ("PanopticFPN", None, [DenseCOCOEvaluator, SemSegEvaluator]),
            (
                "PanopticFPN",
                "installed",
                [DenseCOCOEvaluator, SemSegEvaluator, COCOPanopticEvaluator],
            ),
        ],
    )
    def test_the_architecture_chooses_the_evaluators(
        self, tmp_path, monkeypatch, architecture, panopticapi, expected
    ):
        find_spec = importlib.util.find_spec

        def find(name):
            return panopticapi if name == "panopticapi" else find_spec(name)

        monkeypatch.setattr(importlib.util, "find_spec", find)
        cfg = config_of(arguments(tmp_path, MODEL__META_ARCHITECTURE=architecture))

        evaluator = Trainer.build_evaluator(cfg, PANOPTIC)

        parts = getattr(evaluator, "_evaluators", [evaluator])
        assert [type(part) for part in parts] == expected


def noisy_predictions(record, coco, random):
    """Return moved copies of the objects, some of another class, with ties of scores."""
    annotations = record["annotations"]
    boxes = torch.tensor([annotation["bbox"] for annotation in annotations] * 3)
    boxes = boxes.double()
    boxes[:, 2:] += boxes[:, :2]
    noise = 3 * torch.randn(boxes.shape, generator=random)
    classes = torch.tensor(
        [annotation["category_id"] for annotation in annotations] * 3
    )
    classes[::4] = 0
    scores = 10 * torch.rand(len(boxes), generator=random)

    masks = []
    for shift in range(3):
        for annotation in annotations:
            mask = coco.annToMask({"image_id": record["image_id"], **annotation})
            masks.append(np.roll(mask, shift, 0))
    return Instances(
        (record["height"], record["width"]),
        pred_boxes=Boxes((boxes + noise).float()),
        pred_classes=classes,
        scores=scores.round() / 10,
        pred_masks=torch.from_numpy(np.array(masks)).bool(),
    )


def test_the_fast_evaluation_equals_pycocotools(tmp_path):
    pytest.importorskip("faster_coco_eval")
    name = "gw_synthetic_train"
    cfg = config_of(arguments(tmp_path, DATASETS__TEST=f"('{name}',)"))
    fast = Trainer.build_evaluator(cfg, name)
    official = COCOEvaluator(name, ("bbox", "segm"), use_fast_impl=False)
    coco = COCO(MetadataCatalog.get(name).json_file)
    random = torch.Generator().manual_seed(0)

    fast.reset()
    official.reset()
    for record in DatasetCatalog.get(name):
        predictions = {"instances": noisy_predictions(record, coco, random)}
        fast.process([record], [predictions])
        official.process([record], [predictions])
    results = fast.evaluate()

    for task, scores in official.evaluate().items():
        assert 5 < scores["AP"] < 95
        assert results[task] == pytest.approx(scores, abs=1e-10, nan_ok=True)  # percent


def test_each_process_and_iteration_draws_other_numbers(tmp_path, monkeypatch):
    trainer = trainer_for(tmp_path)
    monkeypatch.setattr(TrainerBase, "before_step", lambda self: None)

    def draw(rank, iteration):
        monkeypatch.setattr(comm, "get_rank", lambda: rank)
        trainer.iter = iteration
        trainer.before_step()
        return float(torch.rand(()))

    first = draw(0, 0)
    assert len({first, draw(1, 0), draw(0, 1)}) == 3
    assert draw(0, 0) == first


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    trainer = trainer_for(tmp_path)
    saved = trainer._trainer.state_dict()
    saved["optimizer"]["param_groups"].pop()

    with pytest.raises(ConfigError, match="--resume"):
        # as Detectron2's later versions write it
        trainer.load_state_dict({"iteration": 3, "_trainer": saved})


def test_a_checkpoint_without_an_optimizer_is_a_warning(tmp_path, caplog):
    trainer = trainer_for(tmp_path)
    logging.getLogger("gw_detectron").propagate = True

    trainer.load_state_dict({"iteration": 3})

    assert "the momentum starts from zero" in caplog.text
    assert "no seed" in caplog.text
    assert trainer.data_loader.batches == 4
