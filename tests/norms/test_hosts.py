"""Models of other libraries: conversion and one training step, as docs/your_model.md shows them.

Each test runs where its library is installed. Weights are random: nothing is downloaded.
"""

import copy

import pytest
import torch
from torch import nn

from gw_detectron import GroupWhitening2d, convert_norms
from gw_detectron.layers import MixedWhitening2d


def require(module):
    """Import a module of a library, or skip the test without it."""
    library = module.partition(".")[0]
    return pytest.importorskip(module, reason=f"{library} is not installed")


def whitening_layers(model):
    return [layer for layer in model.modules() if isinstance(layer, GroupWhitening2d)]


def assert_trains(model, loss):
    """Check that the loss depends on every whitening layer, and reaches the first one."""
    loss.backward()

    assert loss.isfinite()
    layers = whitening_layers(model)
    assert all(layer.weight.grad.isfinite().all() for layer in layers)
    assert layers[0].weight.grad.any()


TARGET = {
    "class_labels": torch.tensor([1]),
    "boxes": torch.tensor([[0.5, 0.5, 0.3, 0.3]]),
}
SMALL = {"encoder_layers": 1, "decoder_layers": 2, "num_queries": 10}
R18 = {
    "depths": [2, 2, 2, 2],
    "layer_type": "basic",
    "hidden_sizes": [64, 128, 256, 512],
}


def rt_detr(freeze=False):
    transformers = require("transformers")
    backbone = transformers.RTDetrResNetConfig(
        **R18, out_features=["stage2", "stage3", "stage4"]
    )
    config = transformers.RTDetrConfig(
        **SMALL,
        backbone_config=backbone,
        encoder_in_channels=[128, 256, 512],
        freeze_backbone_batch_norms=freeze,
    )
    return transformers.RTDetrForObjectDetection(config)


def d_fine(freeze=False):
    transformers = require("transformers")
    config = transformers.DFineConfig(**SMALL, freeze_backbone_batch_norms=freeze)
    return transformers.DFineForObjectDetection(config)


def detr(freeze=True):
    transformers = require("transformers")
    backbone = transformers.ResNetConfig(**R18, out_features=["stage4"])
    config = transformers.DetrConfig(**SMALL, backbone_config=backbone)
    return transformers.DetrForObjectDetection(config)


@pytest.mark.parametrize(
    ("build", "plan", "count"),
    [
        # a deep stem of three norms, and the second norms of eight blocks
        (rt_detr, {"S1-B2": "GW"}, 11),
        (detr, {"S1-B2": "GW"}, 9),
        # 16 to 96 channels
        (d_fine, {"model.backbone.*": "GW:groups=16"}, 80),
    ],
)
def test_transformers_detectors_train(build, plan, count):
    """Tried with transformers 5.24.0."""
    torch.manual_seed(0)
    model = build().train()

    convert_norms(model, plan)
    output = model(pixel_values=torch.rand(1, 3, 64, 64), labels=[TARGET])

    assert len(whitening_layers(model)) == count
    assert_trains(model, output.loss)


@pytest.mark.parametrize("build", [rt_detr, detr, d_fine])
@pytest.mark.parametrize("freeze", [False, True])
def test_bn_weights_of_transformers_are_the_start_of_mixed_norms(build, freeze):
    """Tried with transformers 5.24.0."""
    torch.manual_seed(0)
    model = build(freeze).eval()
    for name, tensor in model.model.backbone.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            tensor.uniform_(0.5, 1.5)
    mixed = copy.deepcopy(model)

    convert_norms(mixed, {"model.backbone.*": "MixGW:groups=16,alpha=0,mean=0"})

    layers = [type(layer) for layer in mixed.modules()]
    assert MixedWhitening2d in layers
    images = torch.rand(1, 3, 64, 64)
    mask = torch.ones(1, 64, 64, dtype=torch.long)
    expected = model.model.backbone(images, mask)[-1]
    found = mixed.model.backbone(images, mask)[-1]
    for a, b in zip(*map(feature_maps, (found, expected)), strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)


def feature_maps(features):
    """Return the tensors of a backbone's (map, mask) pair or pairs."""
    pairs = features if isinstance(features, list) else [features]
    return [pair[0] for pair in pairs]


