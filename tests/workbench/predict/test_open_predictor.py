"""Predictors of run folders and checkpoints: the numbers are Detectron2's."""

import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
from detectron2.data import Metadata
from detectron2.engine import DefaultPredictor
from detectron2.structures import Instances

from gw_detectron.config import default_config, read_config
from gw_detectron.errors import ConfigError, MissingFileError, UserError
from gw_detectron.weights import Preprocessing
from gw_detectron.workbench.predict import open_predictor
from gw_detectron.workbench.predict.predictor import Predictor

NAMES = ["fork", "cup", "plate"]


def check_same(found, expected, tolerance=0.0):
    assert len(found) == len(expected) > 3
    assert torch.equal(found.pred_classes, expected.pred_classes)
    assert torch.allclose(
        found.pred_boxes.tensor,
        expected.pred_boxes.tensor,
        atol=100 * tolerance,
        rtol=0,
    )
    assert torch.allclose(found.scores, expected.scores, atol=tolerance, rtol=0)
    assert found.pred_masks.shape == expected.pred_masks.shape
    assert (found.pred_masks ^ expected.pred_masks).float().mean() <= tolerance


@pytest.mark.parametrize("channels", ["RGB", "BGR"])
def test_a_run_folder_predicts_as_detectron2(run_folder, tmp_path, channels):
    image = np.random.default_rng(1).integers(0, 256, (50, 201, 3), np.uint8)
    cfg = read_config(str(run_folder / "config.yaml"), ["INPUT.FORMAT", channels])
    content = torch.load(run_folder / "model_final.pth", weights_only=False)
    content["record"]["config"] = cfg.dump()
    run_folder = tmp_path
    torch.save(content, run_folder / "model_final.pth")
    (run_folder / "config.yaml").write_text(cfg.dump())
    predictor = open_predictor(str(run_folder), score_threshold=0.1, device="cpu")
    cfg.MODEL.WEIGHTS, cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = (
        str(run_folder / "model_final.pth"),
        0.1,
    )
    # it takes BGR
    check_same(predictor(image), DefaultPredictor(cfg)(image[:, :, ::-1])["instances"])
    assert predictor.metadata.thing_classes == NAMES
    assert predictor.metadata.thing_dataset_id_to_contiguous_id == {2: 0, 7: 1, 40: 2}
    assert predictor.image_scale == 0.5


def test_the_last_checkpoint_of_a_moved_run_is_taken(run_folder, tmp_path, photo):
    moved = tmp_path / "moved"
    shutil.copytree(run_folder, moved)
    content = torch.load(moved / "model_final.pth", weights_only=False)
    content["model"]["roi_heads.box_predictor.cls_score.weight"] *= 0.5
    torch.save(content, moved / "model_0000009.pth")
    by_file = open_predictor(str(moved / "model_0000009.pth"), score_threshold=0.1)(
        photo
    )
    first = open_predictor(str(moved), score_threshold=0.1)(photo)
    assert not torch.equal(first.scores, by_file.scores)
    (moved / "last_checkpoint").write_text("model_0000009.pth")
    check_same(open_predictor(str(moved), score_threshold=0.1)(photo), by_file)
    (moved / "last_checkpoint").unlink()
    check_same(open_predictor(str(moved), score_threshold=0.1)(photo), first)


