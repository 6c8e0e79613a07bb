"""Statistics of BN are measured without a change of the network's function, or adapted to other images."""

import pytest
import torch
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from gw_detectron import convert_norms
from gw_detectron.layers import adapt_statistics, match_scales, measure_statistics


def network(norm=nn.BatchNorm2d):
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3), norm(8)]
    model = nn.Sequential(*layers).double().eval()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.2)
    return model


def images(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 12, 12, generator=generator).double() * 3 + 1


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, FrozenBatchNorm2d])
def test_outputs_stay_and_normalized_inputs_have_unit_variance(norm):
    model = network(norm)
    batches = [images(1), images(2)]
    before = model(images(3))
    inputs = torch.cat([model[:4](batch) for batch in batches])

    with torch.no_grad(), measure_statistics(model):
        for batch in batches:
            model(batch)

    torch.testing.assert_close(model(images(3)), before)
    variance, mean = torch.var_mean(inputs, (0, 2, 3), correction=0)
    torch.testing.assert_close(model[4].running_mean, mean.detach())
    torch.testing.assert_close(model[4].running_var, variance.detach())


def test_statistics_in_the_scale_come_back_for_mixing():
    """Multiplied into the scale and measured on the same images, a BN network mixes as it would have."""
    model = network()
    with torch.no_grad(), measure_statistics(model):
        model(images(1))
    folded = network()
    for layer, source in zip(folded, model, strict=True):
        if isinstance(layer, nn.BatchNorm2d):
            std = (source.running_var + source.eps).sqrt()
            layer.weight.data = source.weight.data / std
            layer.bias.data = source.bias - layer.weight.data * source.running_mean
            layer.running_mean.zero_()
            layer.running_var.fill_(1 - layer.eps)

    with torch.no_grad(), measure_statistics(folded):
        folded(images(1))

    for network_ in (model, folded):
        convert_norms(network_, {"*": "MixGW:alpha=0.5,groups=4"})
    torch.testing.assert_close(folded(images(2)), model(images(2)))


@pytest.mark.parametrize("change", [measure_statistics, adapt_statistics])
def test_training_mode_is_refused(change):
    with (
        pytest.raises(ValueError, match="training mode"),
        change(network().train()),
    ):
        pass


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, FrozenBatchNorm2d])
def test_adapted_statistics_are_those_of_bn_in_training(norm):
    batches = [images(1), images(2)]
    expected = network()
    for layer in expected:
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None  # a plain average
    expected.train()
    outputs = [expected(batch) for batch in batches]
    expected.eval()

    model = network(norm)
    with torch.no_grad(), adapt_statistics(model):
        for batch, output in zip(batches, outputs, strict=True):
            torch.testing.assert_close(model(batch), output.detach())

    for name in ("weight", "bias", "running_mean", "running_var"):
        right = getattr(expected[4], name).detach()
        torch.testing.assert_close(getattr(model[4], name), right)
    torch.testing.assert_close(model(images(3)), expected(images(3)))


@pytest.mark.parametrize("fault", ["NaN", "an error of the caller", "not called"])
def test_statistics_stay_if_they_cannot_be_adapted(fault):
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = images(1)
    if fault == "NaN":
        batch[0, 0, 0, 0] = float("nan")

    with (
        pytest.raises((ValueError, KeyError)),
        torch.no_grad(),
        adapt_statistics(model),
    ):
        if fault != "not called":
            model(batch)
        if fault == "an error of the caller":
            raise KeyError

    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_norms_that_mix_already_are_refused():
    model = network()
    convert_norms(model, {"*": "MixGW:alpha=0.5,groups=4"})

    with pytest.raises(ValueError, match="mixes statistics"), measure_statistics(model):
        pass


def test_an_error_of_the_network_changes_nothing():
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    with pytest.raises(RuntimeError), measure_statistics(model):
        model(images(1))
        model(torch.zeros(1, 5, 8, 8).double())

    assert not model[1]._forward_pre_hooks
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_image_that_is_not_finite_changes_nothing(value):
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    broken = images(2)
    broken[0, 0, 0, 0] = value

    with (
        pytest.raises(ValueError, match="1: its input has NaN .* Fix: leave out"),
        torch.no_grad(),
        measure_statistics(model),
    ):
        model(images(1))
        model(broken)

    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_whitening_in_the_place_of_bn_gets_the_size_of_its_output():
    model = network()
    with torch.no_grad(), measure_statistics(model):
        model(images(1))
    gammas = [model[1].weight.clone(), model[4].weight.clone()]
    convert_norms(model, {"*": "GW:groups=4"})

    with torch.no_grad(), match_scales(model):
        model(images(1))
        model(images(2))  # only the first batch counts

    for layer, end, gamma in zip((model[1], model[4]), (2, 5), gammas, strict=True):
        y = model[:end](images(1)) - layer.bias[:, None, None]
        assert (y / gamma[:, None, None]).std().item() == pytest.approx(1, abs=1e-3)
        assert (gamma / layer.weight).std() < 1e-6  # one factor for all channels


@pytest.mark.parametrize(
    ("fit", "norm"), [(measure_statistics, ""), (match_scales, "GW:groups=4")]
)
def test_a_compiled_model_that_ignores_hooks_is_refused(fit, norm):
    model = network()
    if norm:
        convert_norms(model, {"*": norm})
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(images(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    with (
        pytest.raises(ValueError, match="was called. Fix: .*before torch.compile"),
        torch.no_grad(),
        fit(model),
    ):
        compiled(images(1))

    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("value", [0, 5, torch.nan])
def test_scales_are_not_matched_to_a_constant_batch(value):
    model = network()
    convert_norms(model, {"*": "GW"})

    with (
        pytest.raises(ValueError, match="constant or not finite"),
        torch.no_grad(),
        match_scales(model),
    ):
        model(torch.full((2, 3, 12, 12), value).double())

    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not model[1]._forward_pre_hooks
