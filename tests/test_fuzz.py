"""Random command lines, configs, state dicts and annotations get an answer or a user error.

None hangs. Norm names, weight files and layers have property tests in their own rooms; `make fuzz`
runs all with more examples.
"""

import contextlib
import copy
import functools
import io
import json
import math
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
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gw_detectron.config import default_config, flat_items, read_config
from gw_detectron.errors import DataError, UserError
from gw_detectron.weights import convert, load_checkpoint, open_checkpoint
from gw_detectron.workbench.commands import main
from gw_detectron.workbench.dataset.annotation_checks import DatasetNeeds

from .tiny_run import CONFIG, ROOT
from .weights.synthetic import make_network
from .workbench.sound_run import coco_content, coco_faults, config

LIMIT = 300 * max(1, settings.default.max_examples // 100)  # seconds of a test


def fuzz(count: int) -> settings:
    """Examples of a test, for 100 of the profile."""
    return settings(
        max_examples=count * settings.default.max_examples // 100,
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


KEYS = sorted(key for key, _ in flat_items(default_config()) if key != "OUTPUT_DIR")
NUMBERS = (
    st.integers(-3, 10)
    | st.floats()
    | st.sampled_from([10**12, 10**400, -(2**63), 64, math.nan, math.inf])
)
LEAVES = (
    st.none()
    | st.booleans()
    | NUMBERS
    | st.sampled_from(["", "GW", "range", "p2", "a/b", "\0"])
    | st.text()
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=6,
)
WORDS = st.text(max_size=4) | st.sampled_from(
    [
        "--help",
        "",
        "-1",
        "nan",
        "none.pth",
        "missing/x.yaml",
        str(CONFIG),
        str(ROOT),
        "MODEL.WEIGHTS",
    ]
    + [
        "SOLVER.BASE_LR",
        "MODEL.NO_KEY",
        "=",
        "--",
        "-x",
        "gw://none",
        "s3://x",
        "\udc80",
    ]
)
COMMANDS = {  # flags, and words that stop the command before minutes of work
    "train": (
        "--config-file --num-gpus --resume --eval-only --train-json",
        ["SOLVER.MAX_ITER", "0"],
    ),
    "weights convert": ("--norm --preprocessing --force", []),
    "export": (
        "--config-file --output --format --one-image",
        ["MODEL.WEIGHTS", "none.pth"],
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
@given(data=st.data())
@fuzz(6)
def test_a_command_ends_without_a_traceback(command, tmp_path, monkeypatch, data):
    flags, stop = COMMANDS[command]
    words = data.draw(st.lists(st.sampled_from(flags.split()) | WORDS, max_size=5))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gw-detectron", *command.split(), *words, *stop])

    errors = io.StringIO()
    quiet = contextlib.redirect_stdout(io.StringIO())
    with quiet, contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code in (0, 1, 2)
    assert "Traceback" not in errors.getvalue()
    assert ended.value.code == 0 or errors.getvalue()


@given(
    words=st.lists(
        st.sampled_from([*KEYS, "MODEL", "NO.KEY", ""]) | VALUES.map(str), max_size=6
    )
)
@example(words=["MODEL", "3"])
@example(words=["SOLVER.BASE_LR.X", "3"])
@fuzz(40)
def test_config_keys_of_the_command_line(words):
    with contextlib.suppress(UserError):
        assert isinstance(read_config(str(CONFIG), words), CfgNode)


NEW_VALUES = st.one_of(
    st.none() | st.integers(-1, 3) | st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.ones(shape)),
    st.sampled_from(
        [torch.full((64,), math.nan), torch.ones(64, dtype=torch.int64), np.ones(3), {}]
    ),
)
CHANGE = st.tuples(
    st.sampled_from(["drop", "rename", "replace", "keep"]),
    st.integers(0, 300),
    st.text(max_size=6),
    NEW_VALUES,
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
        assert not load_checkpoint(
            detector, open_checkpoint(str(tmp_path / "w.pth"))
        ).missing


JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.dictionaries(st.sampled_from(["id", "size", "counts"]), inner)
    ),
    max_leaves=8,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """List every place in nested containers as (container, key)."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))

    found = [(value, key) for key in keys]
    for key in keys:
        found += places(value[key])
    return found


@given(
    changes=st.lists(
        st.tuples(
            st.integers(0, 500), st.sampled_from(["set", "drop", "repeat"]), JSON
        ),
        max_size=3,
    ),
    training=st.booleans(),
    masks=st.booleans(),
)
@example(changes=[], training=True, masks=True)
@fuzz(60)
def test_any_annotations_get_an_answer(changes, training, masks):
    content = copy.deepcopy(coco_content())
    for index, kind, value in changes:
        known = places(content)
        if not known:
            break

        container, key = known[index % len(known)]
        if kind == "set":
            container[key] = copy.deepcopy(value)
        elif kind == "drop":
            del container[key]
        elif isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))

    try:
        coco_faults(json.loads(json.dumps(content)), DatasetNeeds(training, masks))
    except ValueError as error:
        assert isinstance(error, DataError) or "digits" in str(error)
