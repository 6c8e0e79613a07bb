import pytest
import torch
from detectron2.modeling import build_backbone, build_model

from gw_detectron.errors import NormError
from gw_detectron.norms.listing import norm_rows


def specs(model):
    return [row.spec for row in norm_rows(model)]


@pytest.mark.parametrize(
    "norm",
    ["GW:groups=32,iters=5,eps=1e-05,solver=newton", "GN:groups=16,eps=1e-05", ""],
)
def test_fpn_takes_any_norm(resnet18, norm):
    resnet18.MODEL.FPN.NORM = norm

    backbone = build_backbone(resnet18)
    features = backbone(torch.randn(1, 3, 64, 64))

    for level in range(2, 6):
        for kind in ("lateral", "output"):
            conv = backbone.get_submodule(f"fpn_{kind}{level}")
            assert specs(conv) == ([norm] if norm else [])
            assert (conv.bias is None) == bool(norm)
    for level in range(2, 7):
        side = 64 // 2**level
        assert features[f"p{level}"].shape == (1, 256, side, side)


@pytest.mark.parametrize(
    "key", ["FPN", "ROI_BOX_HEAD", "ROI_MASK_HEAD", "SEM_SEG_HEAD"]
)
def test_a_norm_that_does_not_fit_names_the_key(cfg, key):
    if key == "SEM_SEG_HEAD":
        cfg.MODEL.META_ARCHITECTURE = "PanopticFPN"
        cfg.MODEL.SEM_SEG_HEAD.NAME = "GWSemSegFPNHead"
    cfg.MODEL[key].NORM = "GW:groups=96"

    with pytest.raises(NormError, match=rf"MODEL.{key}.NORM \('GW:groups=96'\): "):
        build_model(cfg)


def test_cascade_heads_take_the_norm_too(resnet18):
    resnet18.MODEL.ROI_HEADS.NAME = "CascadeROIHeads"
    resnet18.MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG = True
    resnet18.MODEL.ROI_BOX_HEAD.NORM = "GW"

    heads = build_model(resnet18).roi_heads

    (spec,) = set(specs(heads.box_head))
    assert spec.startswith("GW")
    assert len(specs(heads.box_head)) == 3 * 4
