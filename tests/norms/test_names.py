import contextlib

import pytest
from detectron2.layers import batch_norm, get_norm
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gw_detectron.errors import NormError
from gw_detectron.layers import (
    SOLVERS,
    BatchWhitening2d,
    FrozenBatchWhitening2d,
    GroupWhitening2d,
)
from gw_detectron.norms import names as norm
from gw_detectron.norms.names import build_norm, norm_spec, resolve_norm
from gw_detectron.ops.solvers import DEFAULT_SOLVER, Solver


@pytest.mark.parametrize(
    "name", ["BN", "SyncBN", "FrozenBN", "naiveSyncBN", "naiveSyncBN_N"]
)
def test_detectron2_names_are_returned_unchanged(name):
    assert resolve_norm(name) is name
    assert norm_spec(get_norm(name, 8)) == name


def test_layer_norm_is_there_if_detectron2_has_it():
    if hasattr(batch_norm, "LayerNorm"):
        assert resolve_norm("LN") == "LN"
        assert norm_spec(get_norm("LN", 8)) == "LN"
    else:
        with pytest.raises(NormError, match=r"\('LN'\): not in this Detectron2"):
            resolve_norm("LN")


def test_one_line_registers_a_norm(monkeypatch):
    """As CONTRIBUTING.md describes."""

    class RMSNorm2d(nn.Module):
        def __init__(self, num_channels, eps=1e-5):
            super().__init__()
            self.num_channels = num_channels
            self.eps = eps

    monkeypatch.setitem(norm._NORMS, "RMS", (RMSNorm2d, norm._EPS))

    layer = resolve_norm("RMS:eps=0.5")(8)

    assert isinstance(layer, RMSNorm2d)
    assert norm_spec(layer) == "RMS:eps=0.5"
    assert norm_spec(resolve_norm("RMS")(8)) == "RMS:eps=1e-05"


def test_gw_and_bw_alone_are_the_published_settings():
    layer = get_norm(resolve_norm("GW"), 256)
    batch = get_norm(resolve_norm("BW"), 256)

    assert type(layer) is GroupWhitening2d
    assert type(batch) is BatchWhitening2d
    assert layer.num_groups == batch.channels_per_group == 64
    assert layer.solver == batch.solver == DEFAULT_SOLVER == Solver("newton", 5, 1e-5)
    assert norm_spec(batch).endswith("running=matrix,momentum=0.1")


@given(
    groups=st.sampled_from([1, 2, 8, 64]),
    iters=st.integers(0, 9),
    eps=st.sampled_from([0.0, 1e-7, 1e-5, 0.25]),
    solver=st.sampled_from(sorted(SOLVERS)),
)
def test_spec_to_layer_to_spec_is_the_identity(groups, iters, eps, solver):
    steps = f"iters={iters}," if solver == "newton" else ""
    spec = f"GW:groups={groups},{steps}eps={eps:g},solver={solver}"

    layer = resolve_norm(spec)(64)

    assert norm_spec(layer) == spec
    _, _, options = spec.partition(":")
    for option in options.split(","):
        assert option in repr(layer)


@pytest.mark.parametrize("name", ["BW", "FrozenBW"])
@given(
    options=st.fixed_dictionaries(
        {
            "channels": st.sampled_from([1, 5, 16]),
            "eps": st.sampled_from(["0", "1e-07", "1e-05"]),
            "solver": st.sampled_from(
                ["newton,iters=3", *sorted(set(SOLVERS) - {"newton", "zca_max"})]
            ),
            "running": st.sampled_from(["matrix", "covariance"]),
            "momentum": st.sampled_from(["0", "0.01", "0.1", "1"]),
        },
        optional={
            "corr": st.just("true"),
            "sync": st.just("true"),
            "rotation": st.just("cayley"),
        },
    )
)
def test_the_same_for_batch_whitening(name, options):
    texts = [f"{key}={value}" for key, value in options.items()]
    given_options = ",".join(texts)
    layer = resolve_norm(f"{name}:{given_options}")(16)

    printed = norm_spec(layer)

    again = resolve_norm(printed)(16)
    assert repr(again) == repr(layer)
    kind, _, printed_options = printed.partition(":")
    if kind != "BN":  # which names a special case of BW, tested below
        assert kind == name
        assert set(printed_options.split(",")) == set(given_options.split(","))


