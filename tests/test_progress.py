"""Progress bars: drawn on a terminal, silent elsewhere."""

import io
import sys

from gw_detectron.progress import progress_bar, steps


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_count_and_name(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(progress_bar(range(3), desc="reading", unit="image")) == [0, 1, 2]
    assert "reading: 100%" in sys.stderr.getvalue() and "3/3" in sys.stderr.getvalue()


def test_a_log_shows_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert list(progress_bar(range(3), desc="reading", unit="image")) == [0, 1, 2]
    with steps(2) as begin:
        begin("first")
    assert not sys.stderr.getvalue()


def test_steps_are_named_and_numbered(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with steps(2) as begin:
        begin("first")
        begin("second")
    assert "first [step 1 of 2, 00:00]" in sys.stderr.getvalue()
    assert "second [step 2 of 2, 00:00]" in sys.stderr.getvalue()
