"""Start weights: readable, of these norms, for this preprocessing; checkpoints to resume."""

import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from detectron2 import model_zoo
from detectron2.modeling import build_model
from detectron2.utils.file_io import PathManager

from gw_detectron.errors import CheckReport, PreflightError
from gw_detectron.weights import detector_file, open_start_weights
from gw_detectron.workbench.run.checks import check_run
from gw_detectron.workbench.run.model_checks import _PREPROCESSING

from ..sound_run import config, only_error

ZOO = Path(model_zoo.__file__).with_name("configs")
TORCHVISION = [
    "RGB",
    "123.675, 116.28, 103.53",
    "58.395, 57.12, 57.375",
    "STRIDE_IN_1X1 False",
]
CAFFE_MEAN = "103.53, 116.28, 123.675"
DEEP = {"MODEL__RESNETS__DEPTH": 50, "MODEL__RESNETS__RES2_OUT_CHANNELS": 256}


def bn_weights(folder, positions: str = "") -> dict[str, torch.Tensor]:
    cfg = config(
        folder, MODEL__RESNETS__WHITEN_POSITIONS=positions, MODEL__RESNETS__NORM="BN"
    )
    backbone = build_model(cfg).backbone
    tensors = backbone.bottom_up.state_dict()
    return {
        name: tensor for name, tensor in tensors.items() if "num_batches" not in name
    }


@pytest.fixture
def check_weights(tmp_path, check):
    """Return a function that checks a run that starts with some tensors."""
    path = tmp_path / "w.pth"

    def run(tensors: dict[str, torch.Tensor], **options) -> CheckReport:
        torch.save({"model": tensors, "matching_heuristics": True}, path)
        return check(MODEL__WEIGHTS=str(path), **options)

    return run


@pytest.fixture
def served(monkeypatch, tmp_path):
    """Serve an empty checkpoint under an address; return the list of requests."""
    fetch = PathManager.get_local_path
    file = tmp_path / "remote.pth"
    torch.save({"model": {}}, file)

    def serve(address):
        requests = []

        def get_local_path(path, *arguments, **options):
            if path != address:
                return fetch(path, *arguments, **options)
            requests.append(path)
            return str(file)

        monkeypatch.setattr(PathManager, "get_local_path", get_local_path)
        return requests

    return serve


def test_bn_weights_under_a_gw_config(check_weights, tmp_path):
    weights = bn_weights(tmp_path)

    error = only_error(check_weights(weights))
    assert "9 layers differ (backbone.bottom_up.stem.conv1.norm" in error
    assert "MODEL.RESNETS.WHITEN_NORM" in error
    assert not check_weights(weights, allow_partial=True).errors

    report = check_weights(weights, allow_partial=True, MODEL__BACKBONE__FREEZE_AT=2)
    error = only_error(report)
    assert error.startswith("MODEL.BACKBONE.FREEZE_AT (2)")
    assert "stem.conv1.norm" in error


def test_weights_of_the_same_norms(check_weights, tmp_path):
    frozen = {"MODEL__RESNETS__NORM": "FrozenBN", "MODEL__BACKBONE__FREEZE_AT": 2}
    without = bn_weights(tmp_path)
    partial = bn_weights(tmp_path, "S1-B2")

    report = check_weights(without, MODEL__RESNETS__WHITEN_POSITIONS="", **frozen)
    assert not report.errors
    assert not check_weights(partial, allow_partial=True, **frozen).errors


@pytest.mark.parametrize("weights", ["nowhere://imagenet/R-50", "my/R-50.pkl"])
def test_weights_that_are_missing(check, weights):
    error = only_error(check(MODEL__WEIGHTS=weights))
    assert "MODEL.WEIGHTS" in error
    assert f"'{weights}'" in error


def test_an_evaluation_needs_weights(check, tmp_path):
    assert "no weights to evaluate" in only_error(check(eval_only=True))
    assert str(tmp_path / "output") in only_error(check(eval_only=True, resume=True))


