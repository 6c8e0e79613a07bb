# Mask R-CNN, R-50 FPN, with Group Whitening at S1-B2 of the backbone, in FPN, 4conv1fc box head and mask head.
# It fits the authors' weights: RGB images, stride in the 3x3 convolution.
from detectron2.config import LazyCall as L
from detectron2.model_zoo import get_config

from gw_detectron.modeling import (
    GWFPN,
    GWFastRCNNConvFCHead,
    GWMaskRCNNConvUpsampleHead,
    gw_resnet,
)

model = get_config("common/models/mask_rcnn_fpn.py").model
model.backbone._target_ = GWFPN
model.backbone.norm = "GW"
model.backbone.bottom_up = L(gw_resnet)(
    depth=50,
    positions="S1-B2",
    norm="FrozenBN",
    whiten_norm="GW",
    out_features=["res2", "res3", "res4", "res5"],
    freeze_at=2,
)
model.roi_heads.box_head._target_ = GWFastRCNNConvFCHead
model.roi_heads.box_head.conv_dims = [256, 256, 256, 256]
model.roi_heads.box_head.fc_dims = [1024]
model.roi_heads.box_head.conv_norm = "GW"
model.roi_heads.mask_head._target_ = GWMaskRCNNConvUpsampleHead
model.roi_heads.mask_head.conv_norm = "GW"
model.pixel_mean = [123.675, 116.28, 103.53]
model.pixel_std = [58.395, 57.12, 57.375]
model.input_format = "RGB"
