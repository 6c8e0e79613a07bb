"""Progress bars: drawn on a terminal, silent elsewhere."""

import io
import sys

import pytest

from gw_detectron.progress import progress_bar


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_counts_and_a_log_nothing(terminal, monkeypatch):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    assert list(progress_bar(range(3), desc="reading", unit="image")) == [0, 1, 2]
    for text in ("reading: 100%", "3/3"):
        assert (text in stream.getvalue()) is terminal
