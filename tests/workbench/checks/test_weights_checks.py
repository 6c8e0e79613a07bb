"""Start weights: readable, of these norms, for this preprocessing; runs are continued, not overwritten."""

import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from detectron2 import model_zoo
from detectron2.modeling import build_model
from detectron2.utils.file_io import PathManager

from gw_detectron.errors import PreflightError
from gw_detectron.weights import open_start_weights
from gw_detectron.workbench.preflight import PreflightReport
from gw_detectron.workbench.run.config_checks import preflight
from gw_detectron.workbench.run.model_checks import _PREPROCESSING

from .sound_run import config, one

ZOO = Path(model_zoo.__file__).with_name("configs")
TORCHVISION = ["RGB", "123.675, 116.28, 103.53", "58.395, 57.12, 57.375", "STRIDE_IN_1X1 False"]
DEEP = {"MODEL__RESNETS__DEPTH": 50, "MODEL__RESNETS__RES2_OUT_CHANNELS": 256}


def bn_weights(folder, positions: str = "") -> dict[str, torch.Tensor]:
    cfg = config(folder, MODEL__RESNETS__WHITEN_POSITIONS=positions, MODEL__RESNETS__NORM="BN")
    tensors = build_model(cfg).backbone.bottom_up.state_dict()
    return {name: tensor for name, tensor in tensors.items() if "num_batches" not in name}


@pytest.fixture
def check_weights(tmp_path, coco):
    coco()

    def run(tensors: dict[str, torch.Tensor], allow_partial: bool = False, **changes: object):
        torch.save({"model": tensors, "matching_heuristics": True}, tmp_path / "w.pth")
        cfg = config(tmp_path, MODEL__WEIGHTS=str(tmp_path / "w.pth"), **changes)
        return preflight(
            cfg, open_start_weights(cfg.MODEL.WEIGHTS), allow_partial=allow_partial
        )

    return run


@pytest.fixture
def served(monkeypatch, tmp_path):
    """Serve an empty checkpoint under an address; return the list of requests."""
    fetch = PathManager.get_local_path

    def serve(address):
        requests = []

        def get_local_path(path, *arguments, **options):
            if path != address:
                return fetch(path, *arguments, **options)
            requests.append(path)
            return str(tmp_path / "remote.pth")

        torch.save({"model": {}}, tmp_path / "remote.pth")
        monkeypatch.setattr(PathManager, "get_local_path", get_local_path)
        return requests

    return serve


def test_bn_weights_under_a_gw_config(check_weights, tmp_path):
    weights = bn_weights(tmp_path)
    error = one(check_weights(weights))
    assert (
        "9 layers differ (backbone.bottom_up.stem.conv1.norm" in error
        and "MODEL.RESNETS.WHITEN_NORM" in error
    )
    assert not check_weights(weights, allow_partial=True).errors
    error = one(check_weights(weights, allow_partial=True, MODEL__BACKBONE__FREEZE_AT=2))
    assert error.startswith("MODEL.BACKBONE.FREEZE_AT (2)") and "stem.conv1.norm" in error
    # weights of the same norms have no error
    same = {"MODEL__RESNETS__NORM": "FrozenBN", "MODEL__BACKBONE__FREEZE_AT": 2}
    assert not check_weights(bn_weights(tmp_path, "S1-B2"), allow_partial=True, **same).errors
    assert not check_weights(weights, MODEL__RESNETS__WHITEN_POSITIONS="", **same).errors


def test_weights_that_are_missing(check, tmp_path):
    for weights in ("nowhere://imagenet/R-50", "my/R-50.pkl"):
        assert f"MODEL.WEIGHTS: file not found: '{weights}'" in one(
            check(MODEL__WEIGHTS=weights)
        )
    assert "--eval-only" in one(check(eval_only=True))
    assert str(tmp_path / "output") in one(check(eval_only=True, resume=True))


