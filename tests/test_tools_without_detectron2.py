"""Every tool that needs Detectron2 ends with one sentence where it is missing."""

import runpy
import sys

import pytest

from .tiny_run import ROOT

TOOLS = [path.name for path in sorted((ROOT / "tools").glob("*.py")) if "gw_detectron." in path.read_text()]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_without_detectron2_says_what_to_install(tool, monkeypatch):
    monkeypatch.setitem(sys.modules, "detectron2", None)
    monkeypatch.delitem(sys.modules, "gw_detectron.needs_detectron2", raising=False)
    monkeypatch.setattr(sys, "argv", [tool, "--help"])
    with pytest.raises(SystemExit, match=f"^Error: {tool}: needs Detectron2, which is not installed. Fix: run"):
        runpy.run_path(str(ROOT / "tools" / tool), run_name="__main__")
