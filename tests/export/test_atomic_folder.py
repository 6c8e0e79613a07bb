"""The output folder appears complete or not at all."""

import errno
import os
import subprocess

import pytest

from gw_detectron.atomic import temporary_path
from gw_detectron.errors import FileAccessError, OutputFolderError, UserError
from gw_detectron.export.atomic_folder import atomic_folder


def write(output, text="new"):
    with atomic_folder(output, ["a.txt"]) as folder:
        (folder / "a.txt").write_text(text)


def entries(path):
    return sorted(entry.name for entry in path.iterdir())


def test_a_folder_is_created_and_replaced(tmp_path):
    output = tmp_path / "some" / "out"
    write(output)
    write(output, "newer")
    assert (output / "a.txt").read_text() == "newer"
    assert entries(output.parent) == ["out"]
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    assert entries(tmp_path / "empty") == ["a.txt"]


def test_a_failure_leaves_the_earlier_folder(tmp_path):
    write(tmp_path / "out")
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "out", ["a.txt"]) as folder:
        (folder / "a.txt").write_text("half")
        raise RuntimeError
    assert (tmp_path / "out" / "a.txt").read_text() == "new"
    assert entries(tmp_path) == ["out"]


def test_a_failing_rename_restores_the_earlier_folder(tmp_path, monkeypatch):
    write(tmp_path / "out")
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: rename(a, b) if a.name != "new" else rename(a / "gone", b))
    with pytest.raises(OSError):
        write(tmp_path / "out", "newer")
    assert (tmp_path / "out" / "a.txt").read_text() == "new"
    assert entries(tmp_path) == ["out"]


def test_a_signal_between_the_renames_restores_the_earlier_folder(tmp_path, monkeypatch):
    write(tmp_path / "out")
    rename = os.rename

    def interrupted(source, target):
        if source.name == "new":
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", "newer")
    assert (tmp_path / "out" / "a.txt").read_text() == "new"
    assert entries(tmp_path) == ["out"]


def test_a_mount_point_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr("pathlib.Path.is_mount", lambda path: path.name == "out")
    with pytest.raises(OutputFolderError, match=r"out'\): is a mount point, .* Fix: give a folder in it"):
        write(tmp_path / "out")


@pytest.mark.parametrize("early", [True, False])
def test_other_files_are_not_touched(tmp_path, early):
    output = tmp_path / "out"
    output.mkdir()
    if early:
        (output / "thesis.tex").touch()
    message = r"holds thesis.tex, .*Fix: give an empty or new folder"
    with pytest.raises(FileExistsError, match=message), atomic_folder(output, ["a.txt"]) as folder:
        (folder / "a.txt").touch()
        (output / "thesis.tex").touch()  # another program writes there
    assert entries(output) == ["thesis.tex"] and entries(tmp_path) == ["out"]


@pytest.mark.parametrize(("inside", "reason"), [("file", "is a file"), ("file/below", "cannot create the folder")])
def test_a_path_through_a_file(tmp_path, inside, reason):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=rf"{tmp_path}/{inside}'\): {reason}") as caught:
        write(tmp_path / inside)
    assert isinstance(caught.value, UserError)


@pytest.mark.parametrize(
    ("name", "reason"), [("", "no folder is named"), ("x" * 300, "cannot create the folder: File")]
)
def test_names_that_cannot_be_folders(tmp_path, monkeypatch, name, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=reason) as caught:
        write(name)
    assert isinstance(caught.value, UserError)
    assert entries(tmp_path) == []


def test_a_failed_write_names_the_folder(tmp_path):
    write(tmp_path / "out")
    message = rf"'{tmp_path}/out'\): was not written: No space left on device\. .*Fix: free disk space"
    with pytest.raises(FileAccessError, match=message), atomic_folder(tmp_path / "out", ["a.txt"]):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (tmp_path / "out" / "a.txt").read_text() == "new"
    assert entries(tmp_path) == ["out"]


def test_the_next_export_removes_what_a_killed_one_left(tmp_path, monkeypatch):
    """Leftovers of running processes and of other exports stay."""
    ended = subprocess.Popen(["true"])
    ended.wait(timeout=60)
    kept = ["out"]
    for process, name in ((ended.pid, "out"), (os.getppid(), "out"), (ended.pid, "other")):
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda process=process: process)
            left = temporary_path(tmp_path / name)
        (left / "new").mkdir(parents=True)
        if (process, name) != (ended.pid, "out"):
            kept.append(left.name)
    write(tmp_path / "out")
    assert entries(tmp_path) == sorted(kept)
