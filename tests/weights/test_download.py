"""Downloads from servers that work, break off, stall, redirect, or declare a wrong length."""

import os
import sys

import pytest

from gw_detectron.errors import FileAccessError
from gw_detectron.weights.download import _failed, download

from .server import serving

DATA = os.urandom(3 * 2**20)


@pytest.fixture
def server():
    with serving(DATA) as server:
        yield server


def _get(server, fault, folder, retries=0):
    download(server.url(fault), folder / "file", timeout=(2, 0.3), retries=retries)
    return (folder / "file").read_bytes()


@pytest.mark.parametrize("fault", ["fine", "redirect"])
def test_whole_file(server, fault, tmp_path):
    assert _get(server, fault, tmp_path) == DATA
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_broken_transfer_is_resumed(server, tmp_path):
    with pytest.raises(FileAccessError, match="incomplete"):
        _get(server, "breaks-off", tmp_path)
    assert not (tmp_path / "file").exists()
    (part,) = tmp_path.iterdir()
    have = part.stat().st_size
    assert 0 < have < len(DATA)
    assert _get(server, "fine", tmp_path) == DATA
    assert server.requests[-1] == f"bytes={have}-"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_broken_transfer_is_retried(server, tmp_path):
    assert _get(server, "breaks-off", tmp_path, retries=6) == DATA
    assert len(server.requests) > 2


def test_server_without_ranges_restarts_the_download(server, tmp_path):
    with pytest.raises(FileAccessError):
        _get(server, "no-ranges", tmp_path)
    with pytest.raises(FileAccessError, match="incomplete"):
        _get(server, "no-ranges", tmp_path)
    assert server.requests[-1] == ""  # a part that cannot be resumed is discarded


def test_stalled_transfer_times_out(server, tmp_path):
    with pytest.raises(FileAccessError, match="[Tt]imed out"):
        _get(server, "stalls", tmp_path)
    assert not (tmp_path / "file").exists()


def test_declared_length_above_the_sent_one(server, tmp_path):
    with pytest.raises(FileAccessError, match=f"received {len(DATA)} bytes|incomplete"):
        _get(server, "declares-longer", tmp_path)
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(("fault", "message"), [("missing", "404"), ("loop", "redirects")])
def test_errors_of_the_server(server, fault, message, tmp_path):
    with pytest.raises(FileAccessError, match=f"download failed: .*{message}.*Fix: try again"):
        _get(server, fault, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_server(tmp_path):
    with serving(b"") as server:
        url = server.url()
    with pytest.raises(FileAccessError, match=r"download failed: [^(]*Connection refused\. Fix: try again"):
        download(url, tmp_path / "file", timeout=(1, 1), retries=0)


def test_the_innermost_cause_is_told():
    nested = (
        "HTTPSConnectionPool(host='a.b', port=443): Max retries exceeded with url: /x (Caused by NameResolutionError("
    )
    cause = (
        "\"HTTPSConnection(host='a.b', port=443): Failed to resolve 'a.b' ([Errno -2] Name or service not known)\"))"
    )
    message = str(_failed("https://a.b/x", f"Download failed: {nested}{cause}"))
    assert "download failed: Failed to resolve 'a.b' ([Errno -2] Name or service not known). Fix: " in message


def test_parts_of_two_parallel_downloads(server, tmp_path):
    (tmp_path / "file12345678.part").write_bytes(DATA[:100])
    (tmp_path / "fileabcdefgh.part").write_bytes(DATA[:200])
    assert _get(server, "fine", tmp_path) == DATA
    assert server.requests[-1] == "bytes=200-"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_missing_package(server, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gdown", None)
    with pytest.raises(FileAccessError, match=r'run pip install "gw-detectron\[weights\]"'):
        _get(server, "fine", tmp_path)
