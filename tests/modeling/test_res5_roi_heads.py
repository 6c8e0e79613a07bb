"""C4 detectors: res5 in the head has the norms of the backbone, and takes the weights of a whole ResNet."""

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_model
from detectron2.modeling.roi_heads import build_roi_heads

from gw_detectron.errors import WeightsError
from gw_detectron.modeling import build_gw_resnet_backbone
from gw_detectron.norms.listing import norm_rows
from gw_detectron.weights import load_checkpoint, open_checkpoint


@pytest.fixture
def c4(cfg):
    """A C4 Faster R-CNN on a ResNet-50 of few channels."""
    cfg.MODEL.MASK_ON = False
    cfg.MODEL.BACKBONE.NAME = "build_gw_resnet_backbone"
    resnet = cfg.MODEL.RESNETS
    resnet.NORM, resnet.OUT_FEATURES = "FrozenBN", ["res4"]
    resnet.STEM_OUT_CHANNELS, resnet.RES2_OUT_CHANNELS, resnet.WIDTH_PER_GROUP = 16, 32, 8
    cfg.MODEL.RPN.IN_FEATURES = cfg.MODEL.ROI_HEADS.IN_FEATURES = ["res4"]
    cfg.MODEL.ROI_HEADS.NAME = "GWRes5ROIHeads"
    cfg.MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION = 14
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[16, 32]]
    return cfg


def heads(cfg):
    channels = cfg.MODEL.RESNETS.RES2_OUT_CHANNELS * 4
    return build_roi_heads(cfg, {"res4": ShapeSpec(channels=channels, stride=16)})


def whole_resnet(cfg, path):
    """Write the weights of all stages, as a converted classifier has them."""
    cfg = cfg.clone()
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res5"]
    resnet = build_gw_resnet_backbone(cfg, ShapeSpec(channels=3))
    state = {name: torch.rand_like(value) for name, value in resnet.state_dict().items()}
    torch.save({"model": state, "matching_heuristics": True}, path)
    return state


def load(cfg, path):
    model = build_model(cfg)
    return model, load_checkpoint(model, open_checkpoint(str(path)))


def test_without_whitening_it_is_the_stock_head(c4):
    c4.MODEL.RESNETS.WHITEN_POSITIONS = ""
    ours = heads(c4)
    c4.MODEL.ROI_HEADS.NAME = "Res5ROIHeads"
    stock = heads(c4)
    assert [row[:2] for row in norm_rows(ours)] == [row[:2] for row in norm_rows(stock)]
    ours.load_state_dict(stock.state_dict())
    regions = torch.randn(2, 128, 14, 14)
    torch.testing.assert_close(ours.res5(regions), stock.res5(regions), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("positions", "whitened"), [("S1", 0), ("S1-B2", 3), ("S1-B12", 6), ("ALL", 10)]
)
def test_res5_has_the_norms_of_the_positions(c4, positions, whitened):
    c4.MODEL.RESNETS.WHITEN_POSITIONS = positions
    rows = norm_rows(heads(c4).res5)
    assert sum(row.spec.startswith("GW") for row in rows) == whitened
    assert len(rows) == 10


def test_the_weights_of_a_resnet_load_completely(c4, tmp_path):
    state = whole_resnet(c4, tmp_path / "whole.pth")
    model, report = load(c4, tmp_path / "whole.pth")
    assert not report.missing and str(report).startswith(
        f"backbone: {len(state)}/{len(state)} tensors"
    )
    loaded = model.state_dict()
    for name, value in state.items():
        assert torch.equal(
            loaded[f"{'roi_heads' if name.startswith('res5.') else 'backbone'}.{name}"], value
        )


def test_the_stock_head_does_not_take_whitening_weights_silently(c4, tmp_path):
    whole_resnet(c4, tmp_path / "whole.pth")
    c4.MODEL.ROI_HEADS.NAME = "Res5ROIHeads"
    with pytest.raises(
        WeightsError, match=r"Missing: roi_heads.res5.0.conv2.norm.running_mean"
    ):
        load(c4, tmp_path / "whole.pth")


def test_res5_may_be_deformable(c4):
    c4.MODEL.RESNETS.DEFORM_ON_PER_STAGE = [False, False, False, True]
    assert heads(c4).res5(torch.randn(2, 128, 14, 14)).isfinite().all()
