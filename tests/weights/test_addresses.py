"""Addresses of weights, jsons and photos: no spelling of one writes a file outside of the download cache."""

import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from detectron2.utils.file_io import PathManager
from iopath.common import file_io

from gw_detectron.errors import RefusedFileError, UserError
from gw_detectron.weights import open_checkpoint, register_weights
from gw_detectron.weights.fetching import CachedURLHandler, check_address
from gw_detectron.workbench.dataset.coco_content import read_json

LINE = b"import os\n"  # Python would run it in a .pth file beside its packages


class AnyPath(SimpleHTTPRequestHandler):
    """Answer each request with the same line, as a server of attacks would."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(LINE)))
        self.end_headers()
        self.wfile.write(LINE)

    def log_message(self, *args):
        pass


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A server beside a cache three folders deep."""
    register_weights()
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "a" / "b" / "cache"))
    with ThreadingHTTPServer(("127.0.0.1", 0), AnyPath) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def outside(tmp_path):
    cache = tmp_path / "a" / "b" / "cache"
    return [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and not path.is_relative_to(cache)
    ]


@pytest.mark.parametrize(
    "path",
    [
        "../../x.pth",
        "a/../../../x.pth",
        "%2e%2e/%2E./x.pth",
        "%252e%252e/x.pth",
        "..\\..\\x.pth",
        "..%5c..%5cx.pth",
        "//../../x.pth",
        "a?b=/../../x.pth",
        ".\t./.\t./x.pth",
        "my weights.pth",
    ],
)
@pytest.mark.parametrize("scheme", ["{host}/", "detectron2://", "catalog://", "gw://"])
def test_an_address_cannot_leave_the_cache(host, tmp_path, scheme, path):
    address = scheme.format(host=host) + path
    for read in (open_checkpoint, PathManager.get_local_path, read_json):
        # RuntimeError: Detectron2's catalog lacks the name
        with pytest.raises((UserError, RuntimeError)):
            read(address)
    assert outside(tmp_path) == []


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_link_in_the_cache_is_not_followed(host, tmp_path, kind):
    folder = (
        tmp_path
        / "a"
        / "b"
        / "cache"
        / "urls_http"
        / host.removeprefix("http://").replace(":", "_")
    )
    folder.mkdir(parents=True)
    target = tmp_path if kind == "folder" else tmp_path / "x.pth"
    (folder / ("link" if kind == "folder" else "x.pth")).symlink_to(target)
    with pytest.raises(RefusedFileError, match="link"):
        PathManager.get_local_path(
            f"{host}/link/x.pth" if kind == "folder" else f"{host}/x.pth"
        )
    assert outside(tmp_path) == []


def test_a_host_cannot_replace_the_files_of_another(host, tmp_path):
    path = PathManager.get_local_path(
        f"{host}/detectron2/ImageNetPretrained/MSRA/R-50.pkl"
    )
    cache = tmp_path / "a" / "b" / "cache"
    assert path.startswith(str(cache / "urls_http" / "127.0.0.1_"))
    assert not (cache / "detectron2").exists()


@pytest.mark.parametrize("name", ["127.0.0.1:9", "dl.fbaipublicfiles.com"])
def test_http_cannot_replace_the_files_of_https(tmp_path, monkeypatch, name):
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path))
    monkeypatch.setattr(file_io, "download", download)

    paths = [
        CachedURLHandler()._get_local_path(f"{scheme}://{name}/a/x.pth")
        for scheme in ("http", "https", "ftp")
    ]

    assert [Path(path).read_text() for path in paths] == ["http", "https", "ftp"]
    # as in caches of earlier versions
    folder = "" if name.startswith("dl") else "urls/127.0.0.1_9"
    assert Path(paths[1]) == tmp_path / folder / "a" / "x.pth"


def download(address, folder, *, filename):
    """Write the scheme of an address into its file."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder, filename)
    path.write_text(address.partition(":")[0])
    return str(path)


@pytest.mark.parametrize("read", [open_checkpoint, read_json])
def test_a_bad_download_names_the_file_to_delete(host, read):
    address = f"{host}/x.json"

    with pytest.raises(UserError, match="Fix: .*delete '.*'") as raised:
        read(address)

    path = Path(str(raised.value).split("delete '")[1].rstrip("'."))
    assert path.read_bytes() == LINE
    path.unlink()
    with pytest.raises(UserError):
        read(address)
    assert path.is_file()  # fetched again


@pytest.mark.parametrize("read", [open_checkpoint, read_json])
def test_a_bad_file_of_the_user_is_not_to_be_deleted(tmp_path, read):
    path = tmp_path / "x.json"
    path.write_bytes(LINE)
    with pytest.raises(UserError, match="Fix: ") as raised:
        read(str(path))
    assert "delete" not in str(raised.value)


def test_plain_addresses_pass():
    for address in (
        "output/../x.pth",
        "gw://imagenet/R-50",
        "http://host/a..b/x.pth?c=d..e",
        "http://host/a.../x",
    ):
        check_address(address)
