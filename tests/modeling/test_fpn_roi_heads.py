import pytest
import torch
from detectron2.modeling import build_backbone, build_model

from gw_detectron.errors import NormError
from gw_detectron.norms.listing import norm_rows


def specs(model):
    return [row.spec for row in norm_rows(model)]


@pytest.mark.parametrize(
    "norm", ["GW:groups=32,iters=5,eps=1e-05,solver=newton", "GN:groups=16,eps=1e-05", ""]
)
def test_fpn_takes_any_norm(cfg, norm):
    cfg.MODEL.FPN.NORM = norm
    cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 18, 64
    backbone = build_backbone(cfg)
    fpn_convs = [
        getattr(backbone, f"fpn_{kind}{level}")
        for kind in ("lateral", "output")
        for level in range(2, 6)
    ]
    for conv in fpn_convs:
        assert specs(conv) == ([norm] if norm else [])
        assert (conv.bias is None) == bool(norm)
    features = backbone(torch.randn(1, 3, 64, 64))
    assert {name: tuple(f.shape[1:]) for name, f in features.items()} == {
        f"p{level}": (256, 64 // 2**level, 64 // 2**level) for level in range(2, 7)
    }


@pytest.mark.parametrize("key", ["FPN", "ROI_BOX_HEAD", "ROI_MASK_HEAD", "SEM_SEG_HEAD"])
def test_a_norm_that_does_not_fit_names_the_key(cfg, key):
    if key == "SEM_SEG_HEAD":
        cfg.MODEL.META_ARCHITECTURE, cfg.MODEL.SEM_SEG_HEAD.NAME = (
            "PanopticFPN",
            "GWSemSegFPNHead",
        )
    cfg.MODEL[key].NORM = "GW:groups=96"
    with pytest.raises(NormError, match=rf"MODEL.{key}.NORM \('GW:groups=96'\): "):
        build_model(cfg)


def test_cascade_heads_take_the_norm_too(cfg):
    cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 18, 64
    cfg.MODEL.ROI_HEADS.NAME = "CascadeROIHeads"
    cfg.MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG = True
    cfg.MODEL.ROI_BOX_HEAD.NORM = "GW"
    model = build_model(cfg)
    assert sum(spec.startswith("GW") for spec in specs(model.roi_heads.box_head)) == 3 * 4
