"""A few kills at random moments; tests/reliability/kill_runs.py does hundreds."""

import pytest

from .kill_runs import kill_runs


@pytest.mark.slow
def test_kills_lose_nothing(tmp_path):
    result = kill_runs(tmp_path, 8, seed=3, iterations=20)
    assert result["kills"] >= 8 and result["losses"] == []
