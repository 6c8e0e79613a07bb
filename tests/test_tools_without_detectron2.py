"""Every tool and command that needs Detectron2 ends with one sentence where it is missing."""

import runpy
import sys

import pytest

from gw_detectron.commands import COMMANDS, main

from .tiny_run import ROOT

TOOLS = [
    path.name
    for path in sorted((ROOT / "tools").glob("*.py"))
    if "gw_detectron" in path.read_text() and "detectron2" not in path.name
]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_without_detectron2_says_what_to_install(tool, monkeypatch):
    monkeypatch.setitem(sys.modules, "detectron2", None)
    monkeypatch.delitem(sys.modules, "gw_detectron.needs_detectron2", raising=False)
    monkeypatch.setattr(sys, "argv", [tool, "--help"])
    with pytest.raises(SystemExit, match=f"^Error: {tool}: needs Detectron2, which is not installed. Fix: run"):
        runpy.run_path(str(ROOT / "tools" / tool), run_name="__main__")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_without_detectron2_says_what_to_install(name, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "detectron2", None)
    monkeypatch.delitem(sys.modules, "gw_detectron.needs_detectron2", raising=False)
    monkeypatch.setattr(sys, "argv", ["gw-detectron", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    if COMMANDS[name].needs_detectron2:
        assert ended.value.code.startswith(f"Error: gw-detectron {name}: needs Detectron2, which is not installed.")
    else:
        assert ended.value.code == 0 and "usage: gw-detectron" in capsys.readouterr().out
