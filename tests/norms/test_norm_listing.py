from detectron2.layers import FrozenBatchNorm2d
from torch import nn

from gw_detectron.layers import GroupWhitening2d
from gw_detectron.norms.listing import evaluation_spec, norm_rows, norm_summary, norm_table


def test_the_table_lists_every_norm():
    model = nn.ModuleDict(
        {
            "stem": GroupWhitening2d(128),
            "block": nn.Sequential(
                nn.Conv2d(3, 8, 1), FrozenBatchNorm2d(8), nn.GroupNorm(4, 8)
            ),
        }
    )
    model["stem"].requires_grad_(False)
    rows = norm_rows(model)
    assert [
        (row.layer, row.channels, row.groups, row.parameters, row.frozen) for row in rows
    ] == [
        ("stem", 128, 64, 256, True),
        ("block.1", 8, None, 0, True),
        ("block.2", 8, 4, 16, False),
    ]
    assert [row.spec for row in rows] == [
        "GW:groups=64,iters=5,eps=1e-05,solver=newton",
        "FrozenBN",
        "GN:groups=4,eps=1e-05",
    ]
    lines = norm_table(model).splitlines()
    assert lines[0].split() == ["layer", "norm", "channels", "groups", "parameters", "frozen"]
    assert lines[2].split() == ["stem", rows[0].spec, "128", "64", "256", "yes"]
    assert (
        norm_summary(model)
        == "1 GW:groups=64,iters=5,eps=1e-05,solver=newton, 1 FrozenBN, 1 GN:groups=4,eps=1e-05"
    )
    assert norm_summary(nn.Conv2d(3, 8, 1)) == "none"


def test_frozen_and_synchronized_statistics_are_equal_in_evaluation():
    assert {
        evaluation_spec(name)
        for name in ("BN", "SyncBN", "FrozenBN", "nnSyncBN", "naiveSyncBN_N")
    } == {"BN:"}
    full = "channels=8,eps=1e-05,solver=zca,running=matrix"
    assert evaluation_spec(f"BW:{full},momentum=0.1,sync=true") == evaluation_spec(
        f"FrozenBW:{full},momentum=0.3"
    )
    assert evaluation_spec("GW:groups=8") != evaluation_spec("GW:groups=4")
