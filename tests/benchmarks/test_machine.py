"""The commit that a table was measured with."""

import subprocess

import pytest

from benchmarks import Table, compare
from benchmarks.machine import commit_of


def git(folder, *words):
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "file").write_text("before")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    return tmp_path


def test_commit_and_whether_files_are_changed(checkout):
    commit = git(checkout, "rev-parse", "HEAD")
    assert commit_of(checkout) == commit
    (checkout / "output").touch()  # not of the checkout
    assert commit_of(checkout) == commit
    (checkout / "file").write_text("after")
    assert commit_of(checkout) == f"{commit}-dirty"


def test_no_commit_where_the_package_is_no_checkout(checkout, monkeypatch):
    installed = checkout / "site-packages"
    installed.mkdir()
    assert commit_of(installed) == ""
    monkeypatch.setenv("PATH", "")  # no git
    assert commit_of(checkout) == ""


def test_another_commit_can_be_compared():
    row = {"shape": "1x2x3x4", "dtype": "fp32", "mode": "forward", "provider": "ours", "note": "", "to_floor": 1.0}
    now, before = (Table("layer", {"device": "cpu", "commit": commit}, [row]) for commit in "ab")
    assert len(compare(now, before).rows) == 1
