"""MixGW and MixBN take the weights of BN networks, and refuse statistics that no data have."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from gw_detectron import convert_norms, norm_spec, resolve_norm
from gw_detectron.errors import NormError
from gw_detectron.layers import MixedBatchNorm2d, MixedWhitening2d
from gw_detectron.norms import mix_statistics

NAMES = ["MixGW", "MixBN"]
NETWORKS = {
    "torchvision": torchvision.models.resnet50,
    "timm": lambda: timm.create_model("resnet18"),
}


@torch.no_grad()
def trained(model):
    """Give BN layers any weights and statistics."""
    generator = torch.Generator().manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(generator=generator)
            layer.running_var.uniform_(0.5, 3, generator=generator)
            layer.weight.uniform_(0.5, 1.5, generator=generator)
            layer.bias.normal_(generator=generator)
    return model.eval()


@pytest.mark.filterwarnings("ignore:convert_norms")  # of untrained statistics
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("name", NAMES)
def test_state_of_a_bn_network_loads_strictly_and_gives_its_outputs(make, name):
    bn = trained(make())
    model = make().eval()
    convert_norms(model, {"S1-B2": f"{name}:alpha=0"})
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))

    model.load_state_dict(bn.state_dict())

    with torch.no_grad():
        assert torch.equal(model(x), bn(x))


@pytest.mark.parametrize("name", NAMES)
def test_conversion_keeps_statistics_eps_and_mode(name):
    old = nn.BatchNorm2d(8, eps=1e-3)
    nn.init.uniform_(old.running_var, 1, 2)
    nn.init.normal_(old.running_mean)
    nn.init.normal_(old.weight)
    old.weight.requires_grad_(False)
    model = nn.Sequential(old).eval()

    convert_norms(model, {"*": name})

    new = model[0]
    for key in ("weight", "bias", "running_mean", "running_var"):
        assert torch.equal(getattr(new, key), getattr(old, key))
    assert new.eps == 1e-3
    assert not new.weight.requires_grad
    assert new.bias.requires_grad
    assert not new.training


def test_frozen_bn_becomes_trainable_and_a_given_eps_counts():
    model = nn.Sequential(torchvision.ops.FrozenBatchNorm2d(8, eps=0.0))
    nn.init.uniform_(model[0].running_var, 1, 2)
    nn.init.normal_(model[0].running_mean)

    convert_norms(model, {"*": "MixGW:alpha=0.25,eps=0.001"})

    assert isinstance(model[0], MixedWhitening2d)
    assert model[0].eps == 0.001
    assert model[0].weight.requires_grad


@pytest.mark.parametrize("old", [nn.GroupNorm(4, 8), resolve_norm("GW")(8)])
@pytest.mark.parametrize("name", NAMES)
def test_norms_without_statistics_are_refused(old, name):
    with pytest.raises(NormError, match="has no running statistics"):
        convert_norms(nn.Sequential(old), {"*": name})


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_impossible_variances_are_refused_by_name(name, value):
    bn = nn.BatchNorm2d(8)
    bn.running_var[3] = value
    layer = nn.ModuleDict({"stem": resolve_norm(name)(8)})
    state = {f"stem.{key}": tensor for key, tensor in bn.state_dict().items()}

    with pytest.raises(RuntimeError, match=r"stem\.running_var: negative"):
        layer.load_state_dict(state)
    with pytest.raises(NormError, match="convert_norms, 0 .*negative"):
        convert_norms(nn.Sequential(bn), {"*": name})


@pytest.mark.parametrize("name", NAMES)
def test_channels_that_never_changed_are_named_and_stay_finite(name):
    bn = nn.BatchNorm2d(8)
    nn.init.normal_(bn.running_mean)
    bn.running_var[3] = 0
    layer = nn.ModuleDict({"stem": resolve_norm(name)(8)})
    state = {f"stem.{key}": tensor for key, tensor in bn.state_dict().items()}

    with pytest.warns(UserWarning, match=r"stem\.running_var: 0 in 1 channels"):
        layer.load_state_dict(state)

    y = layer["stem"](torch.randn(2, 8, 5, 5))
    assert y.isfinite().all()


def test_untrained_statistics_are_a_warning():
    for variance in (1.0, 1 - 1e-5):  # Detectron2's of weights without statistics
        model = nn.Sequential(nn.BatchNorm2d(8))
        model[0].running_var.fill_(variance)
        with pytest.warns(UserWarning, match="mean 0 and variance 1"):
            convert_norms(model, {"*": "MixGW"})


def test_names_have_every_option_and_the_mean_follows_alpha():
    full = norm_spec(resolve_norm("MixGW:alpha=0.25,groups=16")(64))
    assert full == "MixGW:alpha=0.25,mean=0.25,groups=16,iters=6,eps=1e-05"
    assert norm_spec(resolve_norm(full)(64)) == full

    full = norm_spec(resolve_norm("MixBN:alpha=0,mean=0.3")(64))
    assert full == "MixBN:alpha=0,mean=0.3,eps=1e-05"


@pytest.mark.parametrize("option", ["alpha=1.5", "mean=-0.1", "alpha=nan", "iters=-1"])
def test_options_out_of_range_are_refused(option):
    with pytest.raises(NormError, match=option.partition("=")[0]):
        resolve_norm(f"MixGW:{option}")(64)


@pytest.mark.parametrize("cls", [MixedWhitening2d, MixedBatchNorm2d])
def test_reset_parameters(cls):
    layer = cls(8)
    for tensor in layer.state_dict().values():
        nn.init.constant_(tensor, 3)

    layer.reset_parameters()

    new = cls(8).state_dict()
    assert all(
        torch.equal(value, new[key]) for key, value in layer.state_dict().items()
    )


@pytest.mark.parametrize("name", NAMES)
def test_train_and_eval_are_one_function_and_statistics_stay(name):
    layer = resolve_norm(name)(8)
    x = torch.randn(2, 8, 6, 6) * 3 + 1
    before = {key: value.clone() for key, value in layer.state_dict().items()}

    y = layer.train()(x)

    assert torch.equal(y, layer.eval()(x))
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("name", [*NAMES, "MixGW:alpha=0,mean=0.3", "MixGW:alpha=0"])
def test_export_and_trace_take_other_sizes_and_need_no_package(name):
    layer = resolve_norm(name)(8).eval()
    x = torch.randn(2, 8, 6, 6)
    other = torch.randn(3, 8, 5, 7)
    sides = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)

    program = torch.export.export(layer, (x,), dynamic_shapes=(sides,))
    traced = torch.jit.trace(layer, x)

    assert "gw_detectron" not in str(program.graph)
    torch.testing.assert_close(program.module()(other), layer(other))
    torch.testing.assert_close(traced(other), layer(other))


@pytest.mark.parametrize("name", [*NAMES, "MixGW:alpha=0"])
@pytest.mark.parametrize("parameters", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("inputs", [torch.bfloat16, torch.float32, torch.float64])
def test_any_dtypes_of_input_and_parameters_work_together(name, parameters, inputs):
    layer = resolve_norm(name)(8).to(parameters)

    y = layer(torch.randn(2, 8, 6, 6, dtype=inputs))

    assert y.dtype == inputs
    assert y.isfinite().all()


def test_an_eps_of_zero_and_a_constant_channel_are_refused():
    bn = nn.BatchNorm2d(8)
    bn.running_var[0] = 0

    with pytest.raises(NormError, match="eps is 0"):
        convert_norms(nn.Sequential(bn), {"*": "MixGW:eps=0"})


def test_eps_of_bn_is_kept_whatever_names_the_norm():
    for norm in ("MixGW", MixedWhitening2d, resolve_norm("MixGW")):
        model = nn.Sequential(nn.BatchNorm2d(8, eps=1e-3))
        nn.init.normal_(model[0].running_mean)
        convert_norms(model, {"*": norm})
        assert model[0].eps == 1e-3


def test_a_number_mixes_mean_and_variance_into_every_bn_layer():
    model = trained(torchvision.models.resnet18())
    bn = sum(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())

    assert mix_statistics(model, "0.3", where="--mix") == bn

    assert norm_spec(model.bn1) == "MixBN:alpha=0.3,mean=0.3,eps=1e-05"


@pytest.mark.parametrize("mixture", ["GW", "1.5", "", "nan", "MixGW:alpha=2", "MixXY"])
def test_mixtures_that_are_none_are_refused(mixture):
    with pytest.raises(NormError):
        mix_statistics(trained(torchvision.models.resnet18()), mixture, where="--mix")


def test_a_network_without_bn_has_nothing_to_mix():
    with pytest.raises(NormError, match="no BN layers"):
        mix_statistics(nn.Sequential(nn.GroupNorm(4, 8)), 0.3, where="--mix")
