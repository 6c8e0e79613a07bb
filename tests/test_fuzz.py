"""Random input gets an answer or an error of the documented class, never a hang; `make fuzz` tries 34 times as much."""

import contextlib
import copy
import functools
import io
import json
import math
import os
import pickle
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_safetensors

from gw_detectron.checkpoint import load_checkpoint, open_checkpoint
from gw_detectron.config import default_config, flat_items, read_config
from gw_detectron.errors import DataError, NormError, UserError, WeightsFileError
from gw_detectron.layers import GroupWhitening2d
from gw_detectron.norms import build_norm, norm_spec
from gw_detectron.preflight.annotation_checks import DatasetNeeds, check_coco
from gw_detectron.weights import convert
from gw_detectron.weights.reading import Contents, read_weights_file

from .ops.oracle import Setting, group_whiten
from .preflight.sound_run import coco_content, config
from .tiny_run import CONFIG, ROOT
from .weights.synthetic import make_network

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
LIMIT = 60 * (34 if LONG else 1)  # seconds of a test


def fuzz(count: int) -> settings:
    """Examples of a test: the same ones each time, unless in the long profile."""
    return settings(
        max_examples=count * (34 if LONG else 1),
        deadline=None,
        derandomize=not LONG,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"an example hangs: the test ran longer than {LIMIT} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


# command lines, config keys and norm names
KEYS = sorted(key for key, _ in flat_items(default_config()) if key != "OUTPUT_DIR")
NUMBERS = st.integers(-3, 10) | st.floats() | st.sampled_from([10**12, 10**400, -(2**63), 64, math.nan, math.inf])
LEAVES = st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "GW", "range", "p2", "a/b", "\0"]) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner), max_leaves=6)
WORDS = st.text(max_size=4) | st.sampled_from(
    ["--help", "", "-1", "nan", "none.pth", "missing/x.yaml", str(CONFIG), str(ROOT), "MODEL.WEIGHTS"]
    + ["SOLVER.BASE_LR", "MODEL.NO_KEY", "=", "--", "-x", "gw://none", "gw://file/none", "s3://x", "\udc80"]
)
TOOLS = {  # flags, and words that stop the tool before minutes of work
    "train_net": ("--config-file --num-gpus --resume --eval-only --train-json", ["SOLVER.MAX_ITER", "0"]),
    "convert_weights": ("--arch --positions --norm --force", []),
    "export_model": ("--config-file --output --format --one-image", ["MODEL.WEIGHTS", "none.pth"]),
}


@pytest.mark.parametrize("tool", TOOLS)
@given(data=st.data())
@fuzz(6)
def test_a_tool_ends_without_a_traceback(tool, tmp_path, monkeypatch, data):
    flags, stop = TOOLS[tool]
    words = data.draw(st.lists(st.sampled_from(flags.split()) | WORDS, max_size=5))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [tool, *words, *stop])
    errors = io.StringIO()
    quiet = contextlib.redirect_stdout(io.StringIO())
    with quiet, contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / f"{tool}.py"), run_name="__main__")
    assert ended.value.code in (0, 1, 2) and "Traceback" not in errors.getvalue()
    assert ended.value.code == 0 or errors.getvalue()


@given(words=st.lists(st.sampled_from([*KEYS, "MODEL", "NO.KEY", ""]) | VALUES.map(str), max_size=6))
@example(words=["MODEL", "3"])
@example(words=["SOLVER.BASE_LR.X", "3"])
@fuzz(40)
def test_config_keys_of_the_command_line(words):
    with contextlib.suppress(UserError):
        assert isinstance(read_config(str(CONFIG), words), CfgNode)


NAMES = st.sampled_from(["GW", "BW", "GN", "BN", "FrozenBW", "FrozenBN", "SyncBN", "LN", "", "XN"])
OPTIONS = st.sampled_from(
    ["groups", "channels", "iters", "eps", "solver", "corr", "running", "momentum", "sync", "rotation", "bad"]
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
    with torch.device("meta"):
        try:
            layer = build_norm(spec, channels)
        except NormError:
            return
        printed = layer and norm_spec(layer)
        if printed is not None:
            again = build_norm(printed, channels)
            assert repr(again) == repr(layer) and norm_spec(again) == printed


# files
TENSORS = {"a.weight": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2, dtype=torch.int64)}


