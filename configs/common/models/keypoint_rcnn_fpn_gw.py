# Keypoint R-CNN, R-50 FPN, with Group Whitening at S1-B2 of the backbone, in FPN and 4conv1fc box head.
from detectron2.model_zoo import get_config

from .mask_rcnn_fpn_gw import model as _mask_rcnn

model = get_config("common/models/keypoint_rcnn_fpn.py").model
model.backbone = _mask_rcnn.backbone
model.roi_heads.box_head = _mask_rcnn.roi_heads.box_head
model.pixel_mean, model.pixel_std = _mask_rcnn.pixel_mean, _mask_rcnn.pixel_std
model.input_format = "RGB"
