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
    assert len(CODE) > 5
    for cell in CODE:
        assert cell.outputs == []
        assert cell.execution_count is None
    assert NOTEBOOK.metadata["accelerator"] == "GPU"  # what a hosted notebook starts


def test_it_installs_only_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT / "docs")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("installs"))
    exec(CODE[0].source, {})

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match="installs"):
        exec(CODE[0].source, {})

    monkeypatch.chdir(tmp_path)  # outside of a clone
    with pytest.raises(SystemExit, match="REPOSITORY"):
        exec(CODE[0].source, {})


@needs_export
@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    variables = environment(QUICKSTART_ITERATIONS="25", JUPYTER_PLATFORM_DIRS="1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    docs = tmp_path / "docs"  # in a clone
    docs.mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    notebook = nbformat.from_dict(NOTEBOOK)
    resources = {"metadata": {"path": str(docs)}}
    NotebookClient(notebook, timeout=600, resources=resources).execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    printed = "".join(output.get("text", "") for output in outputs)
    for word in ("bbox", "segm", "detections compared,"):
        assert word in printed
    assert (docs / "quickstart_exported" / "model.pt2").is_file()
