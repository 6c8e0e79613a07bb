"""``gw://`` addresses: downloaded once, converted once, checked against the first file's hash."""

import functools
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import gdown
import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import build_model
from detectron2.utils.file_io import PathManager

from gw_detectron.errors import (
    FileAccessError,
    MissingFileError,
    MissingPackageError,
    WeightsFileError,
)
from gw_detectron.weights import (
    CATALOG,
    fetching,
    load_checkpoint,
    load_weights,
    open_checkpoint,
)
from gw_detectron.weights.fetching import PublishedWeights, local_weights

from .synthetic import authors_state, make_network, training_checkpoint

NAME, FILE = "imagenet/R-18", "R-18-GW-S1-B1.pth"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and a catalog whose one file is small."""
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GW_DETECTRON_WEIGHTS", raising=False)
    monkeypatch.delenv("GW_DETECTRON_MIRROR", raising=False)
    published = PublishedWeights(FILE, "drive-id", "GW:groups=64,iters=5,eps=0")
    monkeypatch.setattr(fetching, "CATALOG", {NAME: published})
    patient = gdown.download

    def download(*args, **options):
        return patient(*args, **(options | {"timeout": (1, 30), "retries": 0}))

    monkeypatch.setattr(gdown, "download", download)
    return tmp_path / "cache" / "gw_detectron"


@pytest.fixture
def server(r18_file, tmp_path, monkeypatch):
    """The address of mirrors: one is fine, two have bad files."""
    data = r18_file.read_bytes()
    contents = {
        "fine": data,
        "webpage": b"<html>Please sign in</html>",
        "damaged": data[:-1000],
    }
    for folder, content in contents.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / FILE).write_bytes(content)

    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("GW_DETECTRON_MIRROR", f"{address}/fine")
        yield address
        server.shutdown()


def files(folder):
    return {
        path: path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def test_detectron2_loads_the_address(server, r18, detector_cfg, cache, monkeypatch):
    model = build_model(detector_cfg)
    DetectionCheckpointer(model).load(f"gw://{NAME}")
    assert torch.equal(model.backbone.bottom_up.stem.conv1.weight, r18["conv1.weight"])
    with PathManager.open(f"gw://{NAME}", "rb") as file:
        assert file.name == str(local_weights(NAME))

    written = files(cache)
    monkeypatch.setenv("GW_DETECTRON_MIRROR", f"{server}/missing")
    report = load_checkpoint(build_model(detector_cfg), open_checkpoint(f"gw://{NAME}"))
    assert str(report).startswith("backbone: 82/82 tensors")
    assert files(cache) == written


@pytest.mark.parametrize(
    ("fault", "message"), [("webpage", "web page"), ("damaged", "damaged")]
)
def test_files_of_a_bad_server_are_not_kept(server, cache, monkeypatch, fault, message):
    monkeypatch.setenv("GW_DETECTRON_MIRROR", f"{server}/{fault}")
    with pytest.raises(WeightsFileError, match=f"gw://{NAME} .'http.*{message}"):
        local_weights(NAME)
    assert not files(cache)

    monkeypatch.setenv("GW_DETECTRON_MIRROR", f"{server}/fine")
    assert local_weights(NAME).is_file()


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/weights/", "missing"])
def test_without_the_file(server, r18_file, cache, monkeypatch, address):
    base = address if "://" in address else f"{server}/{address}"
    monkeypatch.setenv("GW_DETECTRON_MIRROR", base)
    with pytest.raises(FileAccessError) as caught:
        local_weights(NAME)
    for part in (
        f"{base.rstrip('/')}/{FILE}",
        str(cache / FILE),
        "GW_DETECTRON_WEIGHTS",
    ):
        assert part in str(caught.value)

    cache.mkdir(parents=True, exist_ok=True)
    (cache / FILE).write_bytes(r18_file.read_bytes())  # saved there by hand
    assert local_weights(NAME).is_file()


def test_a_local_folder_comes_first_and_its_file_stays_the_same(
    r18_file, tmp_path, cache, monkeypatch
):
    folder = tmp_path / "mine"
    monkeypatch.setattr(gdown, "download", None)
    monkeypatch.setenv("GW_DETECTRON_WEIGHTS", str(folder))
    with pytest.raises(
        MissingFileError, match=f"{FILE}.*https://drive.google.com/uc.id="
    ):
        local_weights(NAME)

    folder.mkdir()
    (folder / FILE).write_bytes(r18_file.read_bytes())
    assert local_weights(NAME) == local_weights(NAME)

    state = authors_state(make_network("R-18", "S1-B1", seed=9))
    torch.save(state, folder / FILE)
    with pytest.raises(WeightsFileError, match="checksum"):
        local_weights(NAME)
    (cache / f"{FILE}.sha256").unlink()  # the fix
    tensors = load_weights(local_weights(NAME)).tensors
    assert torch.equal(tensors["stem.conv1.weight"], state["conv1.weight"])


@pytest.mark.parametrize("recorded", [True, False])
def test_the_mixture_with_gn_is_converted_as_gn(recorded, tmp_path, monkeypatch):
    """Its tensors are those of GW with a scale of (C,)."""
    published = CATALOG["imagenet/R-50-GN64"]
    state = make_network("R-50", "S1-B2").state_dict()
    torch.save(
        training_checkpoint(state) if recorded else state, tmp_path / published.file
    )
    monkeypatch.setattr(fetching, "CATALOG", {NAME: published})
    monkeypatch.setenv("GW_DETECTRON_WEIGHTS", str(tmp_path))

    norms = load_weights(local_weights(NAME)).positions

    assert norms == ("BN", "GN:groups=64,eps=1e-05", "S1-B2")


def test_unknown_names():
    with pytest.raises(ValueError, match="R-51.*gw://imagenet/R-18"):
        PathManager.get_local_path("gw://imagenet/R-51")


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "gdown", None)
    with pytest.raises(MissingPackageError, match="gdown"):
        local_weights(NAME)
