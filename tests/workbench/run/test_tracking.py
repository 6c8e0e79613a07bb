"""Trackers: what they are given, by stand-ins of their modules; a resumed run; a tracker that fails."""

import importlib.util
import json
import sys

import pytest
from detectron2.utils.events import EventStorage

from gw_detectron.config import changed_config, default_config
from gw_detectron.errors import ConfigError, MissingPackageError
from gw_detectron.workbench.run.logs import TRACKERS, TrackerWriter

from ...tiny_run import arguments, config_of

# the calls that TrackerWriter makes, noted in a file; the metric "bad" is refused
STAND_IN = """
import json, types
def note(*call): open({path!r}, "a").write(json.dumps(call) + "\\n")
def log(values, step):
    if "bad" in values: raise OSError("no network")
    note("log", step, values)
def init(**options):
    note("init", options["resume"], options["name"], options["config"]["SOLVER.BASE_LR"])
    return types.SimpleNamespace(log=log, finish=lambda: note("finish"))
def start_run(run_id, run_name):
    note("init", run_id, run_name)
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))
log_text, log_metrics, end_run = lambda *a: None, log, lambda: note("finish")
"""


def tracked(name, folder):
    return changed_config(
        default_config(), {"TRACKER": name, "OUTPUT_DIR": str(folder)}
    )


def write_some(writer):
    with EventStorage(4) as storage:
        storage.put_scalar("bbox/AP-a<b", 1.5, smoothing_hint=False)
        storage.iter = 5
        storage.put_scalar("loss", 2.0)
        writer.write()
        writer.write()  # nothing new
        storage.iter = 6
        storage.put_scalar("bad", 0.0)
        writer.write()  # does not raise
    writer.close()


@pytest.mark.parametrize("name", TRACKERS)
def test_new_scalars_are_logged_by_iteration_and_the_run_is_continued(
    tmp_path, monkeypatch, name
):
    calls = tmp_path / "calls.txt"
    (tmp_path / f"{name}.py").write_text(STAND_IN.format(path=str(calls)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    output = tmp_path / "mine"
    output.mkdir()

    for _ in range(2):
        write_some(TrackerWriter(tracked(name, output)))

    first, *logged, again = [
        json.loads(line) for line in calls.read_text().splitlines()
    ][:5]
    assert logged == [
        ["log", 4, {"bbox/AP-a_b": 1.5}],
        ["log", 5, {"loss": 2.0}],
        ["finish"],
    ]
    if name == "mlflow":
        assert (first, again) == (["init", None, "mine"], ["init", "abc", "mine"])
    else:
        _, resume, run, rate = first
        assert first == again
        assert (resume, rate) == ("allow", 0.001) and run.startswith("mine-")


def test_unknown_and_missing_trackers_are_refused(tmp_path, monkeypatch):
    assert config_of(arguments(tmp_path, "--track", "wandb")).TRACKER == "wandb"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    for name, error in (("tensorboard", ConfigError), ("mlflow", MissingPackageError)):
        with pytest.raises(error, match=f"TRACKER .'{name}'"):
            TrackerWriter(tracked(name, tmp_path))
