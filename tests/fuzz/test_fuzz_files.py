"""Damaged weight files, other networks' tensors and malformed annotations: refused, or used rightly."""

import copy
import functools
import io
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.modeling import build_model
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save as save_safetensors

from gw_detectron.checkpoint import load_checkpoint, open_checkpoint
from gw_detectron.errors import DataError, UserError, WeightsFileError
from gw_detectron.preflight.annotation_checks import DatasetNeeds, check_coco
from gw_detectron.weights import convert
from gw_detectron.weights.reading import Contents, read_weights_file

from ..preflight.sound_run import coco_content, config
from ..weights.synthetic import make_network
from .examples import fuzz

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
EDITS = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "insert", "repeat"]), st.floats(0, 1), st.binary(min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


@given(name=st.sampled_from(sorted(FILES)), edits=EDITS)
@fuzz(60)
def test_a_damaged_weight_file(tmp_path, name, edits):
    content = bytearray(FILES[name])
    for kind, where, data in edits:
        place = int(where * len(content))
        if kind == "flip":
            content[place : place + len(data)] = data
        elif kind == "cut":
            del content[place:]
        elif kind == "insert":
            content[place:place] = data
        else:
            content[place:place] = content[place : place + 200]
    path = tmp_path / name
    path.write_bytes(content)
    try:
        assert isinstance(read_weights_file(path), Contents)
    except WeightsFileError as error:
        assert str(path) in str(error)


@functools.cache
def network_state() -> dict[str, torch.Tensor]:
    return make_network("R-18").state_dict()


VALUES = st.one_of(
    st.none(),
    st.integers(-1, 3),
    st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.ones(shape)),
    st.sampled_from(
        [torch.full((64,), math.nan), torch.ones(64, dtype=torch.int64), np.ones(3), {}, torch.ones(1, 64)]
    ),
)
CHANGES = st.lists(
    st.tuples(st.sampled_from(["drop", "rename", "replace", "keep"]), st.integers(0, 300), st.text(max_size=6), VALUES),
    min_size=1,
    max_size=4,
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


@given(changes=CHANGES)
@fuzz(12)
def test_a_changed_state_dict_is_converted_or_refused(changes):
    state = changed(network_state(), changes)
    try:
        tensors = convert(state).tensors
    except UserError as error:
        assert "Fix: " in str(error)
        return
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())


@functools.cache
def detector() -> torch.nn.Module:
    return build_model(config(Path("unused")))


@given(changes=CHANGES)
@fuzz(10)
def test_a_changed_state_dict_is_loaded_or_refused(tmp_path, changes):
    model = detector()
    state = model.state_dict()
    path = tmp_path / "w.pth"
    torch.save({"model": changed(state, changes)}, path)
    try:
        report = load_checkpoint(model, open_checkpoint(str(path)))
    except UserError as error:
        assert "Fix: " in str(error)
        return
    assert not report.missing


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 40),
        st.floats(),
        st.sampled_from([10**400, 2**53, "1", "a.jpg", "\0", "", 1e308]),
        st.text(max_size=3),
    ),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.sampled_from(["id", "size", "counts"]), inner),
    max_leaves=8,
)


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """List every place in nested containers as (container, key)."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in list(keys) for place in [(value, key), *nodes(value[key])]]


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
        places = nodes(content)
        if not places:
            break
        container, key = places[index % len(places)]
        if kind == "set":
            container[key] = copy.deepcopy(value)
        elif kind == "drop":
            del container[key]
        elif isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
    try:
        content = json.loads(json.dumps(content))
        errors, warnings = check_coco(content, DatasetNeeds(training, masks))
    except (DataError, ValueError) as error:
        assert isinstance(error, DataError) or "digits" in str(error), error
        return
    assert all("Fix: " in message for message in errors + warnings)
