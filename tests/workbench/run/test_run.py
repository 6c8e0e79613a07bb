"""main() and Trainer in this process: flags, weights, evaluation, checkpoints."""

import importlib.util
import json
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
    DatasetEvaluators,
    SemSegEvaluator,
)
from detectron2.structures import Boxes, Instances
from detectron2.utils import comm
from pycocotools.coco import COCO
from safetensors.torch import save_file

from gw_detectron.errors import ConfigError, MissingFileError, PreflightError, UserError
from gw_detectron.weights import convert_file, opening, read_weights_file
from gw_detectron.workbench.commands.train import get_parser
from gw_detectron.workbench.commands.train import run_here as main
from gw_detectron.workbench.run import Trainer
from gw_detectron.workbench.run.evaluation import DenseCOCOEvaluator
from gw_detectron.workbench.run.start import start_run

from ...loggers import reset_loggers
from ...tiny_run import CONFIG, arguments, config_of

pytestmark = pytest.mark.usefixtures("small_dataset", "one_thread")
SHORT = {"SOLVER__MAX_ITER": 1, "SOLVER__STEPS": "()", "DATASETS__TEST": "()"}
RESNET = {"MODEL__RESNETS__WHITEN_POSITIONS": "", **SHORT}
PANOPTIC = "gw_synthetic_val_panoptic_separated"