def torch_bytes(legacy: bool) -> bytes:
    stream = io.BytesIO()
    torch.save({"model": TENSORS, "iteration": 3}, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


FILES = {
    "new.pth": torch_bytes(legacy=False),
    "old.pth": torch_bytes(legacy=True),
    "a.pkl": pickle.dumps({"model": {name: tensor.numpy() for name, tensor in TENSORS.items()}, "__author__": "x"}),
    "a.safetensors": save_safetensors(TENSORS, {"norm": "GW"}),
}
EDIT = st.tuples(st.sampled_from(["flip", "cut", "insert"]), st.floats(0, 1), st.binary(min_size=1, max_size=4))


@given(name=st.sampled_from(sorted(FILES)), edits=st.lists(EDIT, min_size=1, max_size=4))
@fuzz(60)
def test_a_damaged_weight_file(tmp_path, name, edits):
    content = bytearray(FILES[name])
    for kind, where, data in edits:
        place = int(where * len(content))
        content[place : {"flip": place + len(data), "cut": None, "insert": place}[kind]] = data
    path = tmp_path / name
    path.write_bytes(content)
    try:
        assert isinstance(read_weights_file(path), Contents)
    except WeightsFileError as error:
        assert str(path) in str(error)


NEW_VALUES = st.one_of(
    st.none() | st.integers(-1, 3) | st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.ones(shape)),
    st.sampled_from([torch.full((64,), math.nan), torch.ones(64, dtype=torch.int64), np.ones(3), {}]),
)
CHANGE = st.tuples(
    st.sampled_from(["drop", "rename", "replace", "keep"]), st.integers(0, 300), st.text(max_size=6), NEW_VALUES
)


def changed(state: dict[str, Any], changes: list[tuple]) -> dict[str, Any]:
    state = dict(state)
    for kind, index, text, value in changes:
        name = sorted(state)[index % len(state)]
        if kind == "drop":
            del state[name]
        elif kind == "rename":
            state[text] = state.pop(name)
        elif kind == "replace":
            state[name] = value
    return state


@functools.cache
def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    return make_network("R-18"), build_model(config(Path("unused")))


@given(changes=st.lists(CHANGE, min_size=1, max_size=4))
@fuzz(12)
def test_a_changed_state_dict_is_used_completely_or_refused(tmp_path, changes):
    network, detector = models()
    with contextlib.suppress(UserError):
        tensors = convert(changed(network.state_dict(), changes)).tensors
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    torch.save({"model": changed(detector.state_dict(), changes)}, tmp_path / "w.pth")
    with contextlib.suppress(UserError):
        assert not load_checkpoint(detector, open_checkpoint(str(tmp_path / "w.pth"))).missing


JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(["id", "size", "counts"]), inner),
    max_leaves=8,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """List every place in nested containers as (container, key)."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in list(keys) for place in [(value, key), *places(value[key])]]


@given(
    changes=st.lists(st.tuples(st.integers(0, 500), st.sampled_from(["set", "drop", "repeat"]), JSON), max_size=3),
    training=st.booleans(),
    masks=st.booleans(),
)
@example(changes=[], training=True, masks=True)
@fuzz(60)
def test_any_annotations_get_an_answer(changes, training, masks):
    content = copy.deepcopy(coco_content())
    for index, kind, value in changes:
        found = places(content)
        if not found:
            break
        container, key = found[index % len(found)]
        if kind == "set":
            container[key] = copy.deepcopy(value)
        elif kind == "drop":
            del container[key]
        elif isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
    try:
        check_coco(json.loads(json.dumps(content)), DatasetNeeds(training, masks))
    except ValueError as error:
        assert isinstance(error, DataError) or "digits" in str(error)


# layers
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
SHAPES = st.one_of(
    st.tuples(st.integers(0, 3), st.sampled_from([8, 8, 8, 12]), st.integers(0, 9), st.integers(0, 9)),
    st.lists(st.integers(0, 9), max_size=5).map(tuple),
)
FORMS = ["plain", "transposed", "strided", "channels_last", "nan", "meta", "grad", "huge"]


def tensor(shape: tuple[int, ...], dtype: torch.dtype, form: str, seed: int) -> torch.Tensor:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if form == "transposed" and x.dim() >= 2:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if form == "strided":
        return torch.stack([x, x], dim=-1)[..., 0]
    if form == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if form == "meta":
        return x.to("meta")
    if x.is_floating_point() and x.numel():
        if form == "nan":
            x.view(-1)[0] = torch.nan
        return x.requires_grad_(form == "grad") if form != "huge" else x * 1e4
    return x


@given(
    shape=SHAPES,
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(FORMS),
    seed=st.integers(0, 9),
    groups=st.sampled_from([1, 4, 8]),
)
@fuzz(60)
def test_group_whitening(shape, dtype, form, seed, groups):
    x, layer = tensor(shape, dtype, form, seed), GroupWhitening2d(8, groups)
    try:
        y = (layer.to("meta") if form == "meta" else layer)(x)
    except (ValueError, TypeError) as error:
        assert len(shape) < 2 or shape[1] != 8 or not dtype.is_floating_point or len(shape) == 2, error
        return
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    if x.requires_grad:
        y.sum().backward()
        assert x.grad is not None and bool(x.grad.isfinite().all())
    if form in ("meta", "nan") or dtype not in (torch.float32, torch.float64) or not x.numel():
        return
    # a sample of one value per row has no direction: the oracle divides by rounding errors there
    assume(x.shape[2:].numel() * 8 // groups > groups)
    expected = group_whiten(x.detach().numpy(), Setting(groups=groups, eps=1e-5, solver="newton", iters=5))
    tolerance = 1e-3 if dtype is torch.float32 else 1e-9
    np.testing.assert_allclose(y.detach().numpy(), expected, atol=tolerance, rtol=tolerance)
