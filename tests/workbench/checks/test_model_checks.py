"""Device, schedule, model and norms: what would train to nothing is refused with its key."""

import pytest
import torch
from detectron2.utils import comm

from gw_detectron.errors import PreflightError, PreflightReport
from gw_detectron.modeling.build import unread_keys
from gw_detectron.weights import LazyCheckpoint
from gw_detectron.workbench.run.config_checks import preflight
from gw_detectron.workbench.run.train import run_config

from ...architectures import small_arguments
from .sound_run import config, one

C4, PANOPTIC = (
    "COCO-Detection/faster_rcnn_R_50_C4_1x_GW",
    "COCO-PanopticSegmentation/panoptic_fpn_R_50_1x_GW",
)
RETINANET = "COCO-Detection/retinanet_R_50_FPN_1x_GW"
KEYPOINTS = "COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x_GW"


def run_of(name, folder, **changes):
    return run_config(small_arguments(name, "GW", folder, **changes))


def errors(cfg):
    return preflight(cfg, LazyCheckpoint()).errors


def test_all_errors_are_raised_together(check):
    assert check() == PreflightReport()
    with pytest.raises(PreflightError, match="(?s)FREEZE_AT.*NUM_CLASSES") as raised:
        check(MODEL__BACKBONE__FREEZE_AT=2, MODEL__ROI_HEADS__NUM_CLASSES=7).raise_errors()
    assert len(raised.value.problems) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"DATASETS__TRAIN": ()}, ["DATASETS.TRAIN (empty)"]),
        ({"DATASETS__TRAIN": ("coco_2017_trian",)}, ["'coco_2017_trian'", "coco_2017_train"]),
        (
            {"MODEL__ROI_HEADS__NUM_CLASSES": 80},
            ["MODEL.ROI_HEADS.NUM_CLASSES (80)", "NUM_CLASSES 2"],
        ),
        ({"MODEL__BACKBONE__FREEZE_AT": 2}, ["MODEL.BACKBONE.FREEZE_AT (2)", "FREEZE_AT 0"]),
        (
            {"MODEL__RESNETS__WHITEN_NORM": "FrozenBW:channels=16"},
            ["9 layers", "stem.conv1.norm"],
        ),
        ({"MODEL__ROI_MASK_HEAD__NORM": "FrozenBN"}, ["FrozenBN", "roi_heads.mask_head."]),
        ({"SOLVER__BASE_LR": float("nan")}, ["SOLVER.BASE_LR (nan)"]),
        # one image per batch, scaled as the trainer does
        (
            {"SOLVER__REFERENCE_WORLD_SIZE": 2},
            ["SOLVER.IMS_PER_BATCH (1 ", "backbone.bottom_up.res2.0.conv1.norm"],
        ),
        ({"MODEL__FPN__NORM": "GW:groups=7"}, ["MODEL", "32", "7"]),
        ({"MODEL__RESNETS__NORM": "XN"}, ["MODEL.RESNETS.NORM", "XN", "GW"]),
        ({"MODEL__RESNETS__WHITEN_POSITIONS": "S1-B3"}, ["S1-B3"]),
        ({"MODEL__BACKBONE__NAME": "build_no_such_backbone"}, ["build_no_such_backbone"]),
    ],
)
def test_a_config_that_cannot_learn(check, changes, words):
    error = one(check(**changes))
    assert all(word in error for word in words), error


def test_a_config_that_learns_badly(check):
    found = check(SOLVER__ACCUMULATE=8, SOLVER__WARMUP_ITERS=3)
    assert not found.errors and len(found.warnings) == 2
    words = (
        "SOLVER.WARMUP_ITERS (3)",
        "SOLVER.ACCUMULATE (8)",
        "over 2 images",
        "res2.0.conv1.norm,",
    )
    assert all(word in " ".join(found.warnings) for word in words)


def test_norms_without_a_batch_and_frozen_layers_with_weights_have_no_such_faults(
    check, tmp_path
):
    weights = {"MODEL__WEIGHTS": str(tmp_path / "w.pth")}
    torch.save({"model": {}}, tmp_path / "w.pth")
    assert not check(SOLVER__IMS_PER_BATCH=1, MODEL__RESNETS__NORM="GW").errors
    assert check(SOLVER__ACCUMULATE=8, MODEL__RESNETS__NORM="GW") == PreflightReport()
    assert not check(SOLVER__IMS_PER_BATCH=1, eval_only=True, **weights).errors
    weights |= {"MODEL__RESNETS__NORM": "FrozenBN", "MODEL__BACKBONE__FREEZE_AT": 2}
    assert check(**weights) == PreflightReport()
    found = check(MODEL__FPN__NORM="FrozenBN", **weights)
    assert not found.errors and "backbone.fpn_" in found.warnings[0]


