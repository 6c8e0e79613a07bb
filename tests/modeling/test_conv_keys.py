"""``CONV: "WS"`` in backbone, FPN and heads, in a run and in exports."""

import functools
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from detectron2.layers import DeformConv
from detectron2.modeling import build_model
from detectron2.modeling.backbone.resnet import DeformBottleneckBlock
from torch import nn

from gw_detectron.errors import ConfigError, PreflightError
from gw_detectron.layers.weight_standardization import standardize_weight, standardize_weights
from gw_detectron.model_zoo import get_config
from gw_detectron.modeling.resnet import set_norms
from gw_detectron.norms import conv_names
from gw_detectron.weights import Checkpoint, norm_differences
from gw_detectron.weights.identifying import NetworkRecord, norm_record
from gw_detectron.workbench.run import main

from ..test_configs import tiny
from ..tiny_run import arguments

PARTS = {
    "RESNETS": r"stem|res\d",
    "FPN": r"fpn_",
    "ROI_BOX_HEAD": r"box_head",
    "ROI_MASK_HEAD": r"mask_head",
}


def parts(model: nn.Module) -> Counter:
    return Counter(
        key
        for name in conv_names(model)
        for key, part in PARTS.items()
        if re.search(part, name)
    )


@functools.cache
def detector(*keys: str) -> nn.Module:
    """A detector on ResNet-18 with GN everywhere, and WS in the parts of these keys."""
    cfg = get_config("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_4conv1fc_1x_GN.yaml")
    cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 18, 64
    for key in keys:
        cfg.MODEL[key].CONV = "WS"
    torch.manual_seed(0)
    return build_model(tiny(cfg))


COUNTS = {"RESNETS": 20, "FPN": 8, "ROI_BOX_HEAD": 4, "ROI_MASK_HEAD": 4}


@pytest.mark.parametrize("key", PARTS)
def test_each_key_standardizes_the_convolutions_before_a_norm_of_its_part(key):
    model, plain = detector(key), detector()
    assert parts(model) == {key: COUNTS[key]} and not conv_names(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(
        torch.equal(value, plain.state_dict()[name])
        for name, value in model.state_dict().items()
    )


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        ("GN_WS", {"RESNETS": 53, "FPN": 8, "ROI_BOX_HEAD": 4}),
        ("GW_WS", {"RESNETS": 53, "FPN": 8, "ROI_BOX_HEAD": 4}),
        ("GN64_S1-B2", {}),
    ],
)
def test_configs(config, counts):
    cfg = get_config(f"Misc/faster_rcnn_R_50_FPN_4conv1fc_1x_{config}.yaml")
    cfg.MODEL.DEVICE = "meta"
    with torch.device("meta"):
        model = build_model(cfg)
    assert parts(model) == counts
    groups = Counter(m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm))
    assert groups == {"GN_WS": {32: 65}, "GW_WS": {}, "GN64_S1-B2": {64: 17, 32: 12}}[config]


def test_frozen_stages_stay_standardized_and_frozen(cfg):
    cfg.MODEL.RESNETS.CONV, cfg.MODEL.RESNETS.NORM, cfg.MODEL.BACKBONE.FREEZE_AT = "WS", "GN", 2
    cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 18, 64
    resnet = build_model(cfg).backbone.bottom_up
    for name in ("stem", "res2", "res3"):
        part = getattr(resnet, name)
        assert conv_names(part) and any(p.requires_grad for p in part.parameters()) == (
            name == "res3"
        )
        assert all(
            part.get_submodule(conv).weight.requires_grad == (name == "res3")
            for conv in conv_names(part)
        )


def test_offsets_of_deformable_blocks_stay_plain():
    block = set_norms(DeformBottleneckBlock(8, 16, bottleneck_channels=8, norm="BN"), "BN")
    assert isinstance(block.conv2, DeformConv)
    assert standardize_weights(block) == ["shortcut", "conv1", "conv2", "conv3"]
    weight = block.state_dict()["conv2.weight"]
    torch.testing.assert_close(block.conv2.weight, standardize_weight(weight))


@pytest.mark.parametrize(
    ("value", "message"),
    [("WS", "no convolution before a norm"), ("ws", "unknown convolution.*'WS'")],
)
def test_a_wrong_key_is_refused(cfg, value, message):
    cfg.MODEL.FPN.CONV = value
    with pytest.raises(ConfigError, match=rf"MODEL.FPN.CONV \('{value}'\): {message}"):
        build_model(cfg)


def test_checkpoints_record_it():
    """Raw weights and those that are standardized look alike."""
    model = detector("FPN")
    saved = Checkpoint("", "", model.state_dict(), {}, NetworkRecord(norm_record(model)))
    assert not norm_differences(saved, detector("FPN"))
    assert not norm_differences(replace(saved, record=NetworkRecord()), detector("FPN")), (
        "a checkpoint without a record"
    )
    differences = norm_differences(saved, detector())
    assert len(differences) == 8 and differences[0].endswith(
        "fpn_lateral2 WS in the checkpoint only"
    )
    differences = norm_differences(saved, detector("FPN", "ROI_BOX_HEAD"))
    assert len(differences) == 4 and differences[0].endswith("box_head.conv1 WS here only")


@pytest.mark.usefixtures("small_dataset")
def test_a_run_and_its_continuation(tmp_path):
    options = {f"MODEL__{part}__CONV": "WS" for part in PARTS} | {
        "SOLVER__MAX_ITER": 2,
        "SOLVER__STEPS": "(1,)",
    }
    main(arguments(tmp_path, DATASETS__TEST="()", **options))
    options["SOLVER__MAX_ITER"] = 3
    results = main(arguments(tmp_path, "--resume", **options))
    assert {"bbox", "segm"} <= results.keys()
    with pytest.raises(PreflightError, match=r"fpn_lateral2 WS in the checkpoint only"):
        main(
            arguments(
                tmp_path,
                "--resume",
                **options | {"MODEL__FPN__CONV": '""', "SOLVER__MAX_ITER": 4},
            )
        )
