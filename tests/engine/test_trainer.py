"""The Trainer and main() in this process: evaluation, checkpoints, and the messages of failures."""

import importlib.util
import json
import logging
import os
import re
import resource
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from detectron2.config import get_cfg
from detectron2.engine.train_loop import TrainerBase
from detectron2.utils import comm

from gw_detectron.checkpoint import opening
from gw_detectron.engine import Trainer, main, setup, whitening_stats
from gw_detectron.engine.whitening_stats import REDUCTIONS, WhiteningStatsHook
from gw_detectron.errors import (
    ConfigError,
    FileAccessError,
    InvalidWeightsError,
    MissingFileError,
    NonFiniteError,
    NormMismatchError,
    PreflightError,
    RecordError,
    UserError,
)
from gw_detectron.weights import read_weights_file

from ..tiny_run import arguments

pytestmark = pytest.mark.usefixtures("small_dataset", "one_thread")


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


def trainer_for(tmp_path, **overrides) -> Trainer:
    return Trainer(setup(arguments(tmp_path, **overrides)))


def test_training_evaluates_boxes_and_masks_and_eval_only_repeats_it(tmp_path):
    trained = main(arguments(tmp_path, TEST__EVAL_PERIOD=2, TEST__AUG__ENABLED=True, TEST__AUG__MIN_SIZES="(64,)"))

    assert set(trained) == {"bbox", "segm"} and 0 <= trained["bbox"]["AP"] <= 100
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert [line["iteration"] for line in lines if "total_loss" in line] == [2]
    assert any("bbox_TTA/AP" in line and "segm_TTA/AP" in line for line in lines)
    assert list(tmp_path.glob("events.out.tfevents.*"))
    evaluated = main(arguments(tmp_path, "--eval-only", "--resume", "--whitening-stats-period", "1"))
    assert evaluated["bbox"]["AP"] == pytest.approx(trained["bbox"]["AP"])
    assert evaluated["segm"]["AP"] == pytest.approx(trained["segm"]["AP"])
    assert "--whitening-stats-period has no effect with --eval-only" in (tmp_path / "inference/log.txt").read_text()


def test_eval_only_leaves_the_record_of_the_training(copy, tmp_path):
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    main(arguments(tmp_path, "--eval-only", "--resume", MODEL__ROI_HEADS__SCORE_THRESH_TEST=0.5))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    config = yaml.safe_load((tmp_path / "inference" / "config.yaml").read_text())
    assert config["MODEL"]["ROI_HEADS"]["SCORE_THRESH_TEST"] == 0.5 and config["OUTPUT_DIR"] == str(tmp_path)
    assert "Evaluation results" in (tmp_path / "inference" / "log.txt").read_text()


