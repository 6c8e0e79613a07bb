# Panoptic FPN, R-50, with Group Whitening at S1-B2 of the backbone, in FPN, box, mask and semantic head.
from detectron2.model_zoo import get_config

from gw_detectron.modeling import GWSemSegFPNHead

from .mask_rcnn_fpn_gw import model

_panoptic = get_config("common/models/panoptic_fpn.py").model
model._target_ = _panoptic._target_
model.sem_seg_head = _panoptic.sem_seg_head
model.sem_seg_head._target_ = GWSemSegFPNHead
model.sem_seg_head.norm = "GW"
