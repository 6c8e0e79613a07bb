"""Weights of other norms are recognized; remote weights are fetched last."""

import re

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.utils.file_io import PathManager

from gw_detectron.checkpoint import open_start_weights
from gw_detectron.errors import PreflightError
from gw_detectron.preflight import preflight

from .sound_run import config, one


def bn_weights(folder, positions: str = "", **changes: object) -> dict[str, torch.Tensor]:
    cfg = config(folder, MODEL__RESNETS__WHITEN_POSITIONS=positions, MODEL__RESNETS__NORM="BN", **changes)
    tensors = build_model(cfg).backbone.bottom_up.state_dict()
    return {name: tensor for name, tensor in tensors.items() if "num_batches" not in name}


@pytest.fixture
def check_weights(tmp_path, coco):
    coco()

    def run(tensors: dict[str, torch.Tensor], allow_partial: bool = False, **changes: object):
        torch.save({"model": tensors, "matching_heuristics": True}, tmp_path / "w.pth")
        cfg = config(tmp_path, MODEL__WEIGHTS=str(tmp_path / "w.pth"), **changes)
        return preflight(cfg, open_start_weights(cfg), allow_partial=allow_partial)

    return run


def test_bn_weights_under_a_gw_config(check_weights, tmp_path):
    problem = one(check_weights(bn_weights(tmp_path)))
    assert (
        "trained with other norms: 9 layers differ (backbone.bottom_up.stem.conv1.norm BN in the weights, " in problem
    )
    assert "MODEL.RESNETS.WHITEN_NORM" in problem and "give weights of these norms, e.g. gw://imagenet/R-50" in problem


def test_bn_weights_with_allow_partial(check_weights, tmp_path):
    assert not check_weights(bn_weights(tmp_path), allow_partial=True).problems


@pytest.mark.parametrize("prefix", ["", "backbone.", "backbone.bottom_up."])
def test_frozen_layers_that_were_never_trained(check, tmp_path, coco, prefix):
    coco()
    tensors = {prefix + name: tensor for name, tensor in bn_weights(tmp_path).items()}
    path = tmp_path / "w.pth"
    torch.save({"model": tensors}, path)
    cfg = config(tmp_path, MODEL__WEIGHTS=str(path), MODEL__BACKBONE__FREEZE_AT=2)
    problem = one(preflight(cfg, open_start_weights(cfg), allow_partial=True))
    assert problem.startswith("MODEL.BACKBONE.FREEZE_AT (2): 3 frozen parts were trained with another norm")
    assert "stem.conv1.norm" in problem and "Fix: set MODEL.BACKBONE.FREEZE_AT 0" in problem
    torch.save({"model": {name: tensor for name, tensor in tensors.items() if "res2.1" not in name}}, path)
    problems = preflight(cfg, open_start_weights(cfg), allow_partial=True).problems
    assert "4 frozen parts are not in the weights and keep random values" in problems[1]
    assert "res2.1.conv1.weight" in problems[1]


@pytest.fixture
def check_own(tmp_path, coco):
    """Return a function that starts from a checkpoint of a run with other values of some keys."""
    coco()

    def run(config_text: str = "", eval_only: bool = False, resume: bool = False, **changes: object):
        before = config(tmp_path)
        content = {"model": build_model(before).state_dict(), "record": {"config": config_text or before.dump()}}
        path = tmp_path / "output" / "model_final.pth"
        path.parent.mkdir()
        torch.save(content, path)
        (path.parent / "last_checkpoint").write_text(path.name if resume else "")
        cfg = config(tmp_path, MODEL__WEIGHTS=str(path), **changes)
        start = open_start_weights(cfg, resume=resume)
        return preflight(cfg, start, eval_only=eval_only, resume=resume, overwrite=True)

    return run


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("key", "value"),
    [("INPUT.FORMAT", "BGR"), ("MODEL.PIXEL_MEAN", [0.0, 0.0, 0.0]), ("MODEL.PIXEL_STD", [1.0, 1.0, 1.0])],
)
def test_own_checkpoint_under_other_preprocessing(check_own, key, value, resume):
    problem = one(check_own(eval_only=True, resume=resume, **{key.replace(".", "__"): value}))
    assert f"images of another format than this config gives: {key} " in problem and f", {value!r} here" in problem


