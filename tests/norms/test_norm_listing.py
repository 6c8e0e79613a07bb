import pytest
from detectron2.layers import FrozenBatchNorm2d
from torch import nn

from gw_detectron.layers import GroupWhitening2d
from gw_detectron.norms.listing import (
    evaluation_spec,
    norm_rows,
    norm_summary,
    norm_table,
)


def test_the_table_lists_every_norm():
    block = nn.Sequential(
        nn.Conv2d(3, 8, 1),
        FrozenBatchNorm2d(8),
        nn.GroupNorm(4, 8),
    )
    stem = GroupWhitening2d(128)
    stem.requires_grad_(False)
    model = nn.ModuleDict({"stem": stem, "block": block})

    rows = norm_rows(model)

    whitening = "GW:groups=64,iters=5,eps=1e-05,solver=newton"
    assert rows == [
        ("stem", whitening, 128, 64, 256, True),
        ("block.1", "FrozenBN", 8, None, 0, True),
        ("block.2", "GN:groups=4,eps=1e-05", 8, 4, 16, False),
    ]
    header, _, *lines = norm_table(model).splitlines()
    assert header.split() == [
        "layer",
        "norm",
        "channels",
        "groups",
        "parameters",
        "frozen",
    ]
    assert lines[0].split() == ["stem", whitening, "128", "64", "256", "yes"]
    assert norm_summary(model) == f"1 {whitening}, 1 FrozenBN, 1 GN:groups=4,eps=1e-05"


def test_a_model_without_norms():
    model = nn.Conv2d(3, 8, 1)

    assert norm_rows(model) == []
    assert norm_summary(model) == "none"


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("SyncBN", "BN:"),
        ("FrozenBN", "BN:"),
        ("naiveSyncBN_N", "BN:"),
        ("BRN:momentum=0.01,rmax=3", "BN:"),
        ("FrozenBW:channels=8,momentum=0.3", "BW:channels=8"),
        ("BW:channels=8,momentum=0.1,sync=true", "BW:channels=8"),
        ("GW:groups=8", "GW:groups=8"),
    ],
)
def test_frozen_and_synchronized_statistics_are_equal_in_evaluation(name, spec):
    assert evaluation_spec(name) == spec
