"""Atomic writes: files and folders appear complete or not at all, whoever else writes or is killed."""

import errno
import os
import signal
import subprocess
import sys

import pytest
from detectron2.utils.file_io import PathManager

from gw_detectron.atomic import (
    AtomicPathManager,
    atomic_folder,
    atomic_write,
    check_replaceable,
    remove_unfinished,
)
from gw_detectron.errors import FileAccessError


def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path):
    path = tmp_path / "model.pth"
    path.write_bytes(b"old")
    child = os.fork()
    if child == 0:
        with AtomicPathManager(PathManager).open(str(path), "wb") as file:
            file.write(b"new" * 100_000)
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert path.read_bytes() == b"old"
    with AtomicPathManager(PathManager).open(str(path), "wb") as file:
        file.write(b"newer")
    assert path.read_bytes() == b"newer"
    remove_unfinished(str(tmp_path))
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_of_the_caller_passes_and_leaves_nothing(tmp_path):
    with (
        pytest.raises(KeyError),
        AtomicPathManager(PathManager).open(str(tmp_path / "a"), "w") as file,
    ):
        file.write("half")
        raise KeyError("caller")
    assert not list(tmp_path.iterdir())


def test_a_read_error_in_the_body_is_not_reported_as_a_failed_write(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match="source") as raised,
        atomic_write(tmp_path / "a"),
    ):
        (tmp_path / "source").read_bytes()
    assert not isinstance(raised.value, FileAccessError)


@pytest.mark.parametrize(
    "error", [OSError("image file is truncated"), ConnectionResetError(104, "reset")]
)
def test_an_error_without_a_file_is_the_callers_unless_the_disk_is_full(tmp_path, error):
    with pytest.raises(type(error)) as raised, atomic_write(tmp_path / "a"):
        raise error
    assert raised.value is error
    with pytest.raises(FileAccessError, match="free disk space"), atomic_write(tmp_path / "a"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_unfinished_files_of_dead_processes_are_removed_and_no_others(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with atomic_write(tmp_path / "model_0000001.pth") as mine:
        mine.write_bytes(b"half")
        theirs = mine.with_name(mine.name.replace(f".{os.getpid()}.", f".{dead.pid}."))
        running = mine.with_name(mine.name.replace(f".{os.getpid()}.", f".{os.getppid()}."))
        elsewhere = theirs.with_name(theirs.name.replace(os.uname().nodename, "another-host"))
        (tmp_path / "notes.tmp").write_text("the user's")
        for path in (theirs, running, elsewhere):
            path.write_bytes(b"half")
    remove_unfinished(tmp_path)
    assert entries(tmp_path) == sorted(
        ["model_0000001.pth", running.name, elsewhere.name, "notes.tmp"]
    )


def write_folder(output, text="new"):
    with atomic_folder(output, ["a.txt"]) as folder:
        (folder / "a.txt").write_text(text)


def entries(path):
    return sorted(entry.name for entry in path.iterdir())


def test_a_folder_is_created_and_replaced(tmp_path):
    output = tmp_path / "some" / "out"
    write_folder(output)
    write_folder(output, "newer")
    assert (output / "a.txt").read_text() == "newer"
    assert entries(output.parent) == ["out"]
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "empty")
    assert entries(tmp_path / "empty") == ["a.txt"]


def test_a_folder_with_only_some_names_of_a_result_is_the_users(tmp_path):
    (tmp_path / "pictures").mkdir()
    with pytest.raises(
        FileAccessError, match=r"holds pictures but no counts\.csv, so it is not"
    ):
        check_replaceable(tmp_path, ["counts.csv", "pictures"])
    (tmp_path / "counts.csv").touch()
    check_replaceable(tmp_path, ["counts.csv", "pictures"])


def test_a_failure_leaves_the_earlier_folder(tmp_path):
    write_folder(tmp_path / "out")
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "out", ["a.txt"]) as folder:
        (folder / "a.txt").write_text("half")
        raise RuntimeError
    assert (tmp_path / "out" / "a.txt").read_text() == "new"
    assert entries(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_between_the_renames_restores_the_earlier_folder(tmp_path, monkeypatch, error):
    write_folder(tmp_path / "out")
    rename = os.rename

    def interrupted(source, target):
        if source.name == "new":
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(error):
        write_folder(tmp_path / "out", "newer")
    assert (tmp_path / "out" / "a.txt").read_text() == "new"
    assert entries(tmp_path) == ["out"]


def test_other_files_are_not_touched(tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.tex").touch()
    with pytest.raises(FileAccessError, match="thesis.tex"):
        write_folder(output)
    assert entries(output) == ["thesis.tex"] and entries(tmp_path) == ["out"]


def test_the_next_folder_removes_what_a_killed_process_left(tmp_path):
    # a restarted container gives the id of the killed process to this one
    left = tmp_path / f".out.{os.uname().nodename}.{os.getpid()}.01234567.tmp"
    (left / "new").mkdir(parents=True)
    write_folder(tmp_path / "out")
    assert entries(tmp_path) == ["out"]
