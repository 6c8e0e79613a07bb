"""Correlations before and after a norm, whatever its scale, shift and ReLU."""

import numpy as np
import pytest
import torch
from torch import nn

from gw_detectron.errors import ConfigError, MissingInputError
from gw_detectron.layers import BatchWhitening2d, GroupWhitening2d
from gw_detectron.report import ReportOptions, RunFolder
from gw_detectron.report.layer_views import correlated_rows, correlation, layers_section, normalized

from .fake_run import write_run


def correlated_input(channels=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(channels, channels, generator=generator) @ torch.randn(channels, 400, generator=generator)
    return (mixed + 3).reshape(1, channels, 20, 20).repeat(2, 1, 1, 1)


def with_random_affine(layer):
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    return layer.eval()


@pytest.mark.parametrize(
    "layer", [GroupWhitening2d(16, 8, solver="zca", eps=1e-6), BatchWhitening2d(16, 8, solver="zca", eps=1e-6)]
)
def test_exact_whitening_leaves_no_correlation(layer):
    x = correlated_input()
    if isinstance(layer, BatchWhitening2d):
        layer.momentum = 1.0
        layer.train()(x)  # sets the running statistics
    y = normalized(with_random_affine(layer), x).detach()
    assert np.abs(correlation(correlated_rows(layer, x)) - np.eye(8)).max() > 0.3
    assert np.allclose(correlation(correlated_rows(layer, y)), np.eye(8), atol=0.02)


@pytest.mark.parametrize("layer", [nn.GroupNorm(8, 16), nn.BatchNorm2d(16)])
def test_standardization_keeps_the_correlation(layer):
    x = correlated_input()
    y = normalized(with_random_affine(layer), x).detach()
    before, after = (correlation(correlated_rows(layer, value)) for value in (x, y))
    assert np.allclose(before, after, atol=1e-4) and len(before) == getattr(layer, "num_groups", 16)


def test_correlation_is_numpys_and_zero_for_a_constant():
    rows = torch.randn(5, 50, dtype=torch.float64)
    assert np.allclose(correlation(rows), np.corrcoef(rows.numpy()))
    rows[2] = 4.0
    assert not correlation(rows)[2].any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), weights=True, MODEL__FPN__NORM="GN")


def test_layers_of_all_parts_are_shown(folder):
    names = ("backbone.bottom_up.res2.0.conv1.norm", "backbone.fpn_output2.norm", "roi_heads.box_head.conv1.norm")
    section = layers_section(RunFolder(folder, ReportOptions(layers=names)))
    assert [row["layer"] for row in section.numbers] == list(names)
    assert [row["norm"].partition(":")[0] for row in section.numbers] == ["BN", "GN", "GW"]
    assert [row["rows"] for row in section.numbers] == [64, 32, 16]
    assert section.numbers[2]["after"] < section.numbers[2]["before"]
    assert len(section.all_pictures()) == 6


def test_whitening_layers_of_the_backbone_are_the_default(folder):
    names = [row["layer"] for row in layers_section(RunFolder(folder)).numbers]
    assert len(names) == 3 and all(name.startswith("backbone.bottom_up.") for name in names)


def test_an_unknown_layer_is_an_error_with_similar_names(folder):
    with pytest.raises(ConfigError, match=r"Similar: backbone\.bottom_up\.stem\.conv1\.norm"):
        layers_section(RunFolder(folder, ReportOptions(layers=("backbone.bottom_up.stem.conv1",))))


def test_a_damaged_image_is_a_missing_input(tmp_path):
    run = RunFolder(write_run(tmp_path, weights=True))
    with open(run.records[0]["file_name"], "wb") as file:
        file.write(b"no image")
    with pytest.raises(MissingInputError, match="cannot be used: .* Fix: repair the image"):
        layers_section(run)
