"""Device, schedule, model and norms: what would train to nothing is refused with its key."""

import pytest
import torch
from detectron2.utils import comm

from gw_detectron.config import read_config
from gw_detectron.errors import CheckReport, PreflightError
from gw_detectron.modeling.build import unread_keys
from gw_detectron.weights import LazyCheckpoint
from gw_detectron.workbench.run.checks import check_run
from gw_detectron.workbench.run.model_checks import check_model

from ...architectures import small_arguments
from ...tiny_run import config_of
from ..sound_run import only_error

C4 = "COCO-Detection/faster_rcnn_R_50_C4_1x_GW"
PANOPTIC = "COCO-PanopticSegmentation/panoptic_fpn_R_50_1x_GW"
RETINANET = "COCO-Detection/retinanet_R_50_FPN_1x_GW"
KEYPOINTS = "COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x_GW"
RES5 = {"MODEL__ROI_HEADS__NAME": "Res5ROIHeads"}


def run_of(name, folder, **changes):
    args = small_arguments(name, "GW", folder, **changes)
    return config_of(args)


def errors(cfg):
    report = check_run(cfg, LazyCheckpoint())
    return report.errors


def test_a_sound_run_has_no_fault(check):
    assert check() == CheckReport()


def test_all_errors_are_raised_together(check):
    report = check(MODEL__BACKBONE__FREEZE_AT=2, MODEL__ROI_HEADS__NUM_CLASSES=7)

    with pytest.raises(PreflightError, match="(?s)FREEZE_AT.*NUM_CLASSES") as raised:
        report.raise_errors()

    assert len(raised.value.problems) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"DATASETS__TRAIN": ()}, ["DATASETS.TRAIN (empty)"]),
        (
            {"DATASETS__TRAIN": ("coco_2017_trian",)},
            ["'coco_2017_trian'", "coco_2017_train"],
        ),
        (
            {"MODEL__ROI_HEADS__NUM_CLASSES": 80},
            ["MODEL.ROI_HEADS.NUM_CLASSES (80)", "NUM_CLASSES 2"],
        ),
        (
            {"MODEL__BACKBONE__FREEZE_AT": 2},
            ["MODEL.BACKBONE.FREEZE_AT (2)", "FREEZE_AT 0"],
        ),
        (
            {"MODEL__RESNETS__WHITEN_NORM": "FrozenBW:channels=16"},
            ["9 layers", "stem.conv1.norm"],
        ),
        (
            {"MODEL__ROI_MASK_HEAD__NORM": "FrozenBN"},
            ["FrozenBN", "roi_heads.mask_head."],
        ),
        ({"SOLVER__BASE_LR": float("nan")}, ["SOLVER.BASE_LR (nan)"]),
        ({"SOLVER__CHECKPOINT_PERIOD": 0}, ["SOLVER.CHECKPOINT_PERIOD (0)"]),
        ({"SOLVER__ACCUMULATE": 0}, ["SOLVER.ACCUMULATE (0)"]),
        (
            {"SOLVER__REFERENCE_WORLD_SIZE": 8},
            ["SOLVER.REFERENCE_WORLD_SIZE (8)", "SOLVER.IMS_PER_BATCH (2)"],
        ),
        # one image per batch, scaled as the trainer does
        (
            {"SOLVER__REFERENCE_WORLD_SIZE": 2},
            ["SOLVER.IMS_PER_BATCH (1 ", "backbone.bottom_up.res2.0.conv1.norm"],
        ),
        ({"MODEL__FPN__NORM": "GW:groups=7"}, ["MODEL", "32", "7"]),
        ({"MODEL__RESNETS__NORM": "XN"}, ["MODEL.RESNETS.NORM", "XN", "GW"]),
        ({"MODEL__RESNETS__WHITEN_POSITIONS": "S1-B3"}, ["S1-B3"]),
        (
            {"MODEL__BACKBONE__NAME": "build_no_such_backbone"},
            ["build_no_such_backbone"],
        ),
    ],
)
def test_a_config_that_cannot_learn(check, changes, words):
    error = only_error(check(**changes))
    assert all(word in error for word in words), error


def test_a_run_without_iterations(check):
    """Detectron2 builds no schedule of its length."""
    (error, *_) = check(SOLVER__MAX_ITER=0).errors
    assert error.startswith("SOLVER.MAX_ITER (0)")


def test_a_config_that_learns_badly(check):
    report = check(SOLVER__WARMUP_ITERS=3)

    assert not report.errors
    (warmup,) = report.warnings
    assert "SOLVER.WARMUP_ITERS (3)" in warmup