class TestPreprocessing:
    def test_of_the_file(self, check, tmp_path):
        path = tmp_path / "r.pkl"
        path.write_bytes(
            pickle.dumps(
                {"model": {}, "__author__": "torchvision", "matching_heuristics": True}
            )
        )
        assert not check(MODEL__WEIGHTS=str(path), **DEEP).errors
        wrong = {"INPUT__FORMAT": "BGR", "MODEL__PIXEL_MEAN": [103.53, 116.28, 123.675]}
        error = one(
            check(MODEL__WEIGHTS=str(path), MODEL__RESNETS__STRIDE_IN_1X1=True, **DEEP, **wrong)
        )
        for words in (
            "INPUT.FORMAT RGB",
            'PIXEL_MEAN "[123.675, 116.28, 103.53]"',
            "STRIDE_IN_1X1 False",
        ):
            assert words in error

    @pytest.mark.parametrize(
        ("name", "wanted"),
        [
            ("gw://imagenet/R-50-GW", TORCHVISION),
            ("torchvision/R-50", TORCHVISION),
            ("MSRA/R-50", ["BGR", "103.53, 116.28, 123.675", "1.0, 1.0, 1.0"]),
            (
                "FAIR/R-50-GN",
                ["BGR", "103.53, 116.28, 123.675", "1.0, 1.0, 1.0", "STRIDE_IN_1X1 False"],
            ),
            (
                "FAIR/X-101-32x8d",
                [
                    "BGR",
                    "103.53, 116.28, 123.675",
                    "57.375, 57.12, 58.395",
                    "STRIDE_IN_1X1 False",
                ],
            ),
        ],
    )
    def test_of_an_address(self, check, served, name, wanted):
        address = name if "://" in name else f"detectron2://ImageNetPretrained/{name}.pkl"
        served(address)
        changes = {
            "INPUT__FORMAT": "RGB" if "BGR" in wanted else "BGR",
            "MODEL__PIXEL_MEAN": [0.0, 0.0, 0.0],
            "MODEL__PIXEL_STD": [2.0, 2.0, 2.0],
            "MODEL__RESNETS__STRIDE_IN_1X1": True,
        }
        error = one(check(MODEL__WEIGHTS=address, **changes, **DEEP))
        assert all(word in error for word in wanted)
        assert ("STRIDE_IN_1X1" in error) == ("STRIDE_IN_1X1 False" in wanted)


@pytest.mark.parametrize(
    "start", ["detectron2://", "https://dl.fbaipublicfiles.com/detectron2/"]
)
def test_the_preprocessing_of_detectron2s_zoo_is_known(start):
    """Its detectors fit the architecture of any config, whose channel order, mean and std may be others."""
    names = [f"{path.parent.name}/{path.name}" for path in ZOO.glob("[CL]*-*/*_1*_*.yaml")]
    names += [f"{path.parent.name}/{path.name}" for path in ZOO.glob("[CL]*-*/*_50_*.yaml")]
    assert len(names) > 30
    for name in names:
        cfg = model_zoo.get_config(name)
        (found,) = (
            images
            for pattern, images in _PREPROCESSING.items()
            if re.search(pattern, f"{start}{name}/1/a.pkl")
        )
        assert (found.input_format, found.stride_in_1x1) == (
            cfg.INPUT.FORMAT,
            cfg.MODEL.RESNETS.STRIDE_IN_1X1,
        ), name
        assert found.pixel_mean == pytest.approx(cfg.MODEL.PIXEL_MEAN, abs=0.05), name
        assert found.pixel_std == pytest.approx(cfg.MODEL.PIXEL_STD, abs=0.05), name


class TestOwnCheckpoint:
    """Checkpoints of a run with other values of some keys, which no tensor shows."""

    @pytest.fixture
    def check_own(self, tmp_path, coco):
        coco()

        def run(resume: bool = False, **changes: object):
            before = config(tmp_path)
            content = {
                "model": build_model(before).state_dict(),
                "record": {"config": before.dump()},
            }
            path = tmp_path / "output" / "model_final.pth"
            path.parent.mkdir()
            torch.save(content, path)
            (path.parent / "last_checkpoint").write_text(path.name if resume else "")
            cfg = config(tmp_path, MODEL__WEIGHTS=str(path), **changes)
            start = open_start_weights(cfg.MODEL.WEIGHTS, cfg.OUTPUT_DIR if resume else "")
            return preflight(cfg, start, eval_only=True)

        return run

    @pytest.mark.parametrize("resume", [False, True])
    @pytest.mark.parametrize(
        ("key", "value"), [("INPUT.FORMAT", "BGR"), ("MODEL.PIXEL_MEAN", [0.0, 0.0, 0.0])]
    )
    def test_other_preprocessing(self, check_own, key, value, resume):
        error = one(check_own(resume=resume, **{key.replace(".", "__"): value}))
        assert key in error and repr(value) in error

    def test_other_model_keys(self, check_own):
        changes = {
            "MODEL__ROI_BOX_HEAD__SINGLE_RELU": True,
            "MODEL__RESNETS__STRIDE_IN_1X1": True,
        }
        found = check_own(**changes, MODEL__RPN__NMS_THRESH=0.5)
        assert not found.errors and len(found.warnings) == 1
        assert (
            "MODEL.ROI_BOX_HEAD.SINGLE_RELU False in the checkpoint, True here"
            in found.warnings[0]
        )
        assert (
            "MODEL.RPN.NMS_THRESH 0.7" in found.warnings[0]
            and "STRIDE_IN_1X1" not in found.warnings[0]
        )


