"""Random configs and norm names: an answer, or an error that names the key."""

import contextlib
import math

import torch
from detectron2.config import CfgNode, get_cfg
from detectron2.layers import get_norm
from hypothesis import example, given
from hypothesis import strategies as st

from gw_detectron import add_gw_config
from gw_detectron.config import read_config
from gw_detectron.errors import NormError, UserError
from gw_detectron.norms.names import find_norm_spec, resolve_norm

from ..tiny_run import CONFIG
from .examples import fuzz


def flat(node: CfgNode, prefix: str = ""):
    for key, value in node.items():
        yield from flat(value, f"{prefix}{key}.") if isinstance(value, CfgNode) else [(f"{prefix}{key}", value)]


DEFAULTS = get_cfg()
add_gw_config(DEFAULTS)
KEYS = sorted(key for key, _ in flat(DEFAULTS) if key != "OUTPUT_DIR")
NUMBERS = st.one_of(
    st.integers(-3, 10),
    st.sampled_from([10**12, 10**400, -(2**63), 64, 128, 1333]),
    st.floats(),
    st.sampled_from([0.5, math.nan, math.inf, 1e300, 1e-300]),
)
WORDS = st.sampled_from(
    ["", "GW", "GN", "relative", "bitmask", "range", "res2", "p2", "tiny_coco", "cuda", "a/b", "\0"]
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.text(max_size=5))
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner), max_leaves=6)


@given(words=st.lists(st.sampled_from([*KEYS, "MODEL", "NO.KEY", ""]) | VALUES.map(str), max_size=6))
@example(words=["MODEL", "3"])
@example(words=["SOLVER.BASE_LR.X", "3"])
@fuzz(40)
def test_words_of_the_command_line(words):
    with contextlib.suppress(UserError):
        assert isinstance(read_config(str(CONFIG), words), CfgNode)


NAMES = st.sampled_from(["GW", "BW", "GN", "BN", "FrozenBW", "FrozenBN", "SyncBN", "LN", "", "XN"])
OPTIONS = st.sampled_from(
    [
        *("groups", "channels", "iters", "eps", "solver", "threshold", "corr", "running", "momentum", "sync"),
        *("rotation", "bad"),
    ]
)
SETTINGS = st.one_of(
    st.sampled_from(["newton", "zca", "zca_max", "cholesky", "standardize", "matrix", "covariance", "cayley"]),
    st.sampled_from(["true", "false", "none", "", "nan", "inf", "1e-5", "1e400", "0x10", "1_0", "²"]),
    st.integers(-2, 130).map(str),
    st.text(max_size=4),
)
ITEMS = st.lists(st.tuples(OPTIONS, SETTINGS).map("=".join), max_size=4).map(",".join)
SPECS = st.one_of(st.tuples(NAMES, ITEMS).map(":".join), st.text(max_size=12), LEAVES)


@given(spec=SPECS, channels=st.sampled_from([1, 30, 64, 96]))
@example(spec="BW:momentum=nan", channels=64)
@fuzz(50)
def test_a_norm_name_makes_a_layer_that_prints_it(spec, channels):
    try:
        norm = resolve_norm(spec, channels=[channels])
    except NormError as error:
        assert "Fix: " in str(error)
        return
    with torch.device("meta"):
        layer = get_norm(norm, channels)
        printed = layer and find_norm_spec(layer)
        if printed is not None:
            again = get_norm(resolve_norm(printed), channels)
            assert repr(again) == repr(layer) and find_norm_spec(again) == printed
