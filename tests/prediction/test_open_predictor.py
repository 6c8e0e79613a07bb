"""Predictors of run folders, checkpoints and exported files: the numbers are Detectron2's."""

import contextlib
import io
import os
import shutil
import zipfile

import numpy as np
import pytest
import torch
from detectron2.engine import DefaultPredictor

from gw_detectron.config import read_config
from gw_detectron.errors import ConfigError, DataError, MissingFileError, UserError
from gw_detectron.export import load_model
from gw_detectron.export.meta_arch import detector_program
from gw_detectron.export.one_image import OneImageProgram
from gw_detectron.export.run_exported import ExportedFile, open_exported
from gw_detectron.prediction import open_predictor
from gw_detectron.prediction.open_predictor import ExportedPredictor

from ..export.test_onnx_detect import write_model
from .conftest import SIDES

NAMES = ["fork", "cup", "plate"]


def check_same(found, expected, tolerance=0.0):
    assert len(found) == len(expected) > 3
    assert torch.equal(found.pred_classes, expected.pred_classes)
    assert torch.allclose(found.pred_boxes.tensor, expected.pred_boxes.tensor, atol=100 * tolerance, rtol=0)
    assert torch.allclose(found.scores, expected.scores, atol=tolerance, rtol=0)
    assert found.pred_masks.shape == expected.pred_masks.shape
    assert (found.pred_masks ^ expected.pred_masks).float().mean() <= tolerance


@pytest.mark.parametrize("channels", ["RGB", "BGR"])
def test_a_run_folder_predicts_as_detectron2(run_folder, channels):
    image = np.random.default_rng(1).integers(0, 256, (50, 201, 3), np.uint8)
    predictor = open_predictor(str(run_folder), score_threshold=0.1, device="cpu", opts=["INPUT.FORMAT", channels])
    cfg = read_config(str(run_folder / "config.yaml"), ["INPUT.FORMAT", channels])
    cfg.MODEL.WEIGHTS, cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = str(run_folder / "model_final.pth"), 0.1
    check_same(predictor(image), DefaultPredictor(cfg)(image[:, :, ::-1])["instances"])  # it takes BGR
    assert predictor.metadata.thing_classes == NAMES
    assert predictor.metadata.thing_dataset_id_to_contiguous_id == {2: 0, 7: 1, 40: 2}


def test_the_last_checkpoint_of_a_moved_run_is_taken(run_folder, tmp_path, photo):
    moved = tmp_path / "moved"
    shutil.copytree(run_folder, moved)
    content = torch.load(moved / "model_final.pth", weights_only=False)
    content["model"]["roi_heads.box_predictor.cls_score.weight"] *= 0.5
    torch.save(content, moved / "model_0000009.pth")
    by_file = open_predictor(str(moved / "model_0000009.pth"), score_threshold=0.1)(photo)
    first = open_predictor(str(moved), score_threshold=0.1)(photo)
    assert not torch.equal(first.scores, by_file.scores)
    (moved / "last_checkpoint").write_text("model_0000009.pth")
    check_same(open_predictor(str(moved), score_threshold=0.1)(photo), by_file)
    (moved / "last_checkpoint").unlink()
    check_same(open_predictor(str(moved), score_threshold=0.1)(photo), first)


def test_a_checkpoint_with_a_config_elsewhere(run_folder, tmp_path, caplog):
    weights = tmp_path / "weights.pth"
    weights.symlink_to(run_folder / "model_final.pth")
    for path, missing in ((tmp_path / "none", "none"), (weights, "its config"), (tmp_path, "its config")):
        with pytest.raises(MissingFileError, match=missing):
            open_predictor(path)
    with pytest.raises(UserError, match="does not fit the model"):
        open_predictor(str(weights), config_file="COCO-Detection/faster_rcnn_R_50_FPN_1x_GW.yaml")  # of the package
    with pytest.raises(UserError, match=r"other shapes .*cls_score.weight \(4, .*\), not \(7, .*Fix: set NUM_CLASSES"):
        opts, names = ["MODEL.ROI_HEADS.NUM_CLASSES", 6], list("abcdef")
        open_predictor(str(weights), config_file=str(run_folder / "config.yaml"), opts=opts, class_names=names)
    config = tmp_path / "elsewhere.yaml"
    shutil.copy(run_folder / "config.yaml", config)
    named = open_predictor(str(weights), config_file=str(config), class_names=["a", "b", "c"])
    assert named.metadata.thing_classes == ["a", "b", "c"]
    unnamed = open_predictor(str(weights), config_file=str(config))
    assert unnamed.metadata.get("thing_classes", None) is None and "class names: unknown" in caplog.text


@pytest.fixture(scope="module")
def model(run_folder):
    cfg = read_config(str(run_folder / "config.yaml"), ["MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.1"])
    cfg.MODEL.WEIGHTS = str(run_folder / "model_final.pth")
    return load_model(cfg)