def test_a_checkpoint_with_a_config_elsewhere(run_folder, tmp_path, caplog):
    weights = tmp_path / "weights.pth"
    weights.symlink_to(run_folder / "model_final.pth")
    for path, missing in (
        (tmp_path / "none", "none"),
        (weights, "its config"),
        (tmp_path, "its config"),
    ):
        with pytest.raises(MissingFileError, match=missing):
            open_predictor(path)
    with pytest.raises(UserError, match="does not fit the model"):
        # of the package
        open_predictor(
            str(weights), config_file="COCO-Detection/faster_rcnn_R_50_FPN_1x_GW.yaml"
        )
    with pytest.raises(
        UserError, match=r"other shapes .*cls_score.weight.*Fix: .*NUM_CLASSES"
    ):
        opts, names = ["MODEL.ROI_HEADS.NUM_CLASSES", 6], list("abcdef")
        open_predictor(
            str(weights),
            config_file=str(run_folder / "config.yaml"),
            opts=opts,
            class_names=names,
        )
    config = tmp_path / "elsewhere.yaml"
    shutil.copy(run_folder / "config.yaml", config)
    for names in (["a", "b", "c"], None):
        metadata = open_predictor(
            str(weights), config_file=str(config), class_names=names
        ).metadata
        assert metadata.thing_classes == (names or NAMES)
        assert metadata.thing_dataset_id_to_contiguous_id == {2: 0, 7: 1, 40: 2}
    content = torch.load(weights, weights_only=False)
    del content["record"]
    torch.save(content, tmp_path / "unnamed.pth")
    unnamed = open_predictor(str(tmp_path / "unnamed.pth"), config_file=str(config))
    assert (
        unnamed.metadata.get("thing_classes", None) is None
        and "class names: not in" in caplog.text
    )


def test_weights_that_record_only_their_network(run_folder, tmp_path):
    config = run_folder / "config.yaml"
    content = torch.load(run_folder / "model_final.pth", weights_only=False)
    del content["record"]
    content["preprocessing"] = asdict(Preprocessing.from_config(read_config(config)))
    weights = tmp_path / "weights.pth"
    torch.save(content, weights)

    open_predictor(weights, config_file=config)
    with pytest.raises(ConfigError, match="Fix: set INPUT.FORMAT RGB"):
        open_predictor(weights, config_file=config, opts=["INPUT.FORMAT", "BGR"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"opts": ["MODEL.WEIGHTS", "x.pth"]},
            r"MODEL\.WEIGHTS: not a key for prediction",
        ),
        ({"opts": ["TEST.AUG.ENABLED", True]}, "no.* key .*augmentation"),
        ({"opts": ["MODEL.WEIGHT", "x.pth"]}, "unknown config key 'MODEL.WEIGHT'"),
        (
            {"opts": ["INPUT.FORMAT", "BGR"]},
            "these weights expect different preprocessing .*Fix: set INPUT.FORMAT RGB",
        ),
        ({"device": "gpu"}, r"--device \('gpu'\): .*Fix: give cpu"),
        ({"score_threshold": 1.1}, r"score_threshold \(1.1\)"),
        ({"score_threshold": float("nan")}, r"score_threshold \(nan\)"),
        (
            {"class_names": ["fork"]},
            r"class names \(1\): MODEL\.ROI_HEADS\.NUM_CLASSES is 3",
        ),
    ],
)
def test_options_that_do_not_fit(run_folder, options, message):
    with pytest.raises(ConfigError, match=message):
        open_predictor(str(run_folder), **options)


def test_a_config_with_test_time_augmentation_predicts_without_it(
    run_folder, tmp_path, caplog
):
    path = tmp_path / "config.yaml"
    cfg = read_config(run_folder / "config.yaml", ["TEST.AUG.ENABLED", True])
    path.write_text(cfg.dump())

    open_predictor(str(run_folder), config_file=path, device="cpu")

    assert "TEST.AUG.ENABLED (True): prediction has no" in caplog.text


def test_gray_pixels_are_taken_without_a_warning(photo, recwarn):
    cfg = default_config()
    cfg.INPUT.FORMAT, cfg.INPUT.MIN_SIZE_TEST = "L", 0

    pixels = Predictor(None, cfg, None, 0.5).input(photo)["image"]

    assert pixels.shape == (1, *photo.shape[:2])
    assert not recwarn.list


@pytest.mark.parametrize(("limit", "is_full"), [(-1, False), (2, True), (3, False)])
def test_an_image_is_full_at_the_limit_of_detections(photo, limit, is_full):
    """-1 is no limit."""
    cfg = default_config()
    cfg.TEST.DETECTIONS_PER_IMAGE = limit
    found = Instances(photo.shape[:2], scores=torch.ones(2))
    predictor = Predictor(lambda inputs: [{"instances": found}], cfg, Metadata(), 0.5)

    predictor(photo)

    assert predictor.is_full == is_full
