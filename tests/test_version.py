"""Versions: the git commit, and those of packages."""

import subprocess

import pytest

from gw_detectron.version import git_commit, package_versions


def git(folder, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = ["git", *identity, *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_git_commit(tmp_path, monkeypatch):
    git(tmp_path, "init")
    assert git_commit(tmp_path) == ""  # nothing committed
    (tmp_path / "file").write_text("before")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "tag", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert git_commit(tmp_path) == commit
    (tmp_path / "output").touch()  # not tracked
    assert git_commit(tmp_path) == commit
    (tmp_path / "file").write_text("after")
    assert git_commit(tmp_path) == f"{commit}-dirty"
    installed = tmp_path / "site-packages"
    installed.mkdir()
    assert git_commit(installed) == ""
    monkeypatch.setenv("PATH", "")  # no git
    assert git_commit(tmp_path) == ""


def test_versions_of_packages_that_are_installed():
    assert package_versions(["no-such-package", "pytest"]) == {"pytest": pytest.__version__}
