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

from gw_detectron.config import changed_config, read_config
from gw_detectron.errors import ConfigError, PreflightError
from gw_detectron.layers.weight_standardization import (
    standardize_weight,
    standardize_weights,
)
from gw_detectron.modeling import build_checked_model
from gw_detectron.modeling.resnet import set_norms
from gw_detectron.norms import conv_names
from gw_detectron.weights import Checkpoint, norm_differences
from gw_detectron.weights.network_record import NetworkRecord, norm_record
from gw_detectron.workbench.commands.train import run_here as main

from ..test_configs import tiny
from ..tiny_run import arguments
from .conftest import RESNET18

PARTS = {
    "RESNETS": r"stem|res\d",
    "FPN": r"fpn_",
    "ROI_BOX_HEAD": r"box_head",
    "ROI_MASK_HEAD": r"mask_head",
}


def parts(model: nn.Module) -> Counter:
    """Count the standardized convolutions of each part of a detector."""
    counts: Counter = Counter()
    for name in conv_names(model):
        for key, part in PARTS.items():
            if re.search(part, name):
                counts[key] += 1
    return counts


@functools.cache
def detector(*keys: str) -> nn.Module:
    """A detector on ResNet-18 with GN everywhere, and WS in the parts of these keys."""
    cfg = read_config(
        "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_4conv1fc_1x_GN.yaml"
    )
    cfg = changed_config(cfg, RESNET18)
    for key in keys:
        cfg.MODEL[key].CONV = "WS"
    torch.manual_seed(0)
    return build_model(tiny(cfg))


COUNTS = {"RESNETS": 20, "FPN": 8, "ROI_BOX_HEAD": 4, "ROI_MASK_HEAD": 4}


@pytest.mark.parametrize("key", PARTS)
def test_each_key_standardizes_the_convolutions_before_a_norm_of_its_part(key):
    model = detector(key)
    plain = detector()
    state = model.state_dict()

    assert parts(model) == {key: COUNTS[key]}
    assert not conv_names(plain)
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(value, state[name])


@pytest.mark.parametrize(
    ("config", "counts", "groups"),
    [
        ("GN_WS", {"RESNETS": 53, "FPN": 8, "ROI_BOX_HEAD": 4}, {32: 65}),
        ("GW_WS", {"RESNETS": 53, "FPN": 8, "ROI_BOX_HEAD": 4}, {}),
        ("GN64_S1-B2", {}, {64: 17, 32: 12}),
    ],
)
def test_configs(config, counts, groups):
    cfg = read_config(f"Misc/faster_rcnn_R_50_FPN_4conv1fc_1x_{config}.yaml")

    model = build_checked_model(cfg, "meta")

    group_norms = [
        module for module in model.modules() if isinstance(module, nn.GroupNorm)
    ]
    assert parts(model) == counts
    assert Counter(norm.num_groups for norm in group_norms) == groups


def test_frozen_stages_stay_standardized_and_frozen(resnet18):
    resnet18.MODEL.RESNETS.CONV = "WS"
    resnet18.MODEL.RESNETS.NORM = "GN"
    resnet18.MODEL.BACKBONE.FREEZE_AT = 2

    resnet = build_model(resnet18).backbone.bottom_up

    for name, trains in {"stem": False, "res2": False, "res3": True}.items():
        part = resnet.get_submodule(name)
        assert conv_names(part)
        for parameter in part.parameters():
            assert parameter.requires_grad == trains
        for conv in conv_names(part):
            weight = part.get_submodule(conv).weight
            assert weight.requires_grad == trains


def test_offsets_of_deformable_blocks_stay_plain():
    block = DeformBottleneckBlock(8, 16, bottleneck_channels=8, norm="BN")
    set_norms(block, "BN")

    converted = standardize_weights(block)

    conv = block.conv2
    weight = block.state_dict()["conv2.weight"]
    assert converted == ["shortcut", "conv1", "conv2", "conv3"]
    assert isinstance(conv, DeformConv)
    torch.testing.assert_close(conv.weight, standardize_weight(weight))


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
    saved = Checkpoint(
        "", "", model.state_dict(), {}, NetworkRecord(norm_record(model))
    )
    without_record = replace(saved, network=NetworkRecord())
    assert not norm_differences(saved, detector("FPN"))
    assert not norm_differences(without_record, detector("FPN"))

    lacking = norm_differences(saved, detector())
    assert len(lacking) == 8
    assert lacking[0].endswith("fpn_lateral2 WS in the checkpoint only")

    added = norm_differences(saved, detector("FPN", "ROI_BOX_HEAD"))
    assert len(added) == 4
    assert added[0].endswith("box_head.conv1 WS here only")


@pytest.mark.usefixtures("small_dataset")
def test_a_run_and_its_continuation(tmp_path):
    options = {f"MODEL__{part}__CONV": "WS" for part in PARTS}
    options |= {"SOLVER__MAX_ITER": 2, "SOLVER__STEPS": "(1,)"}
    main(arguments(tmp_path, DATASETS__TEST="()", **options))

    options["SOLVER__MAX_ITER"] = 3
    results = main(arguments(tmp_path, "--resume", **options))
    assert {"bbox", "segm"} <= results.keys()

    options |= {"SOLVER__MAX_ITER": 4, "MODEL__FPN__CONV": '""'}
    with pytest.raises(PreflightError, match=r"fpn_lateral2 WS in the checkpoint only"):
        main(arguments(tmp_path, "--resume", **options))
