# RetinaNet, R-50 FPN, with Group Whitening at S1-B2 of the backbone, in FPN and head.
from detectron2.model_zoo import get_config

from gw_detectron.modeling import GWFPN, GWRetinaNetHead

from .mask_rcnn_fpn_gw import model as _mask_rcnn

model = get_config("common/models/retinanet.py").model
model.backbone._target_ = GWFPN
model.backbone.norm = "GW"
model.backbone.bottom_up = _mask_rcnn.backbone.bottom_up
model.backbone.bottom_up.out_features = ["res3", "res4", "res5"]
model.head._target_ = GWRetinaNetHead
model.head.norm = "GW"
model.pixel_mean, model.pixel_std = _mask_rcnn.pixel_mean, _mask_rcnn.pixel_std
model.input_format = "RGB"