class TestResume:
    def checkpoint(self, tmp_path, name: str, age: int) -> str:
        folder = tmp_path / "output"
        folder.mkdir(exist_ok=True)
        torch.save({"model": {"a": torch.zeros(1000)}}, folder / name)
        os.utime(folder / name, (10_000 - age, 10_000 - age))
        return str(folder / name)

    def detector(self, tmp_path, **changes) -> None:
        """Write the last checkpoint of a run of :func:`config`."""
        path = self.checkpoint(tmp_path, "model_0000001.pth", 0)
        torch.save(
            {"model": build_model(config(tmp_path, **changes)).state_dict(), "iteration": 1},
            path,
        )
        (tmp_path / "output" / "last_checkpoint").write_text("model_0000001.pth")

    def test_a_truncated_checkpoint(self, check, tmp_path):
        self.checkpoint(tmp_path, "model_0000003.pth", 1)
        path = self.checkpoint(tmp_path, "model_0000005.pth", 0)
        os.truncate(path, 1000)
        (tmp_path / "output" / "last_checkpoint").write_text("model_0000005.pth")
        error = one(check(resume=True))
        assert "model_0000005.pth" in error and "Fix: write model_0000003.pth" in error
        os.remove(tmp_path / "output" / "model_0000003.pth")
        assert "--overwrite" in one(check(resume=True))
        assert not check(overwrite=True).errors

    def test_a_last_checkpoint_that_does_not_exist(self, check, tmp_path):
        self.checkpoint(tmp_path, "model_0000001.pth", 0)
        assert "last_checkpoint" in one(check(resume=True)) and "model_0000001.pth" in one(
            check(resume=True)
        )
        (tmp_path / "output" / "last_checkpoint").write_text("model_0000009.pth")
        assert "model_0000009.pth" in one(check(resume=True))

    def test_a_whole_checkpoint_counts_as_weights(self, check, tmp_path):
        self.detector(tmp_path, MODEL__BACKBONE__FREEZE_AT=2)
        assert check(resume=True, MODEL__BACKBONE__FREEZE_AT=2) == PreflightReport()
        assert "--resume" in one(check()) and "--overwrite" in one(check())
        assert not check(overwrite=True).errors

    def test_another_norm_than_the_checkpoints(self, check, tmp_path):
        self.detector(tmp_path, MODEL__FPN__NORM="BW:channels=16")
        for now, tensors in (
            ("BW:channels=8", "8 tensors (backbone.fpn_lateral2"),
            ("GW:groups=8", "16 tensors ("),
        ):
            error = one(check(resume=True, eval_only=True, MODEL__FPN__NORM=now))
            assert (
                tensors in error and "MODEL.FPN.NORM" in error and "model_0000001.pth" in error
            )
        weights = str(
            tmp_path / "output" / "model_0000001.pth"
        )  # to start from they may be of another detector
        assert not check(
            overwrite=True, MODEL__WEIGHTS=weights, MODEL__FPN__NORM="BW:channels=8"
        ).errors


def test_weights_are_fetched_once_and_after_the_other_checks(check, tmp_path, served):
    address = "https://weights.invalid/model.pth"
    fetched = served(address)
    found = check(MODEL__WEIGHTS=address, MODEL__ROI_HEADS__NUM_CLASSES=80)
    assert "NUM_CLASSES (80)" in one(found) and not fetched
    with pytest.raises(PreflightError, match=re.escape(address)):
        found.raise_errors()
    cfg = config(tmp_path, MODEL__WEIGHTS=address)
    start = open_start_weights(cfg.MODEL.WEIGHTS)
    assert start.opened is None and not fetched
    assert not preflight(cfg, start).errors
    assert start.checkpoint().tensors == {} and fetched == [address]
