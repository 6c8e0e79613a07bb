"""What reaches a terminal: no control characters of names, and escapes where it has ASCII only."""

import logging
import os
import subprocess
import sys

import pytest

from gw_detectron.workbench.console import progress_bar, report_error
from gw_detectron.workbench.run.logs import _PlainFormatter

PRINTING = """
from gw_detectron.workbench.console import errors_reported
with errors_reported():
    print("names: \\u7ec6\\u80de, caf\\u00e9")
    raise FileNotFoundError("photos/\\u7ec6\\u80de\\x1b[31m.jpg")
"""


def test_control_characters_of_an_error_are_escaped(capsys):
    report_error("two lines:\n  - a\x1b[31m\ud800\rb.jpg")

    assert capsys.readouterr().err == (
        "\nError: two lines:\n  - a\\x1b[31m\\ud800\\rb.jpg\n"
    )


def test_a_terminal_of_ascii_shows_escapes():
    environment = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", PRINTING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert done.returncode == 1
    assert done.stdout == "names: \\u7ec6\\u80de, caf\\xe9\n"
    assert done.stderr == "\nError: photos/\\u7ec6\\u80de\\x1b[31m.jpg\n"


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(capsys):
    assert list(progress_bar(range(3), desc="drawing", unit="image")) == [0, 1, 2]
    assert capsys.readouterr().err == ""  # within the first minute

    at_once = {"mininterval": 0, "delay": 0, "miniters": 1}
    list(progress_bar(range(3), desc="drawing", unit="image", **at_once))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 4
    assert lines[0].startswith("drawing:   0%") and "3/3" in lines[-1]


def test_control_characters_of_log_lines_are_escaped():
    record = logging.makeLogRecord(
        {"msg": "\x1b[32mAP\x1b[0m of \x1b]0;title\x07\ud800\nnext line"}
    )

    line = _PlainFormatter().format(record)

    assert line == "AP of \\x1b]0;title\\x07\\ud800\nnext line"


LONGER_THAN_ITS_READER = """
import sys
from gw_detectron.workbench.console import errors_reported
with errors_reported():
    print("begins", flush=True)
    sys.stdin.read()  # until the reader has gone
    for stream in (sys.stdout, sys.stderr):
        print("step", file=stream, flush=True)
    open(sys.argv[1], "w").close()
    raise FileNotFoundError("no step is lost")
"""


@pytest.mark.parametrize("connect", [os.openpty, os.pipe])
def test_a_program_goes_on_without_its_terminal_or_pipe(tmp_path, connect):
    reader, writer = connect()
    program = subprocess.Popen(
        [sys.executable, "-c", LONGER_THAN_ITS_READER, tmp_path / "done"],
        env={"PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=writer,
        start_new_session=True,
    )
    os.close(writer)
    assert os.read(reader, 6) == b"begins"

    os.close(reader)
    program.communicate()

    assert program.returncode == 1
    assert (tmp_path / "done").exists()


ON_A_FULL_DISK = """
import logging, sys
from gw_detectron.workbench.console import errors_reported
with errors_reported():
    logging.basicConfig(stream=sys.stdout, level=logging.INFO)
    for stream in (sys.stdout, sys.stderr) * 2:
        logging.info("step")
        print("step", file=stream, flush=True)
    raise FileNotFoundError("no step is lost")
"""


@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_a_program_goes_on_if_the_disk_of_its_output_is_full(full):
    with open("/dev/full", "w") as device:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, full: device}
        done = subprocess.run(
            [sys.executable, "-c", ON_A_FULL_DISK],
            env={"PYTHONPATH": ":".join(sys.path)},
            text=True,
            **streams,
        )

    assert done.returncode == 1
    if full == "stderr":
        assert done.stdout == "INFO:root:step\nstep\nINFO:root:step\n" * 2
    else:
        first, *others = done.stderr.splitlines()
        assert first.startswith("<stdout>: No space left on device. ")
        assert others == ["step", "step", "", "Error: no step is lost"]


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_output_may_be_closed(closed):
    script = 'exec "$0" -c "$1" ' + closed
    command = ["sh", "-c", script, sys.executable, PRINTING]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert done.returncode == 1
    assert ("names" in done.stdout) == closed.startswith("2")
    assert ("Error" in done.stderr) == (closed == ">&-")