class TestPreprocessing:
    def test_of_the_file(self, check, tmp_path):
        path = tmp_path / "r.pkl"
        content = {
            "model": {},
            "__author__": "torchvision",
            "matching_heuristics": True,
        }
        path.write_bytes(pickle.dumps(content))
        sound = {"MODEL__WEIGHTS": str(path), **DEEP}
        wrong = {
            "INPUT__FORMAT": "BGR",
            "MODEL__PIXEL_MEAN": [103.53, 116.28, 123.675],
            "MODEL__RESNETS__STRIDE_IN_1X1": True,
        }

        assert not check(**sound).errors
        error = only_error(check(**sound, **wrong))
        assert "INPUT.FORMAT RGB" in error
        assert 'PIXEL_MEAN "[123.675, 116.28, 103.53]"' in error
        assert "STRIDE_IN_1X1 False" in error

    @pytest.mark.parametrize(
        ("address", "wanted"),
        [
            ("gw://imagenet/R-50-GW", TORCHVISION),
            ("detectron2://ImageNetPretrained/torchvision/R-50.pkl", TORCHVISION),
            (
                "detectron2://ImageNetPretrained/MSRA/R-50.pkl",
                ["BGR", CAFFE_MEAN, "1.0, 1.0, 1.0"],
            ),
            (
                "detectron2://ImageNetPretrained/FAIR/R-50-GN.pkl",
                ["BGR", CAFFE_MEAN, "1.0, 1.0, 1.0", "STRIDE_IN_1X1 False"],
            ),
            (
                "detectron2://ImageNetPretrained/FAIR/X-101-32x8d.pkl",
                ["BGR", CAFFE_MEAN, "57.375, 57.12, 58.395", "STRIDE_IN_1X1 False"],
            ),
        ],
    )
    def test_of_an_address(self, check, served, address, wanted):
        served(address)
        wrong = {
            "INPUT__FORMAT": "RGB" if "BGR" in wanted else "BGR",
            "MODEL__PIXEL_MEAN": [0.0, 0.0, 0.0],
            "MODEL__PIXEL_STD": [2.0, 2.0, 2.0],
            "MODEL__RESNETS__STRIDE_IN_1X1": True,
        }

        error = only_error(check(MODEL__WEIGHTS=address, **wrong, **DEEP))

        assert all(word in error for word in wanted)
        assert ("STRIDE_IN_1X1" in error) == ("STRIDE_IN_1X1 False" in wanted)


@pytest.mark.parametrize(
    "start", ["detectron2://", "https://dl.fbaipublicfiles.com/detectron2/"]
)
def test_the_preprocessing_of_detectron2s_zoo_is_known(start):
    """Its detectors fit any config, whose channel order, mean and std may be others."""
    paths = [*ZOO.glob("[CL]*-*/*_1*_*.yaml"), *ZOO.glob("[CL]*-*/*_50_*.yaml")]
    assert len(paths) > 30

    for path in paths:
        name = f"{path.parent.name}/{path.name}"
        address = f"{start}{name}/1/a.pkl"
        (pattern,) = [
            pattern for pattern in _PREPROCESSING if re.search(pattern, address)
        ]
        known = _PREPROCESSING[pattern]

        cfg = model_zoo.get_config(name)
        assert known.input_format == cfg.INPUT.FORMAT, name
        assert known.stride_in_1x1 == cfg.MODEL.RESNETS.STRIDE_IN_1X1, name
        assert known.pixel_mean == pytest.approx(cfg.MODEL.PIXEL_MEAN, abs=0.05), name
        assert known.pixel_std == pytest.approx(cfg.MODEL.PIXEL_STD, abs=0.05), name


class TestOwnCheckpoint:
    """Checkpoints of a run with other values of some keys, which no tensor shows."""

    @pytest.fixture
    def check_own(self, tmp_path, check):
        path = tmp_path / "output" / "model_final.pth"
        path.parent.mkdir()
        before = config(tmp_path)
        tensors = build_model(before).state_dict()
        torch.save({"model": tensors, "record": {"config": before.dump()}}, path)
        (path.parent / "last_checkpoint").write_text(path.name)

        def run(**options) -> CheckReport:
            options.setdefault("eval_only", True)
            return check(MODEL__WEIGHTS=str(path), **options)

        return run

    @pytest.mark.parametrize("resume", [False, True])
    @pytest.mark.parametrize(
        ("key", "value", "wanted"),
        [
            ("INPUT.FORMAT", "BGR", "INPUT.FORMAT RGB"),
            ("MODEL.PIXEL_MEAN", [0.0, 0.0, 0.0], 'MODEL.PIXEL_MEAN "[123.675'),
        ],
    )
    def test_other_preprocessing(self, check_own, key, value, wanted, resume):
        changes = {key.replace(".", "__"): value}
        error = only_error(check_own(resume=resume, **changes))
        assert error.startswith("--resume" if resume else "MODEL.WEIGHTS")
        assert f"Fix: set {wanted}" in error

    def test_other_model_keys(self, check_own):
        report = check_own(
            MODEL__ROI_BOX_HEAD__SINGLE_RELU=True,
            MODEL__RESNETS__STRIDE_IN_1X1=True,
            MODEL__RPN__NMS_THRESH=0.5,
        )

        assert not report.errors
        (warning,) = report.warnings
        assert (
            "MODEL.ROI_BOX_HEAD.SINGLE_RELU False in the checkpoint, True here"
            in warning
        )
        assert "MODEL.RPN.NMS_THRESH 0.7" in warning
        assert "STRIDE_IN_1X1" not in warning

    @pytest.mark.parametrize("eval_only", [False, True])
    def test_other_model_keys_of_a_resumed_run(self, check_own, eval_only):
        """A training warns of all keys when it loads its record."""
        changes = {"MODEL__RPN__NMS_THRESH": 0.5, "eval_only": eval_only}
        report = check_own(resume=True, **changes)
        assert "NMS_THRESH" in " ".join(report.warnings) or not eval_only
        assert len(report.warnings) == eval_only


