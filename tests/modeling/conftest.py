import pytest
from detectron2.config import CfgNode

from gw_detectron.config import changed_config, read_config

CHANGES = {
    "MODEL.DEVICE": "cpu",
    "MODEL.WEIGHTS": "",
    "MODEL.BACKBONE.FREEZE_AT": 0,
    "MODEL.RESNETS.NORM": "BN",
    "MODEL.FPN.NORM": "",
    "MODEL.ROI_BOX_HEAD.NORM": "",
    "MODEL.ROI_MASK_HEAD.NORM": "",
}
RESNET18 = {"MODEL.RESNETS.DEPTH": 18, "MODEL.RESNETS.RES2_OUT_CHANNELS": 64}


@pytest.fixture
def cfg() -> CfgNode:
    """A ResNet-50 FPN Mask R-CNN of this package with no weights, nothing frozen, on the CPU."""
    cfg = read_config(
        "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_4conv1fc_1x_GW.yaml"
    )
    return changed_config(cfg, CHANGES)


@pytest.fixture
def resnet18(cfg) -> CfgNode:
    """The same detector on a ResNet-18."""
    return changed_config(cfg, RESNET18)