def test_norms_without_a_batch_may_have_one_image(check, tmp_path):
    path = tmp_path / "w.pth"
    torch.save({"model": {}}, path)

    assert not check(SOLVER__IMS_PER_BATCH=1, MODEL__RESNETS__NORM="GW").errors
    evaluated = check(SOLVER__IMS_PER_BATCH=1, eval_only=True, MODEL__WEIGHTS=str(path))
    assert not evaluated.errors


def test_frozen_layers_with_weights_are_no_fault(check, tmp_path):
    path = tmp_path / "w.pth"
    torch.save({"model": {}}, path)
    frozen = {
        "MODEL__WEIGHTS": str(path),
        "MODEL__RESNETS__NORM": "FrozenBN",
        "MODEL__BACKBONE__FREEZE_AT": 2,
    }

    assert check(**frozen) == CheckReport()

    report = check(MODEL__FPN__NORM="FrozenBN", **frozen)
    assert not report.errors
    assert "backbone.fpn_" in report.warnings[0]


def test_images_are_counted_per_process(check, monkeypatch):
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    error = only_error(check(SOLVER__IMS_PER_BATCH=2))
    assert "on 2 processes" in error
    assert not check(SOLVER__IMS_PER_BATCH=4).errors


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="speaks about a machine without a GPU"
)
def test_no_gpu(check):
    error = only_error(check(MODEL__DEVICE="cuda"))
    assert "MODEL.DEVICE ('cuda')" in error


STOCK = {"MODEL__BACKBONE__NAME": "build_resnet_fpn_backbone", "MODEL__FPN__NORM": ""}
BOX_HEAD = {
    "MODEL__ROI_BOX_HEAD__NAME": "FastRCNNConvFCHead",
    "MODEL__ROI_BOX_HEAD__NUM_CONV": 1,
}
MASK_HEAD = {
    "MODEL__ROI_MASK_HEAD__NAME": "MaskRCNNConvUpsampleHead",
    "MODEL__ROI_MASK_HEAD__NUM_CONV": 1,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # a norm of this package at a component of Detectron2
        (
            STOCK | {"MODEL__RESNETS__NORM": "BN", "MODEL__FPN__NORM": "GW:groups=8"},
            [
                "MODEL.FPN.NORM ('GW:groups=8')",
                "MODEL.BACKBONE.NAME build_gw_resnet_fpn_backbone",
            ],
        ),
        (
            BOX_HEAD | {"MODEL__ROI_BOX_HEAD__NORM": "GW"},
            ["ROI_BOX_HEAD.NORM ('GW')", "GWFastRCNNConvFCHead"],
        ),
        (
            MASK_HEAD | {"MODEL__ROI_MASK_HEAD__NORM": "GW"},
            ["ROI_MASK_HEAD.NORM ('GW')", "GWMaskRCNNConvUpsampleHead"],
        ),
        (
            {
                "MODEL__META_ARCHITECTURE": "PanopticFPN",
                "MODEL__SEM_SEG_HEAD__NORM": "GW",
            },
            ["MODEL.SEM_SEG_HEAD.NORM ('GW')", "GWSemSegFPNHead"],
        ),
        # a key that the component does not read
        (
            STOCK | {"MODEL__RESNETS__WHITEN_POSITIONS": "ALL"},
            ["WHITEN_POSITIONS ('ALL')", "build_gw_resnet_fpn"],
        ),
        (
            BOX_HEAD
            | {
                "MODEL__ROI_BOX_HEAD__NORM": "GN",
                "MODEL__ROI_BOX_HEAD__SINGLE_RELU": True,
            },
            ["SINGLE_RELU (True)", "GWFastRCNNConvFCHead"],
        ),
        (
            {"MODEL__ROI_BOX_HEAD__NUM_CONV": 0, "MODEL__ROI_BOX_HEAD__NORM": "GN"},
            ["MODEL.ROI_BOX_HEAD.NORM ('GN')"],
        ),
        ({"MODEL__RESNETS__WHITEN_NORM": "''"}, ["MODEL.RESNETS.WHITEN_NORM ('')"]),
    ],
)
def test_a_norm_that_would_not_be_built(check, changes, words):
    error, *others = check(**changes).errors

    assert all(word in error for word in words), error
    if "PanopticFPN" not in changes.values():  # this dataset has no semantic masks
        assert not others


