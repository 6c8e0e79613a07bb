"""The notebook runs from data to an exported detector, and is stored without outputs."""

import nbformat
import pytest
from nbclient import NotebookClient

from ..tiny_run import environment
from ..workbench.export.tiny_networks import needs_export
from .pages import ROOT

NOTEBOOK = nbformat.read(ROOT / "docs" / "quickstart.ipynb", as_version=4)
CODE = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]


def test_it_is_stored_without_outputs():
    nbformat.validate(NOTEBOOK)
    assert len(CODE) > 5 and all(
        cell.outputs == [] and cell.execution_count is None for cell in CODE
    )
    assert NOTEBOOK.metadata["accelerator"] == "GPU"  # what a hosted notebook starts


def test_it_installs_only_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "docs")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("installs"))
    exec(CODE[0].source, {})
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "detectron2" else name
    )
    with pytest.raises(pytest.fail.Exception, match="installs"):
        exec(CODE[0].source, {})
    monkeypatch.chdir(tmp_path)  # outside of a clone
    with pytest.raises(SystemExit, match="REPOSITORY"):
        exec(CODE[0].source, {})


@needs_export
@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    for name, value in environment(
        tmp_path, QUICKSTART_ITERATIONS="25", JUPYTER_PLATFORM_DIRS="1"
    ).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.from_dict(NOTEBOOK)
    NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(
        output.get("text", "") for output in outputs if output.get("name") == "stdout"
    )
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    assert "bbox" in printed and "segm" in printed and "detections compared," in printed
    assert (tmp_path / "quickstart_exported" / "model.pt2").is_file()