class TestResume:
    @pytest.fixture
    def output(self, tmp_path):
        folder = tmp_path / "output"
        folder.mkdir()
        return folder

    def checkpoint(self, output, name: str, age: int = 0) -> Path:
        path = output / name
        torch.save({"model": {"a": torch.zeros(1000)}}, path)
        os.utime(path, (10_000 - age, 10_000 - age))
        return path

    def detector(self, output, **changes) -> str:
        """Write the last checkpoint of a run of :func:`config`, and return its path."""
        model = build_model(config(output.parent, **changes))
        path = output / "model_0000001.pth"
        torch.save({"model": model.state_dict(), "iteration": 1}, path)
        (output / "last_checkpoint").write_text(path.name)
        return str(path)

    def test_a_truncated_checkpoint(self, check, output):
        path = self.checkpoint(output, "model_0000005.pth")
        os.truncate(path, 1000)
        (output / "last_checkpoint").write_text(path.name)

        error = only_error(check(resume=True))
        assert "model_0000005.pth" in error
        assert "another checkpoint into last_checkpoint" in error
        assert not check(overwrite=True).errors

    def test_a_run_that_was_killed_before_its_first_tag(self, output):
        assert not open_start_weights("", str(output)).resumed
        for name in ("model_0000009.pth", "model_0000011.pth"):
            path = self.checkpoint(output, name)

        start = open_start_weights("", str(output))
        assert start.resumed and start.address == str(path)
        assert detector_file(output) == str(path)

    def test_a_last_checkpoint_that_does_not_exist(self, check, output):
        self.checkpoint(output, "model_0000001.pth")
        self.checkpoint(output, "model_final.pth")

        error = only_error(check(resume=True))
        assert "last_checkpoint" in error

        (output / "last_checkpoint").write_text("model_0000009.pth")
        assert "model_0000009.pth" in only_error(check(resume=True))

    def test_a_whole_checkpoint_counts_as_weights(self, check, output):
        self.detector(output, MODEL__BACKBONE__FREEZE_AT=2)

        assert check(resume=True, MODEL__BACKBONE__FREEZE_AT=2) == CheckReport()
        error = only_error(check())
        assert "--resume" in error
        assert "--overwrite" in error

    @pytest.mark.parametrize("norm", ["BW:channels=8", "GW:groups=8"])
    def test_another_norm_than_the_checkpoints(self, check, output, norm):
        weights = self.detector(output, MODEL__FPN__NORM="BW:channels=16")

        error = only_error(check(resume=True, eval_only=True, MODEL__FPN__NORM=norm))
        assert "backbone.fpn_lateral2.norm" in error
        assert "model_0000001.pth" in error

        # to start from they may be of another detector
        changes = {"MODEL__WEIGHTS": weights, "MODEL__FPN__NORM": "BW:channels=8"}
        assert not check(overwrite=True, **changes).errors


def test_weights_are_fetched_once_and_after_the_other_checks(check, tmp_path, served):
    address = "https://weights.invalid/model.pth"
    requests = served(address)

    report = check(MODEL__WEIGHTS=address, MODEL__ROI_HEADS__NUM_CLASSES=80)
    assert "NUM_CLASSES (80)" in only_error(report)
    assert not requests
    with pytest.raises(PreflightError, match=re.escape(address)):
        report.raise_errors()

    start = open_start_weights(address)
    assert not requests

    assert not check_run(config(tmp_path, MODEL__WEIGHTS=address), start).errors
    assert start.checkpoint().tensors == {}
    assert requests == [address]
