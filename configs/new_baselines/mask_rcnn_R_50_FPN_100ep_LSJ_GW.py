# Detectron2's new_baselines/mask_rcnn_R_50_FPN_100ep_LSJ.py (from scratch, 100 epochs, large-scale jitter) with Group
# Whitening in place of synchronized BN everywhere: no statistics over images or GPUs.
from detectron2.config import LazyCall as L
from detectron2.model_zoo import get_config

from gw_detectron.installation import require_packages
from gw_detectron.modeling import (
    GWFPN,
    GWFastRCNNConvFCHead,
    GWMaskRCNNConvUpsampleHead,
    gw_resnet,
)
from gw_detectron.workbench.run.optimizer import get_default_optimizer_params

require_packages(
    "Large-scale jitter, which crops polygons", "shapely"
)  # else an error at the first batch
_config = get_config("new_baselines/mask_rcnn_R_50_FPN_100ep_LSJ.py")
dataloader, lr_multiplier, model = (
    _config.dataloader,
    _config.lr_multiplier,
    _config.model,
)
optimizer, train = _config.optimizer, _config.train

model.backbone._target_ = GWFPN
model.backbone.norm = "GW"
model.backbone.bottom_up = L(gw_resnet)(
    depth=50,
    positions="ALL",
    whiten_norm="GW",
    stride_in_1x1=True,
    out_features=["res2", "res3", "res4", "res5"],
    freeze_at=0,
)
model.roi_heads.box_head._target_ = GWFastRCNNConvFCHead
model.roi_heads.box_head.conv_norm = "GW"
model.roi_heads.mask_head._target_ = GWMaskRCNNConvUpsampleHead
model.roi_heads.mask_head.conv_norm = "GW"
optimizer.params._target_ = get_default_optimizer_params
