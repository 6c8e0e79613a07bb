"""Atomic writes: files and folders appear complete or not at all, whoever else writes or is killed."""

import errno
import os
import signal

import pytest
from detectron2.utils.file_io import PathManager

from gw_detectron.atomic import (
    AtomicPathManager,
    atomic_folder,
    atomic_write,
    check_replaceable,
    remove_unfinished,
    write_text,
)
from gw_detectron.errors import FileAccessError


def entries(path):
    return sorted(entry.name for entry in path.iterdir())


def save(path, content):
    with AtomicPathManager(PathManager).open(str(path), "wb") as file:
        file.write(content)
        file.flush()
        if content == b"killed":
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path):
    path = tmp_path / "model.pth"
    save(path, b"old")

    child = os.fork()
    if child == 0:
        save(path, b"killed")
    _, status = os.waitpid(child, 0)

    assert os.WTERMSIG(status) == signal.SIGKILL
    assert path.read_bytes() == b"old"

    save(path, b"newer")
    remove_unfinished(str(tmp_path))
    assert path.read_bytes() == b"newer"
    assert entries(tmp_path) == ["model.pth"]


def test_a_text_is_written_in_utf_8(tmp_path):
    path = tmp_path / "classes.txt"

    write_text(path, "né, ネコ\n")

    assert path.read_bytes() == "né, ネコ\n".encode()
    assert entries(tmp_path) == ["classes.txt"]


def test_an_error_of_the_caller_passes_and_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), atomic_write(tmp_path / "a") as temporary:
        temporary.write_text("half")
        raise KeyError("caller")

    assert entries(tmp_path) == []


def test_a_read_error_in_the_body_is_not_reported_as_a_failed_write(tmp_path):
    source = tmp_path / "source"
    with (
        pytest.raises(FileNotFoundError, match="source") as raised,
        atomic_write(tmp_path),
    ):
        source.read_bytes()

    assert not isinstance(raised.value, FileAccessError)


@pytest.mark.parametrize(
    "error", [OSError("image file is truncated"), ConnectionResetError(104, "reset")]
)
def test_an_error_without_a_file_is_the_callers(tmp_path, error):
    with pytest.raises(type(error)) as raised, atomic_write(tmp_path / "a"):
        raise error

    assert raised.value is error


def test_a_full_disk_is_an_error_of_the_file(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        pytest.raises(FileAccessError, match="free disk space"),
        atomic_write(tmp_path / "a"),
    ):
        raise full


@pytest.mark.parametrize("name", ["n" * 255, "\N{CJK UNIFIED IDEOGRAPH-732B}" * 85])
def test_the_longest_name_is_written_and_a_longer_one_named(tmp_path, name):
    write_text(tmp_path / name, "new")
    assert entries(tmp_path) == [name]

    with pytest.raises(FileAccessError, match=r"too long\. Fix: give a shorter name"):
        write_text(tmp_path / f"{name}n", "new")


def test_unfinished_files_are_removed_and_no_others(tmp_path):
    (tmp_path / ".model.pth.01234567.tmp").write_bytes(b"half")
    (tmp_path / ".pictures.89abcdef.tmp").mkdir()
    users = ["notes.tmp", ".notes.tmp", "model.pth"]
    for name in users:
        (tmp_path / name).write_text("the user's")

    remove_unfinished(tmp_path)

    assert entries(tmp_path) == sorted(users)


def write_folder(output, text="new"):
    with atomic_folder(output, ["a.txt"]) as folder:
        file = folder / "a.txt"
        file.write_text(text)


def test_a_folder_is_created_and_replaced(tmp_path):
    output = tmp_path / "some" / "out"

    write_folder(output)
    write_folder(output, "newer")

    assert (output / "a.txt").read_text() == "newer"
    assert entries(output.parent) == ["out"]


def test_an_empty_folder_is_used(tmp_path):
    write_folder(tmp_path)

    assert entries(tmp_path) == ["a.txt"]


def test_a_folder_with_only_some_names_of_a_result_is_the_users(tmp_path):
    result = ["counts.csv", "pictures"]
    (tmp_path / "pictures").mkdir()
    with pytest.raises(FileAccessError, match=r"holds pictures but no counts\.csv"):
        check_replaceable(tmp_path, result)

    (tmp_path / "counts.csv").touch()
    check_replaceable(tmp_path, result)


def test_a_failure_leaves_the_earlier_folder(tmp_path):
    output = tmp_path / "out"
    write_folder(output)

    with pytest.raises(RuntimeError), atomic_folder(output, ["a.txt"]) as folder:
        (folder / "a.txt").write_text("half")
        raise RuntimeError

    assert (output / "a.txt").read_text() == "new"
    assert entries(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_between_the_renames_restores_the_earlier_folder(
    tmp_path, monkeypatch, error
):
    output = tmp_path / "out"
    write_folder(output)
    rename = os.rename

    def interrupted(source, target):
        if source.name == "new":
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(error):
        write_folder(output, "newer")

    assert (output / "a.txt").read_text() == "new"
    assert entries(tmp_path) == ["out"]


def test_other_files_are_not_touched(tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.tex").touch()

    with pytest.raises(FileAccessError, match="thesis.tex"):
        write_folder(output)

    assert entries(output) == ["thesis.tex"]
    assert entries(tmp_path) == ["out"]