def test_the_projector_of_rf_detr_trains():
    """Tried with rfdetr 1.11.2: its LayerNorm has the channels first."""
    projector = require("rfdetr.models.backbone.projector")
    torch.manual_seed(0)
    model = projector.MultiScaleProjector([64, 64], 64, [1.0], 1, layer_norm=True)

    convert_norms(model, {"*": "GW:groups=16"})
    (features,) = model([torch.rand(1, 64, 8, 8), torch.rand(1, 64, 8, 8)])

    assert len(whitening_layers(model)) == 5
    assert_trains(model, features.square().mean() + features[0, 0].sum())


def test_a_yolo_of_ultralytics_trains_and_is_not_fused():
    """Tried with ultralytics 8.4.190."""
    tasks = require("ultralytics.nn.tasks")
    configs = require("ultralytics.cfg")

    class Model(tasks.DetectionModel):
        def fuse(self, *args, **kwargs):
            return self

    torch.manual_seed(0)
    model = Model("yolo11n.yaml", nc=2, verbose=False)
    model.args = configs.get_cfg()
    boxes = torch.tensor([[0.5, 0.5, 0.3, 0.3]] * 2)
    batch = {
        "img": torch.rand(2, 3, 64, 64),
        "cls": torch.zeros(2, 1),
        "bboxes": boxes,
        "batch_idx": torch.arange(2.0),
    }

    convert_norms(model, {"*": "GW:groups=16"})
    loss, _ = model.train()(batch)
    assert_trains(model, loss.sum())

    predictions = model.eval().fuse()(batch["img"])[0]
    assert len(whitening_layers(model)) == 81
    assert predictions.isfinite().all()


@pytest.mark.parametrize("dimensions", [2, 3])
def test_nnu_net_builds_gw_from_its_plans(dimensions):
    """Tried with nnunetv2 2.8.1 and dynamic_network_architectures 0.4.4."""
    plans = require("nnunetv2.utilities.get_network_from_plans")
    arguments = {
        "n_stages": 2,
        "features_per_stage": [32, 64],
        "conv_op": f"torch.nn.Conv{dimensions}d",
        "kernel_sizes": 3,
        "strides": [1, 2],
        "n_conv_per_stage": 1,
        "n_conv_per_stage_decoder": 1,
        "norm_op": "gw_detectron.GroupWhitening2d",
        "norm_op_kwargs": {"num_groups": 16},
        "nonlin": "torch.nn.LeakyReLU",
    }

    model = plans.get_network_from_plans(
        "dynamic_network_architectures.architectures.unet.PlainConvUNet",
        arguments,
        ["conv_op", "norm_op", "nonlin"],
        1,
        2,
        deep_supervision=False,
    )
    output = model(torch.rand(2, 1, *[16] * dimensions))

    assert len(whitening_layers(model)) == 3
    assert output.shape == (2, 2, *[16] * dimensions)
    assert_trains(model, output.square().mean())


@pytest.mark.parametrize("dimensions", [2, 3])
def test_monai_builds_gw_by_name(dimensions):
    """Tried with monai 1.6.1."""
    factories = require("monai.networks.layers")
    networks = require("monai.networks.nets")
    if "GW" not in factories.Norm.names:
        factories.Norm.add_factory_callable("GW", lambda dim: GroupWhitening2d)

    model = networks.UNet(
        dimensions,
        1,
        2,
        channels=(16, 32, 64),
        strides=(2, 2),
        norm=("GW", {"num_groups": 16}),
    )
    output = model(torch.rand(2, 1, *[16] * dimensions))

    assert len(whitening_layers(model)) == 4
    assert_trains(model, output.square().mean())


def test_the_encoder_of_lerobots_diffusion_policy_trains():
    """Tried with lerobot 0.3.3."""
    types = require("lerobot.configs.types")
    configs = require("lerobot.policies.diffusion.configuration_diffusion")
    models = require("lerobot.policies.diffusion.modeling_diffusion")
    camera = types.PolicyFeature(types.FeatureType.VISUAL, (3, 96, 96))
    config = configs.DiffusionConfig(
        input_features={"observation.image": camera}, use_group_norm=False
    )
    torch.manual_seed(0)
    model = models.DiffusionRgbEncoder(config)

    convert_norms(model.backbone, {"S1-B2": "GW", "*": "GN"})
    output = model.train()(torch.rand(1, 3, 96, 96))

    assert len(whitening_layers(model)) == 9
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
    assert_trains(model, output.square().mean())
