# Detectron2's new_baselines/mask_rcnn_R_50_FPN_50ep_LSJ.py with Group Whitening in place of synchronized BN.
from .mask_rcnn_R_50_FPN_100ep_LSJ_GW import (  # noqa: F401
    dataloader,
    lr_multiplier,
    model,
    optimizer,
    train,
)

train.max_iter //= 2  # 100 -> 50 epochs
lr_multiplier.scheduler.milestones = [
    milestone // 2 for milestone in lr_multiplier.scheduler.milestones
]
lr_multiplier.scheduler.num_updates = train.max_iter
