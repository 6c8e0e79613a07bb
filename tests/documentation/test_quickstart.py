"""The notebook runs from data to an exported detector, and is stored without outputs."""

import json

import nbformat
import pytest
from nbclient import NotebookClient

from ..export.test_detector import needs_export
from ..tiny_run import environment
from .pages import ROOT

FILE = ROOT / "docs" / "quickstart.ipynb"


def test_it_is_stored_without_outputs():
    nbformat.validate(nbformat.read(FILE, as_version=4))
    notebook = json.loads(FILE.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5 and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert all(cell["metadata"] == {} for cell in notebook["cells"])
    assert notebook["metadata"]["accelerator"] == "GPU"  # what a hosted notebook starts


def test_it_installs_only_what_is_missing(tmp_path, monkeypatch):
    install = next(cell.source for cell in nbformat.read(FILE, as_version=4).cells if cell.cell_type == "code")
    monkeypatch.chdir(FILE.parent)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("installs"))
    exec(install, {})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "detectron2" else name)
    with pytest.raises(pytest.fail.Exception, match="installs"):
        exec(install, {})
    monkeypatch.chdir(tmp_path)  # outside of a clone
    with pytest.raises(SystemExit, match="REPOSITORY: not set"):
        exec(install, {})


@needs_export
@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    for name, value in environment(tmp_path, QUICKSTART_ITERATIONS="25", JUPYTER_PLATFORM_DIRS="1").items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(FILE, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    printed = "".join(output.get("text", "") for output in outputs if output.get("name") == "stdout")
    assert len(pictures) == 4
    assert "bbox" in printed and "segm" in printed and "detections compared," in printed
    assert (tmp_path / "quickstart_exported" / "model.pt2").is_file()
