"""Atomic writes: files appear complete or not at all, whoever else writes or is killed."""

import os
import signal
import subprocess
import sys

import pytest
from detectron2.utils.file_io import PathManager

from gw_detectron.atomic import AtomicPathManager, atomic_write, remove_unfinished
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


def test_a_folder_that_is_gone_is_named(tmp_path):
    with (
        pytest.raises(FileAccessError, match="gone/model.pth': was not written"),
        AtomicPathManager(PathManager).open(str(tmp_path / "gone" / "model.pth"), "wb"),
    ):
        pass


def test_an_error_of_the_caller_passes_and_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), AtomicPathManager(PathManager).open(str(tmp_path / "a"), "w") as file:
        file.write("half")
        raise KeyError("caller")
    assert not list(tmp_path.iterdir())


def test_everything_else_is_left_to_the_path_manager(tmp_path):
    (tmp_path / "a").write_text("text")
    writer = AtomicPathManager(PathManager)
    with writer.open(str(tmp_path / "a"), "r") as file:
        assert file.read() == "text"
    assert writer.exists(str(tmp_path / "a")) and writer.ls(str(tmp_path)) == ["a"]


def test_a_read_error_in_the_body_is_not_reported_as_a_failed_write(tmp_path):
    with pytest.raises(FileNotFoundError, match="source") as raised, atomic_write(tmp_path / "a"):
        (tmp_path / "source").read_bytes()
    assert not isinstance(raised.value, FileAccessError)


def test_two_writers_of_one_file_do_not_mix_and_the_last_one_stays(tmp_path):
    path = tmp_path / "model.pth"
    writer = AtomicPathManager(PathManager)
    with writer.open(str(path), "wb") as first, writer.open(str(path), "wb") as second:
        first.write(b"first" * 10_000)
        second.write(b"second" * 10_000)
    assert path.read_bytes() == b"first" * 10_000
    assert list(tmp_path.iterdir()) == [path]


def test_unfinished_files_of_dead_processes_are_removed_and_no_others(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with atomic_write(tmp_path / "model_0000001.pth") as mine:
        mine.write_bytes(b"half")
        theirs = mine.with_name(mine.name.replace(f".{os.getpid()}.", f".{dead.pid}."))
        elsewhere = theirs.with_name(theirs.name.replace(os.uname().nodename, "another-host"))
        (tmp_path / "notes.tmp").write_text("the user's")
        for path in (theirs, elsewhere):
            path.write_bytes(b"half")
        remove_unfinished(str(tmp_path))
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([mine.name, elsewhere.name, "notes.tmp"])
