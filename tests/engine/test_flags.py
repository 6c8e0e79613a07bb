"""Config files and arguments that cannot be used, and the message of each."""

import pytest
import torch

from gw_detectron.engine import setup
from gw_detectron.engine.train import prepare

from ..tiny_run import CONFIG, arguments


def test_missing_file(tmp_path):
    args = arguments(tmp_path)
    args.config_file = str(CONFIG.parent / "mask_rcnn_R_18_FPN_BN_GW_dmo.yaml")
    with pytest.raises(FileNotFoundError, match=r"GW_dmo\.yaml.*Similar: .*GW_demo\.yaml.*gw-detectron list configs"):
        setup(args)
    args.config_file = ""
    with pytest.raises(FileNotFoundError, match="--config-file"):
        setup(args)


def test_unknown_key_in_the_file(tmp_path):
    args = arguments(tmp_path)
    args.config_file = str(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text(f"_BASE_: {CONFIG}\nMODEL:\n  RESNETS:\n    WITHEN_NORM: GW\n")
    with pytest.raises(
        ValueError, match=r"a\.yaml': unknown config key 'MODEL.RESNETS.WITHEN_NORM'. Similar: .*WHITEN"
    ):
        setup(args)


def test_command_line(tmp_path):
    for opts, message in [
        (["SOLVER.MAXITER", "3"], r"unknown config key 'SOLVER.MAXITER'. Similar: SOLVER.MAX_ITER"),
        (["SOLVER.MAX_ITER"], r"pairs of KEY VALUE"),
        (["SOLVER.MAX_ITER", "3", "--resume"], r"put --resume before SOLVER.MAX_ITER"),
        (["SOLVER.MAX_ITER", "3", "--num-gpus", "2"], r"put --num-gpus before SOLVER.MAX_ITER"),
        (["SOLVER.MAX_ITER", "many"], r"SOLVER.MAX_ITER"),
        (["OUTPUT_DIR", "runs/a?b"], r"OUTPUT_DIR \('runs/a\?b'\): contains"),
    ]:
        args = arguments(tmp_path)
        args.opts = opts
        with pytest.raises(ValueError, match=message):
            setup(args)


@pytest.mark.parametrize(("gpus", "warned"), [("0", False), ("1", True)])
def test_a_gpu_that_is_not_used_is_a_warning(tmp_path, small_dataset, monkeypatch, gpus, warned):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    warnings = prepare(arguments(tmp_path, "--num-gpus", gpus, MODEL__DEVICE="cpu"))[2]
    assert (
        any("does not use the GPU of this machine. Fix: add MODEL.DEVICE cuda" in each for each in warnings) is warned
    )