def test_own_checkpoint_under_keys_that_change_no_tensor(check_own):
    found = check_own(
        MODEL__ROI_BOX_HEAD__SINGLE_RELU=True, MODEL__RPN__NMS_THRESH=0.5, MODEL__RESNETS__STRIDE_IN_1X1=True
    )
    assert not found.problems
    (warning,) = [text for text in found.warnings if "other values of MODEL keys" in text]
    assert (
        "keys: MODEL.ROI_BOX_HEAD.SINGLE_RELU False in the checkpoint, True here, MODEL.RPN.NMS_THRESH 0.7" in warning
    )


@pytest.mark.parametrize(("text", "warnings"), [("", 0), ("a: &a [*a]", 1), ("a: !!python/name:os.system", 1)])
def test_own_checkpoint_with_the_same_or_no_readable_config(check_own, text, warnings):
    found = check_own(text)
    assert not found.problems
    assert sum("config: not compared" in warning for warning in found.warnings) == warnings


def test_fitting_weights_have_no_problem(check_weights, tmp_path):
    same = {"MODEL__RESNETS__NORM": "FrozenBN", "MODEL__BACKBONE__FREEZE_AT": 2}
    assert not check_weights(bn_weights(tmp_path, "S1-B2"), allow_partial=True, **same).problems
    assert not check_weights(bn_weights(tmp_path), MODEL__RESNETS__WHITEN_POSITIONS="", **same).problems


@pytest.mark.parametrize(
    ("kind", "norm"), [("bn", "GW"), ("bn", "GN"), ("gn", "FrozenBN"), ("gn", "BN"), ("gn", "GW"), ("gn", "BW")]
)
def test_caffe2_weights_of_another_norm(check_weights, kind, norm):
    tensors = {f"res2_0_branch2a_{kind}_{part}": torch.ones(64) for part in "sb"}
    layers = {"MODEL__RESNETS__WHITEN_POSITIONS": "", "MODEL__RESNETS__NORM": norm}
    problem = next(text for text in check_weights(tensors, **layers).problems if "other norms" in text)
    assert f"20 layers differ (backbone.bottom_up.stem.conv1.norm {kind.upper()} in the weights, {norm}" in problem
    same = {**layers, "MODEL__RESNETS__NORM": "FrozenBN" if kind == "bn" else "GN"}
    assert not any("other norms" in text for text in check_weights(tensors, **same).problems)


class TestRemote:
    ADDRESS = "https://weights.invalid/model.pth"

    @pytest.fixture
    def fetched(self, monkeypatch, tmp_path):
        """Serve an empty checkpoint under the address and record the requests."""
        requests, fetch = [], PathManager.get_local_path

        def get_local_path(path, *arguments, **options):
            if path != self.ADDRESS:
                return fetch(path, *arguments, **options)
            requests.append(path)
            return str(tmp_path / "remote.pth")

        torch.save({"model": {}}, tmp_path / "remote.pth")
        monkeypatch.setattr(PathManager, "get_local_path", get_local_path)
        return requests

    def test_nothing_is_fetched_while_something_else_is_wrong(self, check, fetched):
        found = check(MODEL__WEIGHTS=self.ADDRESS, MODEL__ROI_HEADS__NUM_CLASSES=80)
        assert "NUM_CLASSES (80)" in one(found) and not fetched
        with pytest.raises(PreflightError, match=re.escape(f"'{self.ADDRESS}'): not fetched and not checked")):
            found.raise_problems()

    def test_a_sound_run_fetches_once(self, tmp_path, coco, fetched):
        coco()
        cfg = config(tmp_path, MODEL__WEIGHTS=self.ADDRESS)
        start = open_start_weights(cfg)
        assert start.opened is None and not fetched
        assert not preflight(cfg, start).problems
        assert start.checkpoint().tensors == {} and fetched == [self.ADDRESS]

    def test_the_error_of_fetching_is_a_problem(self, check, monkeypatch):
        def offline(path, *_, **__):
            raise OSError("no route to host")

        monkeypatch.setattr(PathManager, "get_local_path", offline)
        assert "no route to host" in " ".join(check(MODEL__WEIGHTS=self.ADDRESS, DATASETS__TEST=()).problems)