def test_exported_programs_agree_with_the_checkpoint(run_folder, model, photo):
    expected, detector = open_predictor(run_folder, score_threshold=0.1), detector_program(model)
    for program, sides in (
        (OneImageProgram(detector, SIDES), None),
        (OneImageProgram(detector, SIDES, paste_masks=True), None),
        (detector, SIDES),
    ):
        predictor = ExportedPredictor(ExportedFile(program, program.describe()), None, 0.1, sides)
        for image in (photo, photo[:60]) if sides else (photo,):  # resizing inside the file rounds otherwise
            check_same(predictor(image), expected(image), 1e-3)
    assert predictor(np.zeros((2, 400, 3), np.uint8)).image_size == (2, 400)  # padded to the smallest side


@pytest.mark.parametrize("channels", ["RGB", "BGR"])
def test_an_onnx_file(tmp_path, channels):
    pixels = np.full((30, 40, 3), 10, np.uint8)
    pixels[:, :20, 0] = 200  # red
    write_model(tmp_path / "model.onnx", channels)
    (tmp_path / "parity.json").write_text('{"file": "model.onnx"}')
    for path in (tmp_path, tmp_path / "model.onnx"):
        predictor = open_predictor(path, score_threshold=0.2)
        found = predictor(pixels)
        assert predictor.metadata.thing_classes == ["cat", "dog"]
        assert found.pred_boxes.tensor.tolist() == [[2, 3, 12, 13], [20, 5, 39, 29]]
        assert found.pred_classes.tolist() == [1, 0]
        assert found.pred_masks[0, :, :20].all() == (channels == "RGB")  # it shows where its first channel is bright
    for threshold, count in ((0.05, 2), (0.25, 1), (0.9, 0)):  # exclusive
        assert len(open_predictor(tmp_path, score_threshold=threshold)(pixels)) == count


@pytest.mark.parametrize("name", ["model.pt2", "model.onnx"])
def test_damaged_exported_files(tmp_path, name):
    (tmp_path / name).write_bytes(b"no model")
    with pytest.raises(UserError, match=f"{name}': cannot be read: .*Fix: export the model again"):
        open_exported(tmp_path / name)


def test_a_pickle_in_a_pt2_file_is_not_run(tmp_path, monkeypatch):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
    torch.export.save(program, tmp_path / "good.pt2")
    buffer = io.BytesIO()
    torch.save(Payload(), buffer)
    with zipfile.ZipFile(tmp_path / "good.pt2") as good, zipfile.ZipFile(tmp_path / "evil.pt2", "w") as evil:
        for entry in good.infolist():
            swapped = entry.filename.endswith((".pt", ".pth"))
            evil.writestr(entry, buffer.getvalue() if swapped else good.read(entry))
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)
    with pytest.raises(UserError, match=r"evil.pt2': cannot be read"):
        open_exported(tmp_path / "evil.pt2")
    assert not (tmp_path / "ran").exists() and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    with contextlib.suppress(Exception):
        torch.export.load(tmp_path / "evil.pt2")
    assert (tmp_path / "ran").exists()  # torch itself runs it
    open_exported(tmp_path / "good.pt2")


def test_exported_files_that_do_not_fit(tmp_path):
    write_model(tmp_path / "batch.onnx", input_name="images")
    with pytest.raises(ConfigError, match=r"does not resize, and no parity\.json"):
        open_predictor(str(tmp_path / "batch.onnx"))
    write_model(tmp_path / "model.onnx")
    with pytest.raises(ConfigError, match=r"score_threshold \(0\.01\)"):
        open_predictor(str(tmp_path / "model.onnx"), score_threshold=0.01)
    for options in ({"config_file": "x.yaml"}, {"opts": ["SEED", "1"]}, {"device": "cuda"}, {"class_names": ["a"]}):
        with pytest.raises(ConfigError, match="an exported file has its own classes, no config"):
            open_predictor(str(tmp_path / "model.onnx"), **options)
    (tmp_path / "parity.json").write_text('{"file": ')
    with pytest.raises(DataError, match=r"parity\.json': damaged: "):
        open_predictor(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opts": ["MODEL.WEIGHTS", "x.pth"]}, r"MODEL\.WEIGHTS: not a key for prediction"),
        ({"opts": ["MODEL.WEIGHT", "x.pth"]}, "unknown config key 'MODEL.WEIGHT'"),
        ({"score_threshold": 1.1}, r"score_threshold \(1.1\)"),
        ({"score_threshold": float("nan")}, r"score_threshold \(nan\)"),
        ({"class_names": ["fork"]}, r"class names \(1\): MODEL\.ROI_HEADS\.NUM_CLASSES is 3"),
        ({"device": "gpu"}, r"device \('gpu'\)"),
        ({"device": "cuda:99"}, r"device \('cuda:99'\)"),
    ],
)
def test_options_that_do_not_fit(run_folder, options, message):
    with pytest.raises(ConfigError, match=message):
        open_predictor(str(run_folder), **options)