@pytest.mark.parametrize("positions", ["S1-B2", "ALL"])
def test_whitening_that_ends_before_detectron2s_res5(tmp_path, positions):
    cfg = run_of(C4, tmp_path, **RES5, MODEL__RESNETS__WHITEN_POSITIONS=positions)

    (error,) = unread_keys(cfg)

    assert f"MODEL.RESNETS.WHITEN_POSITIONS ('{positions}')" in error
    assert "GWRes5ROIHeads" in error


@pytest.mark.parametrize(
    ("name", "positions"),
    [(C4, "''"), (C4, "S1"), (RETINANET, "ALL")],  # RetinaNet has no ROI heads
)
def test_whitening_that_detectron2s_res5_does_not_end(tmp_path, name, positions):
    cfg = run_of(name, tmp_path, **RES5, MODEL__RESNETS__WHITEN_POSITIONS=positions)
    assert list(unread_keys(cfg)) == []


def test_semantic_segmentation_needs_its_classes(tmp_path, small_dataset):
    right = run_of(PANOPTIC, tmp_path)
    wrong = run_of(PANOPTIC, tmp_path, MODEL__SEM_SEG_HEAD__NUM_CLASSES=54)

    assert errors(right) == []
    training, evaluation = errors(wrong)
    for error in (training, evaluation):
        assert "MODEL.SEM_SEG_HEAD.NUM_CLASSES (54)" in error
        assert "NUM_CLASSES 2" in error


@pytest.mark.parametrize("name", [PANOPTIC, KEYPOINTS, RETINANET])
def test_test_time_augmentation_that_detectron2_does_not_have(
    tmp_path, small_dataset, name
):
    cfg = run_of(name, tmp_path, TEST__AUG__ENABLED=True)
    (error,) = errors(cfg)
    assert "TEST.AUG.ENABLED (True)" in error


@pytest.mark.parametrize(
    ("mistake", "advised"),
    [
        ({"SOLVER__IMS_PER_BATCH": 1}, {"MODEL__RESNETS__NORM": "GW"}),
        (
            {
                "SOLVER__IMS_PER_BATCH": 1,
                "MODEL__RESNETS__WHITEN_NORM": "BW:channels=16",
            },
            {"MODEL__RESNETS__NORM": "GN", "MODEL__RESNETS__WHITEN_NORM": "GN"},
        ),
        ({"MODEL__RESNETS__NORM": "FrozenBN"}, {"MODEL__RESNETS__NORM": "GW"}),
    ],
)
def test_the_advice_is_followed_and_the_run_starts(check, mistake, advised):
    mistake = {"SOLVER__WARMUP_ITERS": 0, **mistake}

    error = only_error(check(**mistake))

    fix = error.partition(" Fix: ")[2]
    for key, value in advised.items():
        assert key.replace("__", ".") in error
        assert str(value) in fix
    assert not check(**mistake | advised).errors


@pytest.mark.parametrize(("image_format", "values"), [("BGR", 1), ("RGB", 4), ("L", 3)])
def test_another_number_of_channels_than_the_images_have_is_a_warning(
    check, image_format, values
):
    mean_and_std = {
        "MODEL__PIXEL_MEAN": [100.0] * values,
        "MODEL__PIXEL_STD": [50.0] * values,
    }
    warnings = check(INPUT__FORMAT=image_format, **mean_and_std).warnings
    assert any(f"PIXEL_MEAN ({values} values)" in text for text in warnings)


def test_a_run_that_ends_before_its_steps_is_a_warning(check):
    report = check(SOLVER__STEPS=(30, 45), SOLVER__MAX_ITER=45)

    (warning,) = [text for text in report.warnings if "SOLVER.STEPS" in text]
    assert "1 of its steps" in warning
    assert not report.errors


def test_mixed_statistics_before_frozen_convolutions_are_a_warning():
    cfg = read_config("COCO-Detection/faster_rcnn_R_50_FPN_1x_GW.yaml")
    cfg.MODEL.RESNETS.WHITEN_NORM = "MixGW"
    start = LazyCheckpoint("weights.pth")
    for freeze_at, layers in ((0, 0), (2, 4)):  # the stem and the three blocks of res2
        cfg.MODEL.BACKBONE.FREEZE_AT = freeze_at
        report = CheckReport()

        check_model(cfg, start, report, eval_only=False)

        warnings = [text for text in report.warnings if "FREEZE_AT" in text]
        assert len(warnings) == bool(layers)
        assert all(f"{layers} layers mix" in text for text in warnings)
