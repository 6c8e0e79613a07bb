"""Helper processes do not import modules of the current folder, such as a downloaded dataset's."""

import subprocess
import sys

import pytest

PROGRAM = """
import multiprocessing, sys
from gw_detectron.workbench.console import safe_imports

def work():
    import statistics
    print(statistics.__file__)

if __name__ == "__main__":
    with safe_imports():
        process = multiprocessing.get_context(sys.argv[1]).Process(target=work)
        process.start()
        process.join()
        sys.exit(process.exitcode)
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_helper_processes_ignore_modules_of_the_current_folder(tmp_path, method):
    here, elsewhere = tmp_path / "dataset", tmp_path / "program"
    here.mkdir()
    elsewhere.mkdir()
    for name in ("numbers", "statistics", "selectors", "signal", "socket"):
        (here / f"{name}.py").write_text(f"open('ran_{name}', 'w')")
    (elsewhere / "main.py").write_text(PROGRAM)

    command = [sys.executable, str(elsewhere / "main.py"), method]
    process = subprocess.run(
        command, cwd=here, capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert str(here) not in process.stdout
    assert not list(here.glob("ran_*"))
