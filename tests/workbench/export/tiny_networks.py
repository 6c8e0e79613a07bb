"""Small backbones and detectors with random weights."""

import pytest
import torch
from detectron2.modeling import FPN, GeneralizedRCNN, ResNet, build_model
from detectron2.modeling.backbone import Backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from detectron2.modeling.backbone.resnet import BasicBlock, BasicStem
from torch import Tensor, nn

from gw_detectron import resolve_norm
from gw_detectron.config import read_config
from gw_detectron.modeling.resnet import set_norms
from gw_detectron.workbench.export.formats import open_onnx, open_pt2

needs_export = pytest.mark.skipif(
    torch.__version__ < torch.torch_version.TorchVersion("2.13"),
    reason="torch.export excludes image sizes before 2.13",
)
CONFIGS = {
    "mask": "quick_schedules/mask_rcnn_R_18_FPN_BN_GW_demo.yaml",
    "retinanet": "quick_schedules/retinanet_R_18_FPN_GW_instant.yaml",
}
SMALL = {
    "MODEL.BACKBONE.NAME": "build_gw_resnet_fpn_backbone",
    "MODEL.RESNETS.OUT_FEATURES": ["res2", "res3", "res4", "res5"],
    "MODEL.FPN.IN_FEATURES": ["res2", "res3", "res4", "res5"],
    "MODEL.FPN.OUT_CHANNELS": 8,
    "MODEL.FPN.NORM": "",
    "MODEL.ANCHOR_GENERATOR.SIZES": [[8], [16], [32]],
    "MODEL.RPN.IN_FEATURES": ["p2", "p3", "p4"],
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 40,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 30,
    "MODEL.ROI_HEADS.IN_FEATURES": ["p2", "p3"],
    "MODEL.ROI_BOX_HEAD.FC_DIM": 16,
    "MODEL.ROI_BOX_HEAD.NUM_CONV": 1,
    "MODEL.ROI_BOX_HEAD.CONV_DIM": 16,
    "MODEL.ROI_BOX_HEAD.NORM": "GW:groups=4,iters=2",
    "MODEL.ROI_MASK_HEAD.NUM_CONV": 1,
    "MODEL.ROI_MASK_HEAD.CONV_DIM": 16,
    "MODEL.ROI_MASK_HEAD.NORM": "GW:groups=4,iters=2",
    "MODEL.RETINANET.IN_FEATURES": ["p2", "p3", "p4"],
    "MODEL.RETINANET.NUM_CONVS": 1,
    "MODEL.RETINANET.TOPK_CANDIDATES_TEST": 50,
    "TEST.DETECTIONS_PER_IMAGE": 12,
}


def tiny_backbone(
    norm: str = "BN",
    whiten: str = "GW:groups=4",
    fpn: str | None = "GW:groups=4",
    num_stages: int = 4,
) -> Backbone:
    """Build a ResNet of one block per stage, whitened at S1-B2, with FPN unless ``fpn`` is None; no weight is zero."""
    generator = torch.Generator().manual_seed(0)
    stem = BasicStem(3, 8, norm="BN")
    stages, channels = [], 8
    for index, stride in enumerate((1, 2, 2, 2)[:num_stages]):
        out = 8 * (index + 1)
        stages.append(
            ResNet.make_stage(
                BasicBlock,
                1,
                stride_per_block=[stride],
                in_channels=channels,
                out_channels=out,
                norm="BN",
            )
        )
        channels = out
    names = ["res2", "res3", "res4", "res5"][:num_stages]
    backbone = set_norms(
        ResNet(stem, stages, out_features=names),
        resolve_norm(norm),
        resolve_norm(whiten),
        positions="S1-B2",
    )
    if fpn is not None:
        top_block = LastLevelMaxPool()
        top_block.in_feature = f"p{num_stages + 1}"
        backbone = FPN(backbone, names, 8, norm=resolve_norm(fpn), top_block=top_block)
    with torch.no_grad():
        for name, value in backbone.state_dict().items():
            if (
                value.dim() == 1 or name.endswith("running_matrix")
            ) and value.is_floating_point():
                low = 0.5 if name.endswith(("weight", "running_var")) else -0.5
                value.uniform_(low, 1.5, generator=generator)
    return backbone


def detector_config(kind: str, **changes: object):
    """A config of few layers; in the names of ``changes``, "__" stands for a dot."""
    cfg = read_config(CONFIGS[kind])
    options = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    cfg.merge_from_list([word for pair in options.items() for word in pair])
    return cfg


def build_detector(
    kind: str, whiten: str = "BN", fpn: str = "", **changes: object
) -> nn.Module:
    """Build a detector on two stages, p2 to p4, that finds many objects of clearly different scores."""
    torch.manual_seed(0)
    model = build_model(detector_config(kind, **changes)).eval()
    model.backbone = tiny_backbone("BN", whiten, fpn, num_stages=2).eval()
    with torch.no_grad():
        if isinstance(model, GeneralizedRCNN):
            model.proposal_generator.rpn_head.objectness_logits.weight.normal_(0, 0.5)
            model.proposal_generator.rpn_head.anchor_deltas.weight.normal_(0, 0.05)
            model.roi_heads.box_predictor.cls_score.weight.normal_(0, 2)
            model.roi_heads.box_predictor.bbox_pred.weight.normal_(0, 0.5)
        else:
            model.head.cls_score.weight.normal_(0, 0.1)
            model.head.cls_score.bias.zero_()
            model.head.bbox_pred.weight.normal_(0, 0.1)
    return model


def noise(*sizes: tuple[int, int]) -> list[Tensor]:
    """Random images of several heights and widths."""
    generator = torch.Generator().manual_seed(1)
    return [255 * torch.rand(3, *size, generator=generator) for size in sizes]


def padded(images: list[Tensor], value: float = 99.0) -> tuple[Tensor, Tensor]:
    """Images in the upper left corners of one tensor, and their sizes."""
    sizes = torch.tensor([image.shape[1:] for image in images])
    batch = torch.full((len(images), 3, *sizes.amax(0).tolist()), value)
    for row, image in zip(batch, images, strict=True):
        row[:, : image.shape[1], : image.shape[2]] = image
    return batch, sizes


def eager(model: nn.Module, images: list[Tensor]) -> list[dict[str, Tensor]]:
    """Detectron2's own results: boxes, scores, classes and masks of each image."""
    inputs = [{"image": image} for image in images]
    with torch.no_grad():
        if isinstance(model, GeneralizedRCNN):
            results = model.inference(inputs, do_postprocess=False)
            results = [result[result.pred_boxes.nonempty()] for result in results]
        else:
            results = [result["instances"] for result in model(inputs)]
    return [
        {
            "boxes": result.pred_boxes.tensor,
            "scores": result.scores,
            "classes": result.pred_classes,
            **({"masks": result.pred_masks[:, 0]} if result.has("pred_masks") else {}),
        }
        for result in results
    ]


def open_exported(path):
    """Open a file of either format."""
    return open_onnx(path) if path.suffix == ".onnx" else open_pt2(path)