@pytest.fixture(scope="module")
def finished(small_dataset, tmp_path_factory):
    """The output folder of a finished run without evaluation; not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    main(arguments(folder, DATASETS__TEST="()"))
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


def trainer_for(tmp_path, **overrides) -> Trainer:
    return Trainer(config_of(arguments(tmp_path, **overrides)))


class TestFlags:
    def test_deterministic(self, tmp_path, monkeypatch):
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
        try:
            main(arguments(tmp_path, "--deterministic", **SHORT, CUDNN_BENCHMARK=True))
            assert (
                torch.are_deterministic_algorithms_enabled()
                and not torch.backends.cudnn.benchmark
            )
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
        finally:
            torch.use_deterministic_algorithms(False)

    def test_the_saved_config_starts_the_same_run(self, tmp_path):
        cfg = config_of(arguments(tmp_path))
        start_run(cfg)[1].close()
        args = arguments(tmp_path)
        args.config_file, args.opts = str(tmp_path / "config.yaml"), []
        assert yaml.safe_load(config_of(args).dump()) == yaml.safe_load(cfg.dump())

    def test_a_refused_run_leaves_the_folder_as_it_was(self, copy, tmp_path):
        before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("[!.]*")}
        with pytest.raises(PreflightError, match=r"MODEL.FPN.NORM \('XX'\)"):
            main(arguments(tmp_path, DATASETS__TEST="()", MODEL__FPN__NORM="XX"))
        assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("[!.]*")} == before
        with pytest.raises(PreflightError):
            main(arguments(tmp_path / "new", MODEL__FPN__NORM="XX"))
        assert not (tmp_path / "new").exists()

    def test_problems_that_are_ignored_become_warnings_but_unreadable_weights_stop_the_run(
        self, tmp_path
    ):
        main(arguments(tmp_path, "--ignore-preflight", MODEL__BACKBONE__FREEZE_AT=2, **SHORT))
        assert re.search(
            r"WARNING.*MODEL.BACKBONE.FREEZE_AT \(2\)", (tmp_path / "log.txt").read_text()
        )
        with pytest.raises(MissingFileError, match="MODEL.WEIGHTS: file not found: 'x.pth'"):
            main(arguments(tmp_path, "--ignore-preflight", MODEL__WEIGHTS="x.pth"))

    def test_a_config_of_detectron2_alone_is_refused(self):
        with pytest.raises(ConfigError, match="add_gw_config"):
            Trainer(get_cfg())

    @pytest.mark.parametrize(
        ("max_iter", "steps"), [(900, (60, 80)), (45, (30, 40)), (2, (1,)), (1, ())]
    )
    def test_drops_of_the_rate_move_with_a_shortened_schedule(self, tmp_path, max_iter, steps):
        (tmp_path / "base.yaml").write_text(
            f"_BASE_: {CONFIG}\nSOLVER: {{MAX_ITER: 90, STEPS: [60, 80]}}\n"
        )
        args = get_parser().parse_args(["--num-gpus", "0", "SOLVER.MAX_ITER", str(max_iter)])
        args.config_file = str(tmp_path / "base.yaml")
        assert ((60, 80) if max_iter > 90 else steps) == config_of(args).SOLVER.STEPS
        args.opts += ["SOLVER.STEPS", "(700,)"]
        assert config_of(args).SOLVER.STEPS == (700,)

    @pytest.mark.parametrize("device", ["mps", "xpu", "cuda:1"])
    def test_no_gpu_of_cuda_leaves_another_device_that_is_named(self, device):
        args = get_parser().parse_args(
            ["--num-gpus", "0", "--config-file", str(CONFIG), "MODEL.DEVICE", device]
        )
        assert device == config_of(args).MODEL.DEVICE

    @pytest.mark.parametrize(("gpus", "told"), [(1, True), (0, False)])
    def test_a_gpu_that_the_config_leaves_idle_is_told(self, monkeypatch, caplog, gpus, told):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(logging.getLogger("gw_detectron"), "propagate", True)
        args = get_parser().parse_args(["--num-gpus", str(gpus), "--config-file", str(CONFIG)])
        assert config_of(args).MODEL.DEVICE == "cpu"  # as the config of the demo says
        assert ("MODEL.DEVICE ('cpu')" in caplog.text) == told

    @pytest.mark.parametrize("start", ["scratch", "weights", "resume"])
    def test_the_screen_has_few_lines_before_the_first_loss_and_log_txt_the_rest(
        self, copy, tmp_path, capsys, start
    ):
        flags = ["--resume"] if start == "resume" else []
        weights = f"{tmp_path}/model_final.pth" if start == "weights" else ""
        folder = tmp_path if start == "resume" else tmp_path / "new"
        reset_loggers()  # pytest has added its own handlers to those of the first run
        main(
            arguments(
                folder, *flags, MODEL__WEIGHTS=weights, SOLVER__MAX_ITER=5, DATASETS__TEST="()"
            )
        )
        before, loss, _ = capsys.readouterr().out.partition("total_loss")
        assert loss and before.count("\n") <= 25 and (start == "resume" or "eta: " in before)
        log = (folder / "log.txt").read_text()
        assert [
            each
            for each in ("sys.platform", "Model:", "(backbone)", "Serializing", "total_loss")
            if each not in log
        ] == []
        assert "\x1b" not in log + before


class TestWeights:
    """Loaded tensors are reported, missing ones are an error."""

    def test_a_converted_file_is_loaded_whole(self, tmp_path, resnet18):
        path = tmp_path / "r18.safetensors"
        save_file(torch.load(resnet18, weights_only=True), path)
        with pytest.raises(PreflightError, match=f"weights convert {path}"):
            main(arguments(tmp_path / "out", MODEL__WEIGHTS=path, **RESNET))
        convert_file(path, tmp_path / "r18.pkl")  # the fix
        main(arguments(tmp_path / "out", MODEL__WEIGHTS=tmp_path / "r18.pkl", **RESNET))
        assert "backbone: 100/100 tensors" in (tmp_path / "out" / "log.txt").read_text()

    def test_an_evaluation_needs_a_whole_detector(self, copy, tmp_path, resnet18):
        convert_file(resnet18, weights := tmp_path / "r18.pkl")
        options = {
            **RESNET,
            "DATASETS__TEST": "('gw_synthetic_val',)",
            "MODEL__WEIGHTS": weights,
        }
        with pytest.raises(UserError, match="MODEL.WEIGHTS .*tensors are missing"):
            main(arguments(tmp_path / "out", "--eval-only", **options))
        options = {
            "MODEL__WEIGHTS": f"{tmp_path}/model_final.pth",
            "MODEL__ROI_HEADS__NUM_CLASSES": 3,
        }
        with pytest.raises(
            UserError, match=r"MODEL.WEIGHTS .*roi_heads.box_predictor.cls_score.weight"
        ):
            main(arguments(tmp_path, "--eval-only", "--ignore-preflight", **options))

    @pytest.mark.parametrize(
        "flags", [["--resume"], ["--eval-only"], []], ids=["resume", "evaluate", "fine-tune"]
    )
    def test_norms_that_tensors_do_not_tell_apart(self, copy, tmp_path, flags):
        """GN has the parameters of GW, and 16 groups those of 64."""
        config = (tmp_path / "config.yaml").read_text()
        folder = tmp_path if flags == ["--resume"] else tmp_path / "another"
        weights = str(tmp_path / "model_final.pth")
        for norm in ("GN", "GW:groups=8"):
            changed = {"MODEL__FPN__NORM": norm, "MODEL__WEIGHTS": weights}
            with pytest.raises(
                UserError,
                match="fpn_lateral2.norm GW:groups=16,iters=5,eps=1e-05,solver=newton in",
            ):
                main(arguments(folder, *flags, **changed))
        assert (tmp_path / "config.yaml").read_text() == config
        if flags != ["--resume"]:
            main(arguments(folder, *flags, "--allow-partial", **changed))

    def test_a_checkpoint_is_read_once(self, copy, tmp_path, monkeypatch):
        read = []
        monkeypatch.setattr(
            opening,
            "read_weights_file",
            lambda path: read.append(path) or read_weights_file(path),
        )
        main(arguments(tmp_path, "--resume", SOLVER__MAX_ITER=4, DATASETS__TEST="()"))
        main(arguments(tmp_path / "new", MODEL__WEIGHTS=tmp_path / "model_final.pth", **SHORT))
        assert read == [str(tmp_path / "model_final.pth")] * 2


class TestEvaluation:
    def test_training_evaluates_boxes_and_masks_and_eval_only_repeats_it(self, tmp_path):
        augmented = {"TEST__AUG__ENABLED": True, "TEST__AUG__MIN_SIZES": "(64,)"}
        trained = main(arguments(tmp_path, TEST__EVAL_PERIOD=2, **augmented))
        assert set(trained) == {"bbox", "segm"} and 0 <= trained["bbox"]["AP"] <= 100
        lines = [
            json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()
        ]
        assert [line["iteration"] for line in lines if "total_loss" in line] == [2]
        assert any("bbox_TTA/AP" in line and "segm_TTA/AP" in line for line in lines)
        assert list(tmp_path.glob("events.out.tfevents.*"))
        log = (tmp_path / "log.txt").read_text()
        assert re.search(r"norms: \d+ .*GW:groups=16,iters=5,eps=1e-05,solver=newton", log)

        record = ("config.yaml", "metrics.json", "model_final.pth", "last_checkpoint")
        before = [(tmp_path / name).read_bytes() for name in record]
        evaluated = main(arguments(tmp_path, "--eval-only", "--resume", **augmented))
        assert "bbox_TTA" in evaluated
        for task in trained:
            assert evaluated[task]["AP"] == pytest.approx(trained[task]["AP"])
        assert [(tmp_path / name).read_bytes() for name in record] == before
        config = yaml.safe_load((tmp_path / "inference" / "config.yaml").read_text())
        assert config["OUTPUT_DIR"] == str(tmp_path) and config["MODEL"]["WEIGHTS"].endswith(
            "model_final.pth"
        )
        assert "Evaluation results" in (tmp_path / "inference" / "log.txt").read_text()

        final = tmp_path / "model_final.pth"
        written = final.stat().st_mtime_ns
        resumed = main(arguments(tmp_path, "--resume"))
        assert final.stat().st_mtime_ns == written and resumed["segm"]["AP"] == pytest.approx(
            trained["segm"]["AP"]
        )
        assert "SOLVER.MAX_ITER (3): the run has finished" in (tmp_path / "log.txt").read_text()

    def test_an_evaluation_compiles_the_backbone(self, copy, tmp_path, monkeypatch):
        compiled = []
        monkeypatch.setattr(
            torch.nn.Module, "compile", lambda module: compiled.append(type(module).__name__)
        )
        assert (
            main(arguments(tmp_path, "--eval-only", "--resume", MODEL__COMPILE=True))
            and compiled
        )

    @pytest.mark.parametrize("ema", [0.0, 0.9])
    def test_precise_statistics_are_saved(self, tmp_path, ema):
        saved = {}
        for precise in (False, True):
            keys = {
                "TEST__PRECISE_BN__ENABLED": precise,
                "TEST__PRECISE_BN__NUM_ITER": 2,
                "SOLVER__EMA": ema,
                **SHORT,
            }
            main(arguments(tmp_path / str(precise), **keys))
            saved[precise] = read_weights_file(
                tmp_path / str(precise) / "model_final.pth"
            ).value["model"]
        changed = {
            name
            for name, value in saved[True].items()
            if not torch.equal(value, saved[False][name])
        }
        assert changed and all("running_" in name or "num_batches" in name for name in changed)

    @pytest.mark.parametrize("panopticapi", [True, False])
    @pytest.mark.parametrize(
        ("architecture", "expected"),
        [
            ("GeneralizedRCNN", [DenseCOCOEvaluator]),
            ("GWRetinaNet", [DenseCOCOEvaluator]),
            ("SemanticSegmentor", [SemSegEvaluator]),
            ("PanopticFPN", [DenseCOCOEvaluator, SemSegEvaluator, COCOPanopticEvaluator]),
        ],
    )
    def test_the_architecture_chooses_the_evaluators(
        self, tmp_path, monkeypatch, architecture, expected, panopticapi
    ):
        found = importlib.util.find_spec
        spec = lambda name: panopticapi or None if name == "panopticapi" else found(name)  # noqa: E731
        monkeypatch.setattr(importlib.util, "find_spec", spec)
        cfg = config_of(arguments(tmp_path, MODEL__META_ARCHITECTURE=architecture))
        built = Trainer.build_evaluator(cfg, PANOPTIC)
        parts = [
            type(part)
            for part in (built._evaluators if isinstance(built, DatasetEvaluators) else [built])
        ]
        assert parts == [
            each for each in expected if panopticapi or each is not COCOPanopticEvaluator
        ]


def test_the_fast_evaluation_equals_pycocotools(tmp_path):
    pytest.importorskip("faster_coco_eval")
    cfg = config_of(arguments(tmp_path, DATASETS__TEST="('gw_synthetic_train',)"))
    fast = Trainer.build_evaluator(cfg, "gw_synthetic_train")
    official = COCOEvaluator("gw_synthetic_train", ("bbox", "segm"), use_fast_impl=False)
    random, coco = (
        torch.Generator().manual_seed(0),
        COCO(MetadataCatalog.get("gw_synthetic_train").json_file),
    )
    for evaluator in (fast, official):
        evaluator.reset()
    for record in DatasetCatalog.get("gw_synthetic_train"):
        shape, objects = (record["height"], record["width"]), record["annotations"]
        boxes = torch.tensor([each["bbox"] for each in objects] * 3, dtype=torch.float64)
        boxes[:, 2:] += boxes[:, :2]
        found = Instances(shape)
        found.pred_boxes = Boxes(
            (boxes + 3 * torch.randn(boxes.shape, generator=random)).float()
        )
        found.pred_classes = torch.tensor([each["category_id"] for each in objects] * 3)
        found.pred_classes[::4] = 0
        found.scores = (10 * torch.rand(len(boxes), generator=random)).round() / 10  # with ties
        masks = [coco.annToMask({"image_id": record["image_id"], **each}) for each in objects]
        masks = [np.roll(mask, shift, 0) for shift in range(3) for mask in masks]
        found.pred_masks = torch.from_numpy(np.array(masks)).bool()
        for evaluator in (fast, official):
            evaluator.process([record], [{"instances": found}])
    results, expected = fast.evaluate(), official.evaluate()
    for task, scores in expected.items():
        assert 5 < scores["AP"] < 95
        assert results[task] == pytest.approx(scores, abs=1e-10, nan_ok=True)  # percent


def test_each_process_and_iteration_draws_other_numbers(tmp_path, monkeypatch):
    trainer, drawn = trainer_for(tmp_path), []
    monkeypatch.setattr(TrainerBase, "before_step", lambda self: None)
    for rank, trainer.iter in ((0, 0), (1, 0), (0, 1), (0, 0)):
        monkeypatch.setattr(comm, "get_rank", lambda rank=rank: rank)
        trainer.before_step()
        drawn.append(float(torch.rand(())))
    assert len(set(drawn)) == 3 and drawn[0] == drawn[3]


def test_a_checkpoint_of_another_optimizer_is_refused_and_one_without_is_a_warning(
    tmp_path, caplog
):
    trainer = trainer_for(tmp_path)
    state = {
        "iteration": 3,
        "_trainer": trainer._trainer.state_dict(),
    }  # as Detectron2's later versions write it
    state["_trainer"]["optimizer"]["param_groups"].pop()
    with pytest.raises(ConfigError, match="--resume"):
        trainer.load_state_dict(state)
    del state["_trainer"]
    logging.getLogger("gw_detectron").propagate = True
    trainer.load_state_dict(state)
    assert "the momentum starts from zero" in caplog.text and "no seed" in caplog.text
    assert trainer.data_loader.batches == 4