def test_images_are_counted_per_process(check, monkeypatch):
    monkeypatch.setattr(comm, "get_world_size", lambda: 2)
    assert "on 2 processes" in one(check(SOLVER__IMS_PER_BATCH=2))
    assert not check(SOLVER__IMS_PER_BATCH=4).errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks about a machine without a GPU")
def test_no_gpu(check):
    assert "MODEL.DEVICE ('cuda')" in one(check(MODEL__DEVICE="cuda"))


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
            {"MODEL__META_ARCHITECTURE": "PanopticFPN", "MODEL__SEM_SEG_HEAD__NORM": "GW"},
            ["MODEL.SEM_SEG_HEAD.NORM ('GW')", "GWSemSegFPNHead"],
        ),
        # a key that the component does not read
        (
            STOCK | {"MODEL__RESNETS__WHITEN_POSITIONS": "ALL"},
            ["WHITEN_POSITIONS ('ALL')", "build_gw_resnet_fpn"],
        ),
        (
            BOX_HEAD
            | {"MODEL__ROI_BOX_HEAD__NORM": "GN", "MODEL__ROI_BOX_HEAD__SINGLE_RELU": True},
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
    assert not others or "PanopticFPN" in changes.values()  # this dataset has no semantic masks
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("positions", "refused"), [("", 0), ("S1", 0), ("S1-B2", 1), ("ALL", 1)]
)
def test_whitening_that_ends_before_detectron2s_res5(tmp_path, positions, refused):
    cfg = run_of(
        C4,
        tmp_path,
        MODEL__ROI_HEADS__NAME="Res5ROIHeads",
        MODEL__RESNETS__WHITEN_POSITIONS=positions or "''",
    )
    found = list(unread_keys(cfg))
    assert len(found) == refused
    assert all(
        f"MODEL.RESNETS.WHITEN_POSITIONS ('{positions}')" in e and "GWRes5ROIHeads" in e
        for e in found
    )
    # the default heads of an architecture without regions are not meant
    assert (
        list(unread_keys(run_of(RETINANET, tmp_path, MODEL__ROI_HEADS__NAME="Res5ROIHeads")))
        == []
    )


def test_semantic_segmentation_needs_its_classes(tmp_path, small_dataset):
    assert errors(run_of(PANOPTIC, tmp_path)) == []
    found = errors(run_of(PANOPTIC, tmp_path, MODEL__SEM_SEG_HEAD__NUM_CLASSES=54))
    assert len(found) == 2  # training and evaluation
    assert "MODEL.SEM_SEG_HEAD.NUM_CLASSES (54)" in found[0] and "NUM_CLASSES 2" in found[0]


@pytest.mark.parametrize("name", [PANOPTIC, KEYPOINTS, RETINANET])
def test_test_time_augmentation_that_detectron2_does_not_have(tmp_path, small_dataset, name):
    (error,) = errors(run_of(name, tmp_path, TEST__AUG__ENABLED=True))
    assert "TEST.AUG.ENABLED (True)" in error


@pytest.mark.parametrize("key", ["SOLVER.CHECKPOINT_PERIOD", "SOLVER.ACCUMULATE"])
def test_a_period_of_0_is_an_error_before_the_run(tmp_path, coco, key):
    coco()
    (error,) = preflight(
        config(tmp_path, **{key.replace(".", "__"): 0}), LazyCheckpoint()
    ).errors
    assert error.startswith(f"{key} (0): not 1 or more")


@pytest.mark.parametrize(
    ("mistake", "advised"),
    [
        ({"SOLVER__IMS_PER_BATCH": 1}, {"MODEL__RESNETS__NORM": "GW"}),
        (
            {"SOLVER__IMS_PER_BATCH": 1, "MODEL__RESNETS__WHITEN_NORM": "BW:channels=16"},
            {"MODEL__RESNETS__NORM": "GN", "MODEL__RESNETS__WHITEN_NORM": "GN"},
        ),
        ({"MODEL__RESNETS__NORM": "FrozenBN"}, {"MODEL__RESNETS__NORM": "GW"}),
        ({"SOLVER__STEPS": (30, 45), "SOLVER__MAX_ITER": 45}, {"SOLVER__STEPS": ()}),
    ],
)
def test_the_advice_is_followed_and_the_run_starts(tmp_path, coco, mistake, advised):
    coco()
    mistake = {"SOLVER__WARMUP_ITERS": 0, **mistake}
    (error,) = preflight(config(tmp_path, **mistake), LazyCheckpoint()).errors
    fix = error.partition(" Fix: ")[2]
    assert all(
        key.replace("__", ".") in error and str(value) in fix for key, value in advised.items()
    ), error
    assert preflight(config(tmp_path, **{**mistake, **advised}), LazyCheckpoint()).errors == []
