"""Expected contents of the paper's COCO rows, independent of the configs."""

import pytest

DET, SEG, SCRATCH = (
    "COCO-Detection/",
    "COCO-InstanceSegmentation/",
    "COCO-FromScratch/scratch_",
)
R50 = DET + "faster_rcnn_R_50_FPN_"
X101 = SEG + "mask_rcnn_X_101_32x8d_FPN_4conv1fc_1x_"
F, B, G, W = "FrozenBN", "BN", "GN", "GW"

# name -> number of blocks; norms of stem, conv1, conv2, conv3, shortcut; FPN (8 convs), box head (4),
# mask head (4)
LAYOUTS = {
    R50 + "1x_FrozenBN": (16, (F, F, F, F, F), "", "", ""),
    R50 + "1x_GN": (16, (G, G, G, G, G), "", "", ""),
    R50 + "1x_GW": (16, (W, F, W, F, F), "", "", ""),
    R50 + "1x_GW_S1": (16, (W, F, F, F, F), "", "", ""),
    R50 + "1x_GW_S1-B1": (16, (W, W, F, F, F), "", "", ""),
    R50 + "1x_GW_S1-B3": (16, (W, F, F, W, F), "", "", ""),
    R50 + "1x_GW_S1-B12": (16, (W, W, W, F, F), "", "", ""),
    R50 + "4conv1fc_1x_FrozenBN": (16, (F, F, F, F, F), "", "", ""),
    R50 + "4conv1fc_1x_FrozenBN_released": (16, (F, F, F, F, F), "", "", ""),
    R50 + "4conv1fc_1x_GN": (16, (G, G, G, G, G), G, G, ""),
    R50 + "4conv1fc_1x_GN_released": (16, (G, G, G, G, G), G, G, ""),
    R50 + "4conv1fc_1x_GW": (16, (W, F, W, F, F), W, W, ""),
    R50 + "4conv1fc_1x_GW_released": (16, (W, F, W, F, F), G, W, ""),
    DET + "faster_rcnn_R_101_FPN_1x_GW": (33, (W, F, W, F, F), "", "", ""),
    DET + "faster_rcnn_X_50_32x4d_FPN_1x_GW": (16, (W, F, W, F, F), "", "", ""),
    DET + "faster_rcnn_X_101_32x8d_FPN_1x_GW": (33, (W, F, W, F, F), "", "", ""),
    SEG + "mask_rcnn_R_50_FPN_4conv1fc_1x_FrozenBN": (16, (F, F, F, F, F), "", "", ""),
    SEG + "mask_rcnn_R_50_FPN_4conv1fc_1x_GN": (16, (G, G, G, G, G), G, G, G),
    SEG + "mask_rcnn_R_50_FPN_4conv1fc_1x_GW": (16, (W, F, W, F, F), W, W, W),
    X101 + "FrozenBN": (33, (F, F, F, F, F), "", "", ""),
    X101 + "GN": (33, (G, G, G, G, G), G, G, G),
    X101 + "GW": (33, (W, F, W, F, F), W, W, W),
    X101 + "FrozenBN_released": (33, (F, F, F, F, F), "", "", ""),
    X101 + "GN_released": (33, (G, G, G, G, G), G, G, G),
    X101 + "GW_released": (33, (W, F, W, F, F), W, W, W),
    SCRATCH + "faster_rcnn_R_50_FPN_1x_BN": (16, (B, B, B, B, B), "", "", ""),
    SCRATCH + "faster_rcnn_R_50_FPN_1x_BN_GW": (16, (W, B, W, B, B), "", "", ""),
    SCRATCH + "faster_rcnn_R_50_FPN_1x_GN": (16, (G, G, G, G, G), "", "", ""),
    SCRATCH + "faster_rcnn_R_50_FPN_1x_GW": (16, (W, W, W, W, W), "", "", ""),
}
LAYOUTS |= {
    name + "_1gpu": layout
    for name, layout in LAYOUTS.items()
    if name.startswith(SCRATCH)
}

# preprocessing of each kind of weights: INPUT.FORMAT, MODEL.PIXEL_MEAN, MODEL.PIXEL_STD
RGB = ("RGB", [123.675, 116.28, 103.53], [58.395, 57.12, 57.375])
PREPROCESSING = {
    "gw://imagenet/": RGB,
    "weights/": RGB,
    "detectron2://ImageNetPretrained/torchvision/": RGB,
    "catalog://ImageNetPretrained/FAIR/R-50-GN": (
        "BGR",
        [103.53, 116.28, 123.675],
        [1.0, 1.0, 1.0],
    ),
    "catalog://ImageNetPretrained/FAIR/X-101-32x8d": (
        "BGR",
        [102.9801, 115.9465, 122.7717],  # Detectron1's
        [1.0, 1.0, 1.0],
    ),
    "detectron2://ImageNetPretrained/FAIR/X-101-32x8d.pkl": (
        "BGR",
        RGB[1][::-1],
        RGB[2][::-1],
    ),
    "": RGB,  # from scratch
}

# maskrcnn-benchmark's values, in Detectron2's names
RECIPE = {
    "MODEL.RESNETS.STRIDE_IN_1X1": False,
    "MODEL.RPN.BOUNDARY_THRESH": 0,
    "MODEL.RPN.SMOOTH_L1_BETA": pytest.approx(1 / 9),
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN": 2000,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 1000,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 1000,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 1000,
    "MODEL.RPN.BATCH_SIZE_PER_IMAGE": 256,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 512,
    "MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA": 1.0,
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 7,
    "MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO": 2,
    "MODEL.ROI_BOX_HEAD.POOLER_TYPE": "ROIAlign",
    "MODEL.ROI_MASK_HEAD.NUM_CONV": 4,
    "MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION": 14,
    "MODEL.ROI_MASK_HEAD.POOLER_SAMPLING_RATIO": 2,
    "MODEL.ROI_MASK_HEAD.POOLER_TYPE": "ROIAlign",
    "INPUT.MIN_SIZE_TRAIN": (800,),
    "INPUT.MAX_SIZE_TRAIN": 1333,
    "INPUT.MIN_SIZE_TEST": 800,
    "INPUT.MAX_SIZE_TEST": 1333,
    "DATASETS.TRAIN": ("coco_2017_train",),
    "DATASETS.TEST": ("coco_2017_val",),
    "SOLVER.MOMENTUM": 0.9,
    "SOLVER.GAMMA": 0.1,
}
