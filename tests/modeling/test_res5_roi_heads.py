"""C4 detectors: res5 in the head has the norms of the backbone, and takes the weights of a whole ResNet."""

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_model
from detectron2.modeling.roi_heads import build_roi_heads

from gw_detectron.config import changed_config
from gw_detectron.errors import WeightsError
from gw_detectron.modeling import build_gw_resnet_backbone
from gw_detectron.norms.listing import norm_rows
from gw_detectron.weights import load_checkpoint, open_checkpoint


@pytest.fixture
def c4(cfg):
    """A C4 Faster R-CNN on a ResNet-50 of few channels."""
    changes = {
        "MODEL.MASK_ON": False,
        "MODEL.BACKBONE.NAME": "build_gw_resnet_backbone",
        "MODEL.RESNETS.NORM": "FrozenBN",
        "MODEL.RESNETS.OUT_FEATURES": ["res4"],
        "MODEL.RESNETS.STEM_OUT_CHANNELS": 16,
        "MODEL.RESNETS.RES2_OUT_CHANNELS": 32,
        "MODEL.RESNETS.WIDTH_PER_GROUP": 8,
        "MODEL.RPN.IN_FEATURES": ["res4"],
        "MODEL.ROI_HEADS.IN_FEATURES": ["res4"],
        "MODEL.ROI_HEADS.NAME": "GWRes5ROIHeads",
        "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 14,
        "MODEL.ANCHOR_GENERATOR.SIZES": [[16, 32]],
    }
    return changed_config(cfg, changes)


def heads(cfg):
    shape = ShapeSpec(channels=4 * 32, stride=16)
    return build_roi_heads(cfg, {"res4": shape})


@pytest.fixture
def whole_resnet(c4, tmp_path):
    """The weights of all stages, as a converted classifier has them, and their file."""
    cfg = changed_config(c4, {"MODEL.RESNETS.OUT_FEATURES": ["res5"]})
    resnet = build_gw_resnet_backbone(cfg, ShapeSpec(channels=3))
    state = resnet.state_dict()
    for name, value in state.items():
        state[name] = torch.rand_like(value)
    file = tmp_path / "whole.pth"
    torch.save({"model": state, "matching_heuristics": True}, file)
    return state, str(file)


def test_without_whitening_it_is_the_stock_head(c4):
    c4.MODEL.RESNETS.WHITEN_POSITIONS = ""
    ours = heads(c4)
    c4.MODEL.ROI_HEADS.NAME = "Res5ROIHeads"
    stock = heads(c4)
    ours.load_state_dict(stock.state_dict())
    regions = torch.randn(2, 128, 14, 14)

    output = ours.res5(regions)

    expected = stock.res5(regions)
    norms = [row.spec for row in norm_rows(ours)]
    assert norms == [row.spec for row in norm_rows(stock)]
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("positions", "whitened"), [("S1", 0), ("S1-B2", 3), ("S1-B12", 6), ("ALL", 10)]
)
def test_res5_has_the_norms_of_the_positions(c4, positions, whitened):
    c4.MODEL.RESNETS.WHITEN_POSITIONS = positions

    rows = norm_rows(heads(c4).res5)

    assert len(rows) == 10
    assert sum(row.spec.startswith("GW") for row in rows) == whitened


def test_the_weights_of_a_resnet_load_completely(c4, whole_resnet):
    state, file = whole_resnet
    model = build_model(c4)

    report = load_checkpoint(model, open_checkpoint(file))

    loaded = model.state_dict()
    assert not report.missing
    for name, value in state.items():
        part = "roi_heads" if name.startswith("res5.") else "backbone"
        assert torch.equal(loaded[f"{part}.{name}"], value)


def test_the_stock_head_does_not_take_whitening_weights_silently(c4, whole_resnet):
    _, file = whole_resnet
    c4.MODEL.ROI_HEADS.NAME = "Res5ROIHeads"
    model = build_model(c4)

    with pytest.raises(WeightsError, match=r"roi_heads.res5.0.conv2.norm.running_mean"):
        load_checkpoint(model, open_checkpoint(file))


def test_res5_may_be_deformable(c4):
    c4.MODEL.RESNETS.DEFORM_ON_PER_STAGE = [False, False, False, True]
    regions = torch.randn(2, 128, 14, 14)

    output = heads(c4).res5(regions)

    assert output.isfinite().all()