def test_a_name_has_all_digits_and_an_unusual_threshold():
    layer = resolve_norm("GW:eps=1.23456789e-5")(64)
    again = resolve_norm(norm_spec(layer))(64)
    assert again.solver == layer.solver

    for threshold in ("", ",threshold=0.5", ",threshold=0", ",threshold=0,corr=true"):
        spec = f"GW:groups=64,eps=1e-05,solver=zca_max{threshold}"
        layer = resolve_norm(spec)(64)
        assert norm_spec(layer) == spec


def test_bn_with_a_rotation_is_batch_whitening_that_standardizes():
    spec = "BN:channels=32,eps=1e-05,momentum=0.3,rotation=cayley"
    layer = resolve_norm("BN:rotation=cayley,momentum=0.3")(32)

    assert norm_spec(layer) == spec
    assert norm_spec(resolve_norm(spec)(32)) == spec
    frozen = norm_spec(FrozenBatchWhitening2d.convert(layer))
    assert frozen.startswith("FrozenBW:")
    assert "solver=standardize" in frozen


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(1, 1, 1), nn.LayerNorm(32), nn.InstanceNorm2d(8)]
)
def test_a_layer_that_no_name_makes_has_no_spec(layer):
    assert norm_spec(layer) is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gw", r"\('gw'\): unknown norm. Similar: GW. Fix: use one of \['BN'.*'GW'"),
        ("GW:group=64", r"no option 'group'. Fix: use \['corr', 'eps', 'groups'"),
        ("GW:groups", "groups='' is not an integer"),
        ("GW:groups=0", "groups.*0"),
        ("GW:eps=nan", "eps.*nan"),
        ("GW:solver=svd", r"'svd'.*\['cholesky', 'newton', 'pca'"),
        ("GW:groups=8,groups=8", "given twice"),
        (
            "GW:solver=zca,iters=3",
            "solver=zca does not read iters. Fix: remove iters, or write solver=newton",
        ),
        (
            "BW:threshold=0.5,solver=zca",
            "solver=zca does not read threshold. .*, or write solver=zca_max",
        ),
        ("BW:rotation=givens", r"'givens'.*'cayley'"),
        ("SyncBN:groups=8", "SyncBN takes no options. Fix: write 'SyncBN'"),
        ("BN:eps=1e-3", "BN takes options only with rotation=cayley"),
        ("GN:groups=-2", r"groups \(-2\)"),
        (5, "not a norm name"),
    ],
)
def test_a_wrong_spec_is_named_with_its_place(spec, message):
    with pytest.raises(NormError, match=message) as caught:
        resolve_norm(spec, where="MODEL.FPN.NORM")(64)
    assert str(caught.value).startswith(f"MODEL.FPN.NORM ({spec!r}): ")


@given(
    st.one_of(
        st.text(),
        st.from_regex(
            r"(GW|BW|FrozenBW|GN|BN)(:[a-z]{0,9}=?[-0-9a-z._]{0,12}(,|\Z)){0,4}",
            fullmatch=True,
        ),
        st.builds(
            "{}:{}={}".format,
            st.sampled_from(["GW", "BW", "FrozenBW", "GN", "BN"]),
            st.sampled_from(
                [
                    "groups",
                    "channels",
                    "iters",
                    "eps",
                    "solver",
                    "threshold",
                    "corr",
                    "momentum",
                    "sync",
                ]
            ),
            st.one_of(st.text(), st.integers().map(str), st.floats().map(str)),
        ),
    )
)
def test_any_string_gives_a_norm_or_a_norm_error(spec):
    with contextlib.suppress(NormError):
        layer = build_norm(spec, 64)
        assert layer is None or isinstance(layer, nn.Module)


@pytest.mark.parametrize("spec", ["GW:groups=48", "GN", "GN:groups=48"])
def test_channels_that_the_groups_do_not_divide(spec):
    with pytest.raises(NormError, match=rf"MODEL.FPN.NORM \('{spec}'\): .*100"):
        build_norm(spec, 100, where="MODEL.FPN.NORM")
