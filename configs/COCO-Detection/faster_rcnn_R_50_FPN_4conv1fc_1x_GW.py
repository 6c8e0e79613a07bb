# The LazyConfig of faster_rcnn_R_50_FPN_4conv1fc_1x_GW.yaml: the same model, images and solver.
import torch
from detectron2.config import LazyCall as L
from detectron2.model_zoo import get_config
from detectron2.solver import WarmupParamScheduler
from fvcore.common.param_scheduler import MultiStepParamScheduler

from gw_detectron.workbench.run.optimizer import get_default_optimizer_params

from ..common.models.mask_rcnn_fpn_gw import model

for _key in ("mask_in_features", "mask_pooler", "mask_head"):
    model.roi_heads.pop(_key)
model.proposal_generator.anchor_boundary_thresh = 0
model.proposal_generator.smooth_l1_beta = 1 / 9
model.roi_heads.box_predictor.smooth_l1_beta = 1.0
model.roi_heads.box_pooler.pooler_type = "ROIAlign"
model.roi_heads.box_pooler.sampling_ratio = 2

dataloader = get_config("common/data/coco.py").dataloader
dataloader.train.mapper.augmentations[0].short_edge_length = [800]
dataloader.train.mapper.image_format = "RGB"
dataloader.train.mapper.use_instance_mask = False

train = get_config("common/train.py").train
train.init_checkpoint = "gw://imagenet/R-50"
train.max_iter = 90000

optimizer = L(torch.optim.SGD)(
    params=L(get_default_optimizer_params)(
        base_lr="${..lr}",
        weight_decay_norm=1e-4,
        weight_decay_bias=0.0,
        bias_lr_factor=2.0,
    ),
    lr=0.02,
    momentum=0.9,
    weight_decay=1e-4,
)
lr_multiplier = L(WarmupParamScheduler)(
    scheduler=L(MultiStepParamScheduler)(
        values=[1.0, 0.1, 0.01], milestones=[60000, 80000], num_updates=90000
    ),
    warmup_length=500 / 90000,
    warmup_factor=1 / 3,
    warmup_method="linear",
)
