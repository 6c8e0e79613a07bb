"""Shapes that reach the norm layers, against those of a real forward pass, for every kind of detector."""

import pytest
import torch
from detectron2.modeling import build_model

from gw_detectron.analysis.feasibility import batch_constraints, group_constraints
from gw_detectron.analysis.norm_shapes import norm_shapes
from gw_detectron.model_zoo import get_config
from gw_detectron.norms import norm_spec


@pytest.fixture
def small():
    cfg = get_config("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_4conv1fc_1x_GW.yaml")
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.RESNETS.DEPTH = 18
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 64
    cfg.MODEL.FPN.OUT_CHANNELS = 64
    cfg.MODEL.FPN.NORM = "GN"
    cfg.MODEL.ROI_BOX_HEAD.NORM = "GW:groups=16"
    cfg.MODEL.ROI_BOX_HEAD.CONV_DIM = 64
    cfg.MODEL.ROI_MASK_HEAD.NORM = "BW:channels=24,solver=zca"
    cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 8
    return cfg


def test_the_backbone_sees_the_shapes_of_a_real_batch(small):
    model = build_model(small)
    seen = {}

    def record(name):
        return lambda module, args: seen.update({name: tuple(args[0].shape)})

    for name, module in model.backbone.named_modules():
        try:
            norm_spec(module)
        except ValueError:
            continue
        module.register_forward_pre_hook(record(f"backbone.{name}"))
    model.backbone(torch.zeros(2, 3, 64, 96))
    rows = norm_shapes(small, 50, 90, 2)  # rounded up to multiples of 32
    found = {row.layer: row.shape for row in rows if row.layer.startswith("backbone.")}
    assert found == seen and len(seen) > 20


def test_every_family_gets_its_formula(small):
    rows = {row.layer: row for row in norm_shapes(small, 64, 96, 2)}
    assert rows["backbone.bottom_up.res3.0.conv1.norm"].constraints == batch_constraints(128, 2 * 8 * 12)
    stem = rows["backbone.bottom_up.stem.conv1.norm"]
    assert stem.shape == (2, 64, 32, 48)
    assert stem.constraints == group_constraints(64 * 32 * 48, 2, 64, whiten=True)
    assert rows["backbone.fpn_lateral5.norm"].constraints == group_constraints(64 * 6, 2, 32, whiten=False)
    box = rows["roi_heads.box_head.conv1.norm"]
    assert box.shape == (16, 64, 7, 7) and box.constraints == group_constraints(64 * 49, 16, 16, whiten=True)
    assert box.solver_flops == 2 * 16 * 16**3 * 24  # products of five steps: 10 forward, 14 of the tangents
    assert rows["backbone.fpn_lateral5.norm"].solver_flops == 0
    mask = rows["roi_heads.mask_head.mask_fcn1.norm"]
    assert mask.solver_flops == 2 * (256 / 24) * 24**3 * 24
    assert mask.shape[0] == 4  # a quarter of the regions
    assert mask.constraints == batch_constraints(256, mask.shape[0] * 14 * 14, 24)


@pytest.mark.parametrize(
    ("norm", "processes", "images"), [("SyncBN", 4, 8), ("BN", 4, 2), ("BW:sync=true", 4, 8), ("BW", 4, 2)]
)
def test_synchronized_norms_share_the_batch(small, norm, processes, images):
    small.MODEL.FPN.NORM = norm
    row = norm_shapes(small, 64, 64, 2, processes=processes)[0]
    assert row.layer.startswith("backbone.fpn_") and row.constraints.columns == images * 16 * 16


def test_fixed_statistics_put_no_constraints(small):
    small.MODEL.FPN.NORM = "FrozenBN"
    small.MODEL.ROI_MASK_HEAD.NORM = "FrozenBW"
    for row in norm_shapes(small, 64, 64, 2):
        assert (row.constraints is None) == row.spec.startswith("Frozen"), row
    assert {row.spec.partition(":")[0] for row in norm_shapes(small, 64, 64, 2)} >= {"FrozenBN", "FrozenBW"}


def retinanet(cfg):
    cfg.MODEL.META_ARCHITECTURE = "RetinaNet"
    cfg.MODEL.BACKBONE.NAME = "build_gw_retinanet_resnet_fpn_backbone"
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res3", "res4", "res5"]
    cfg.MODEL.FPN.IN_FEATURES = ["res3", "res4", "res5"]
    cfg.MODEL.RETINANET.NORM = "BN"


def cascade(cfg):
    cfg.MODEL.ROI_HEADS.NAME = "CascadeROIHeads"
    cfg.MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG = True


def backbone_to_res4(cfg):
    cfg.MODEL.BACKBONE.NAME = "build_gw_resnet_backbone"
    cfg.MODEL.RESNETS.DEPTH = 50
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 256
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res4"]
    cfg.MODEL.ROI_HEADS.NAME = "Res5ROIHeads"
    cfg.MODEL.ROI_HEADS.IN_FEATURES = ["res4"]
    cfg.MODEL.RPN.IN_FEATURES = ["res4"]
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[32, 64]]


def panoptic(cfg):
    cfg.MODEL.META_ARCHITECTURE = "PanopticFPN"
    cfg.MODEL.SEM_SEG_HEAD.NAME = "GWSemSegFPNHead"
    cfg.MODEL.SEM_SEG_HEAD.NORM = "GW:groups=16"


@pytest.mark.parametrize("change", [retinanet, cascade, backbone_to_res4, panoptic])
def test_every_norm_of_every_detector_is_reached(small, change):
    change(small)
    rows = norm_shapes(small, 128, 128, 2)
    assert rows and [row.layer for row in rows if row.shape is None] == []
    if change is retinanet:  # a head for all levels, whose norms are one for all, or one for each
        assert min(row.shape for row in rows if row.layer.startswith("head.")) == (2, 64, 1, 1)
    if change is panoptic:  # each level from its stride to that of p2
        shapes = {row.layer: row.shape for row in rows}
        assert shapes["sem_seg_head.p2.0.norm"] == shapes["sem_seg_head.p4.2.norm"][:2] + (32, 32)
        assert shapes["sem_seg_head.p4.2.norm"] == (2, 128, 16, 16)
    if change is backbone_to_res4:
        assert {row.shape[0] for row in rows if row.layer.startswith("roi_heads.res5")} == {16}


def test_a_number_that_is_not_positive(small):
    with pytest.raises(ValueError, match=r"images \(0\): too small"):
        norm_shapes(small, 64, 64, 0)
