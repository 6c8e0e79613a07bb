"""Components and datasets that do not belong together are refused before the run."""

import pytest
from detectron2.data import MetadataCatalog

from gw_detectron.checkpoint import StartWeights
from gw_detectron.engine.train import run_config
from gw_detectron.modeling.norm_keys import unread_keys
from gw_detectron.preflight import preflight

from ..architectures import small_arguments

C4, PANOPTIC = "COCO-Detection/faster_rcnn_R_50_C4_1x_GW", "COCO-PanopticSegmentation/panoptic_fpn_R_50_1x_GW"


def run_of(name, folder, **changes):
    return run_config(small_arguments(name, "GW", folder, **changes))


def problems(cfg):
    return preflight(cfg, StartWeights()).problems


@pytest.mark.parametrize(("positions", "refused"), [("", 0), ("S1", 0), ("S1-B2", 1), ("ALL", 1)])
def test_whitening_that_ends_before_detectron2s_res5(tmp_path, positions, refused):
    cfg = run_of(
        C4, tmp_path, MODEL__ROI_HEADS__NAME="Res5ROIHeads", MODEL__RESNETS__WHITEN_POSITIONS=positions or "''"
    )
    found = list(unread_keys(cfg))
    assert len(found) == refused
    for problem in found:
        assert problem.startswith(
            f"MODEL.RESNETS.WHITEN_POSITIONS ('{positions}'): MODEL.ROI_HEADS.NAME is Detectron2's"
        )
        assert problem.endswith("Fix: set MODEL.ROI_HEADS.NAME GWRes5ROIHeads.")


def test_the_default_heads_of_an_architecture_without_regions_are_not_meant(tmp_path):
    cfg = run_of("COCO-Detection/retinanet_R_50_FPN_1x_GW", tmp_path, MODEL__ROI_HEADS__NAME="Res5ROIHeads")
    assert list(unread_keys(cfg)) == []


def test_the_name_of_res5s_norm_at_detectron2s_head(tmp_path, small_dataset):
    changes = {"MODEL__RESNETS__NORM": "GN:groups=4", "MODEL__RESNETS__WHITEN_POSITIONS": "S1"}
    found = problems(run_of(C4, tmp_path, MODEL__ROI_HEADS__NAME="Res5ROIHeads", **changes))
    assert len(found) == 1 and "MODEL.RESNETS.NORM ('GN:groups=4')" in found[0]
    assert found[0].endswith("Fix: set MODEL.ROI_HEADS.NAME GWRes5ROIHeads.")


def test_the_number_of_semantic_classes(tmp_path, small_dataset):
    assert problems(run_of(PANOPTIC, tmp_path)) == []
    found = problems(run_of(PANOPTIC, tmp_path, MODEL__SEM_SEG_HEAD__NUM_CLASSES=54))
    assert len(found) == 2  # training and evaluation
    assert "MODEL.SEM_SEG_HEAD.NUM_CLASSES (54): dataset gw_synthetic_" in found[0]
    assert found[0].endswith("has 2 classes. Fix: set MODEL.SEM_SEG_HEAD.NUM_CLASSES 2.")


def test_a_dataset_without_semantic_masks(tmp_path, small_dataset):
    found = problems(run_of(PANOPTIC, tmp_path, DATASETS__TRAIN="('gw_synthetic_train',)"))
    assert len(found) == 1
    assert "('PanopticFPN'): dataset gw_synthetic_train has no semantic masks. Fix: give a panoptic" in found[0]


def test_a_missing_folder_of_semantic_masks(tmp_path, small_dataset):
    name = "gw_synthetic_val_panoptic_separated"
    before = MetadataCatalog.pop(name)
    gone = str(tmp_path / "gone")
    MetadataCatalog.get(name).set(**{**before.as_dict(), "name": name, "sem_seg_root": gone})
    try:
        found = problems(run_of(PANOPTIC, tmp_path))
    finally:
        MetadataCatalog[name] = before
    assert len(found) == 1 and f"Dataset '{name}': '{gone}' does not exist" in found[0]


def test_frozen_norms_of_new_heads_are_named_by_their_key(tmp_path, small_dataset):
    for name, key in ((PANOPTIC, "SEM_SEG_HEAD"), ("COCO-Detection/retinanet_R_50_FPN_1x_GW", "RETINANET")):
        found = problems(run_of(name, tmp_path, **{f"MODEL__{key}__NORM": "FrozenBN"}))
        assert len(found) == 1 and found[0].startswith(f"MODEL.{key}.NORM: ")


@pytest.mark.parametrize("name", [PANOPTIC, "COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x_GW"])
def test_test_time_augmentation_that_detectron2_does_not_have(tmp_path, small_dataset, name):
    found = problems(run_of(name, tmp_path, TEST__AUG__ENABLED=True))
    assert len(found) == 1 and "TEST.AUG.ENABLED (True)" in found[0]


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"ROI_BOX_HEAD__NORM": "GN", "ROI_BOX_HEAD__NUM_CONV": 0}, "MODEL.ROI_BOX_HEAD.NORM ('GN'): the head has no"),
        ({"RESNETS__WHITEN_NORM": "''"}, "MODEL.RESNETS.WHITEN_NORM (''): leaves the layers at WHITEN_POSITIONS ('S1"),
    ],
)
def test_norms_of_layers_that_the_model_does_not_have(tmp_path, changes, start):
    cfg = run_of(
        "COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x_GW", tmp_path, **{f"MODEL__{key}": to for key, to in changes.items()}
    )
    (problem,) = unread_keys(cfg)
    assert problem.startswith(start) and "Fix: set " in problem