def test_deterministic(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    try:
        main(arguments(tmp_path, "--deterministic", DATASETS__TEST="()", CUDNN_BENCHMARK=True))
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"]
    finally:
        torch.use_deterministic_algorithms(False)


def test_whitening_layers_are_logged_every_period(tmp_path):
    main(arguments(tmp_path, "--whitening-stats-period", "2", DATASETS__TEST="()"))
    records = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    logged = {name: value for record in records for name, value in record.items() if name.startswith("whitening/")}
    stem = {name: logged[f"whitening/backbone.bottom_up.stem.conv1.norm/{name}"] for name in REDUCTIONS}
    assert 0 < stem["lambda_min"] < stem["lambda_max"] and stem["condition_after"] < stem["condition_before"]
    assert "whitening/roi_heads.box_head.conv1.norm/residual" in logged


def test_a_period_that_is_negative_leaves_no_folder(tmp_path):
    output = tmp_path / "output"
    with pytest.raises(ValueError, match="--whitening-stats-period -5"):
        main(arguments(output, "--whitening-stats-period", "-5"))
    assert not output.exists()


def test_each_process_and_iteration_draws_other_numbers(tmp_path, monkeypatch):
    trainer, drawn = trainer_for(tmp_path), []
    monkeypatch.setattr(TrainerBase, "before_step", lambda self: None)
    for rank, trainer.iter in ((0, 0), (1, 0), (0, 1), (0, 0)):
        monkeypatch.setattr(comm, "get_rank", lambda rank=rank: rank)
        trainer.before_step()
        drawn.append(float(torch.rand(())))
    assert len(set(drawn)) == 3 and drawn[0] == drawn[3]


def test_evaluations_between_steps_are_not_observed(tmp_path, monkeypatch):
    looked_at = []
    checked = whitening_stats.checked_statistics
    record = lambda *call: looked_at.append(call[0]) or checked(*call)  # noqa: E731
    monkeypatch.setattr(whitening_stats, "checked_statistics", record)
    trainer = trainer_for(tmp_path, TEST__EVAL_PERIOD=1)
    trainer.register_hooks([WhiteningStatsHook(1)])
    trainer.train()
    assert looked_at.count("backbone.bottom_up.stem.conv1.norm") == 3


def test_an_evaluation_of_another_checkpoint_meanwhile_is_replaced(tmp_path):
    trainer = trainer_for(tmp_path)
    config = tmp_path / "inference" / "config.yaml"
    config.parent.mkdir(exist_ok=True)
    config.write_text("VERSION: 2")
    trainer.train()
    assert (config.parent / "coco_instances_results.json").exists() and not config.exists()


def test_resume_after_the_end_trains_no_more_but_evaluates(tmp_path):
    trained = main(arguments(tmp_path))
    before = (tmp_path / "model_final.pth").stat().st_mtime_ns

    resumed = main(arguments(tmp_path, "--resume"))

    assert (tmp_path / "model_final.pth").stat().st_mtime_ns == before
    assert resumed["segm"]["AP"] == pytest.approx(trained["segm"]["AP"])


@pytest.mark.parametrize("flags", [["--resume"], ["--eval-only"], []], ids=["resume", "evaluate", "fine-tune"])
def test_norms_that_tensors_do_not_tell_apart(copy, tmp_path, flags):
    """GN has the parameters of GW, and 16 groups those of 64."""
    config = (tmp_path / "config.yaml").read_text()
    folder = tmp_path if flags == ["--resume"] else tmp_path / "another"
    weights = str(tmp_path / "model_final.pth")
    for norm in ("GN", "GW:groups=8"):
        changed = {"MODEL__FPN__NORM": norm, "MODEL__WEIGHTS": weights}
        with pytest.raises((PreflightError, NormMismatchError), match="8 (norms|layers) differ") as caught:
            main(arguments(folder, *flags, **changed))
        assert "fpn_lateral2.norm GW:groups=16,iters=5,eps=1e-05,solver=newton in the checkpoint" in str(caught.value)
    assert (tmp_path / "config.yaml").read_text() == config
    if flags != ["--resume"]:
        main(arguments(folder, *flags, "--allow-partial", **changed))


def test_norms_are_summed_up_in_the_log(finished):
    assert re.search(r"norms: \d+ .*GW:groups=16,iters=5,eps=1e-05,solver=newton", (finished / "log.txt").read_text())


def test_resume_restores_the_optimizer(tmp_path):
    first = trainer_for(tmp_path, DATASETS__TEST="()")
    first.train()
    second = trainer_for(tmp_path, SOLVER__MAX_ITER=9, DATASETS__TEST="()")
    second.resume_or_load(resume=True)

    assert second.start_iter == 3
    old, new = first.optimizer.state_dict(), second.optimizer.state_dict()
    assert old["state"].keys() == new["state"].keys() != set()
    for index, state in old["state"].items():
        assert torch.equal(state["momentum_buffer"], new["state"][index]["momentum_buffer"])
    assert [group["lr"] for group in old["param_groups"]] == [group["lr"] for group in new["param_groups"]]


def test_a_checkpoint_with_another_optimizer_is_explained(tmp_path):
    first = trainer_for(tmp_path)  # the checkpointer holds it by a weak reference
    first.checkpointer.save("model_0000001")
    content = torch.load(tmp_path / "model_0000001.pth", weights_only=True)
    content["trainer"]["_trainer"]["optimizer"]["param_groups"].pop()
    torch.save(content, tmp_path / "model_0000001.pth")
    with pytest.raises(ValueError, match="does not fit this config: .* leave out --resume and set MODEL.WEIGHTS"):
        trainer_for(tmp_path).resume_or_load(resume=True)


def test_a_checkpoint_of_detectron2s_own_trainer_is_recognized(tmp_path):
    trainer = trainer_for(tmp_path)
    state = {"iteration": 3, "_trainer": trainer._trainer.state_dict()}  # as Detectron2's later versions write it
    state["_trainer"]["optimizer"]["param_groups"].pop()
    with pytest.raises(ValueError, match="perhaps written by Detectron2's own trainer"):
        trainer.load_state_dict(state)


@pytest.mark.parametrize(
    "state", ["text", *({"iteration": bad} for bad in ("x", -7, True, 2**53, 1.0)), {}, None], ids=str
)
def test_a_checkpoint_with_a_damaged_training_state_is_refused(copy, tmp_path, state):
    content = torch.load(tmp_path / "model_final.pth", weights_only=True)
    torch.save({**content, "trainer": state}, tmp_path / "model_final.pth")
    with pytest.raises(UserError, match="--resume .*model_final.pth'\\): no training state"):
        trainer_for(tmp_path, DATASETS__TEST="()").resume_or_load(resume=True)


@pytest.mark.parametrize("iteration", ["x", -7, None], ids=str)
def test_a_checkpoint_with_a_damaged_iteration_is_refused(copy, tmp_path, iteration):
    content = torch.load(tmp_path / "model_final.pth", weights_only=True)
    torch.save({**content, "iteration": iteration}, tmp_path / "model_final.pth")
    with pytest.raises(UserError, match="--resume .*model_final.pth'\\): no training state .*iteration"):
        main(arguments(tmp_path, "--resume", DATASETS__TEST="()", SOLVER__MAX_ITER=4))


def test_evaluation_of_weights_with_nan_is_refused(copy, tmp_path):
    content = torch.load(tmp_path / "model_final.pth", weights_only=True)
    content["model"]["roi_heads.box_predictor.cls_score.weight"][0, 0] = torch.nan
    torch.save(content, tmp_path / "nan.pth")
    with pytest.raises(InvalidWeightsError, match=r"1 tensors with .* infinite \(roi_heads.box_predictor.cls_score"):
        main(arguments(tmp_path / "out", "--eval-only", MODEL__WEIGHTS=tmp_path / "nan.pth"))


def test_a_checkpoint_is_read_once(copy, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(opening, "read_weights_file", lambda path: read.append(path) or read_weights_file(path))
    main(arguments(tmp_path, "--resume", SOLVER__MAX_ITER=4, DATASETS__TEST="()"))
    main(arguments(tmp_path / "new", MODEL__WEIGHTS=tmp_path / "model_final.pth", DATASETS__TEST="()"))
    assert read == [str(tmp_path / "model_final.pth")] * 2


def test_a_checkpoint_without_optimizer_is_resumed_with_a_warning(tmp_path, caplog):
    first = trainer_for(tmp_path)
    first.checkpointer.save("model_0000001")
    content = torch.load(tmp_path / "model_0000001.pth", weights_only=True)
    del content["trainer"]["_trainer"]
    torch.save(content, tmp_path / "model_0000001.pth")
    caplog.set_level("WARNING", logger="gw_detectron")
    logging.getLogger("gw_detectron").addHandler(caplog.handler)
    try:
        trainer_for(tmp_path).resume_or_load(resume=True)
    finally:
        logging.getLogger("gw_detectron").removeHandler(caplog.handler)
    assert "the momentum starts from zero" in caplog.text


def test_a_config_of_detectron2_alone_is_refused():
    with pytest.raises(ConfigError, match=r"cfg: has no keys of this package. Fix: call gw_detectron.add_gw_config"):
        Trainer(get_cfg())


def test_amp_needs_a_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("speaks about a machine without a GPU")
    with pytest.raises(PreflightError, match="SOLVER.AMP.ENABLED"):
        main(arguments(tmp_path, SOLVER__AMP__ENABLED=True))
    with pytest.raises(PreflightError, match="MODEL.DEVICE cpu"):
        main(arguments(tmp_path, MODEL__DEVICE="cuda"))
    assert setup(arguments(tmp_path, "--num-gpus", "0", MODEL__DEVICE="cuda")).MODEL.DEVICE == "cpu"


def test_without_tensorboard_the_metrics_are_written_all_the_same(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find_spec(name))
    trainer_for(tmp_path, SOLVER__MAX_ITER=1, SOLVER__STEPS="()", DATASETS__TEST="()").train()
    assert "total_loss" in (tmp_path / "metrics.json").read_text()
    assert not list(tmp_path.glob("events.*"))


class TestNonFinite:
    @pytest.mark.parametrize("norm", ["GW", "GW:solver=zca"])  # the second stops before there is a loss
    def test_an_image_with_nan_is_named(self, tmp_path, norm):
        class WithNan(Trainer):
            @classmethod
            def build_train_loader(cls, cfg):
                for batch in super().build_train_loader(cfg):
                    batch[1]["image"] = batch[1]["image"].float()
                    batch[1]["image"][0, 3, 5] = float("nan")
                    batch[1]["file_name"] = "pictures/broken.tif"
                    yield batch

        trainer = WithNan(setup(arguments(tmp_path, MODEL__RESNETS__WHITEN_NORM=norm)))
        with pytest.raises(NonFiniteError, match=r"iteration 0.*\n.*broken.tif has 1 values that are NaN"):
            trainer.train()

    def test_a_parameter_with_nan_is_named(self, tmp_path):
        trainer = trainer_for(tmp_path)
        with torch.no_grad():
            trainer.model.backbone.bottom_up.res3[0].conv2.norm.weight[0] = float("inf")
        name = "backbone.bottom_up.res3.0.conv2.norm.weight"
        with pytest.raises(NonFiniteError, match=f"{name} has values that are NaN or infinite"):
            trainer.train()

    def test_the_first_module_that_overflows_is_named(self, tmp_path):
        trainer = trainer_for(tmp_path)
        with torch.no_grad():  # finite itself, but not after the convolution
            trainer.model.backbone.bottom_up.res4[0].conv1.weight.fill_(3e38)
        with pytest.raises(NonFiniteError, match=r"first module .* is backbone\.bottom_up\.res4\.0\.conv1[. ]"):
            trainer.train()

    def test_the_hook_names_the_whitening_layer(self, tmp_path):
        trainer = trainer_for(tmp_path)
        trainer.register_hooks([WhiteningStatsHook(1)])
        with torch.no_grad():
            trainer.model.backbone.bottom_up.res4[0].conv1.weight.fill_(3e38)
        message = r"whitening layer .*\.res4\.0\.conv2\.norm'\): its input is not .*\n.*first module .*conv1[. ]"
        with pytest.raises(NonFiniteError, match=message):
            trainer.train()

    def test_the_log_has_the_message_and_no_traceback(self, tmp_path):
        trainer = trainer_for(tmp_path)
        with torch.no_grad():
            trainer.model.backbone.fpn_lateral2.weight[0] = float("nan")
        with pytest.raises(NonFiniteError):
            trainer.train()
        log = (tmp_path / "log.txt").read_text()
        assert "backbone.fpn_lateral2.weight has values" in log and "Traceback" not in log

    def test_an_unexpected_error_keeps_its_traceback_in_the_log(self, tmp_path):
        trainer = trainer_for(tmp_path)
        trainer.model.proposal_generator.forward = None
        with pytest.raises(TypeError):
            trainer.train()
        assert "Traceback" in (tmp_path / "log.txt").read_text()


def test_a_disk_full_during_a_checkpoint_leaves_the_earlier_one(tmp_path):
    trainer = trainer_for(tmp_path)
    trainer.checkpointer.save("model_0000001")
    good = (tmp_path / "model_0000001.pth").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        for name in ("model_0000001", "model_0000003"):
            with pytest.raises(FileAccessError, match=f"{name}.pth': was not written: .*--resume"):
                trainer.checkpointer.save(name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "model_0000001.pth").read_bytes() == good
    assert sorted(path.name for path in tmp_path.iterdir() if "model" in path.name) == ["model_0000001.pth"]
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000001.pth"
    trainer.checkpointer.load(str(tmp_path / "model_0000001.pth"))


def test_a_damaged_image_is_named(tmp_path, small_dataset):
    data = small_dataset / "gw_synthetic"
    victims = sorted((data / "train").iterdir())
    kept = [path.read_bytes() for path in victims]
    try:
        for path in victims:
            path.write_bytes(path.read_bytes()[:200])
        trainer = trainer_for(tmp_path)
        with pytest.raises(
            RecordError, match=rf"^'{data}/train/0000..\.jpg': cannot be used: .*repair the image"
        ) as raised:
            trainer.train()
        assert "Traceback" not in str(raised.value)
    finally:
        for path, content in zip(victims, kept, strict=True):
            path.write_bytes(content)


def test_the_saved_config_starts_the_same_run(tmp_path):
    cfg = setup(arguments(tmp_path))
    args = arguments(tmp_path)
    args.config_file, args.opts = str(tmp_path / "config.yaml"), []
    assert yaml.safe_load(setup(args).dump()) == yaml.safe_load(cfg.dump())
    assert os.path.exists(tmp_path / "log.txt")


def test_a_refused_run_leaves_the_folder_as_it_was(copy, tmp_path):
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(PreflightError, match=r"MODEL.FPN.NORM \('XX'\)"):
        main(arguments(tmp_path, DATASETS__TEST="()", MODEL__FPN__NORM="XX"))
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_problems_that_are_ignored_become_warnings_but_unreadable_weights_stop_the_run(tmp_path):
    frozen = {"MODEL__BACKBONE__FREEZE_AT": 2, "SOLVER__MAX_ITER": 1, "SOLVER__STEPS": "()", "DATASETS__TEST": "()"}
    main(arguments(tmp_path, "--ignore-preflight", **frozen))
    assert re.search(r"WARNING.*MODEL.BACKBONE.FREEZE_AT \(2\)", (tmp_path / "log.txt").read_text())
    with pytest.raises(MissingFileError, match="MODEL.WEIGHTS: file not found: 'x.pth'"):
        main(arguments(tmp_path, "--ignore-preflight", MODEL__WEIGHTS="x.pth"))


def test_unfinished_files_of_a_killed_run_are_removed(copy, tmp_path):
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    (tmp_path / f".model_0000001.pth.{os.uname().nodename}.{killed.pid}.01234567.tmp").write_bytes(b"half")
    main(arguments(tmp_path, "--resume", DATASETS__TEST="()"))
    assert not list(tmp_path.glob(".*.tmp"))


def test_an_output_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"OUTPUT_DIR \('.*file'\): cannot be written: .*give another folder"):
        main(arguments(tmp_path / "file"))
