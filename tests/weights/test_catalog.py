"""``gw://`` addresses: downloaded once, converted once, checked against the first file's hash."""

import json

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import build_model
from detectron2.utils.file_io import PathManager

from gw_detectron.checkpoint import load_checkpoint, open_checkpoint
from gw_detectron.errors import FileAccessError, WeightsFileError
from gw_detectron.weights import CATALOG, PublishedWeights, catalog, convert, convert_file, local_weights
from gw_detectron.weights.norm_inference import norm_key
from gw_detectron.weights.weights_io import load_weights

from .server import serving
from .synthetic import authors_state, make_network, training_checkpoint

NAME, FILE = "imagenet/R-18", "R-18-GW-S1-B1.pth"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and a catalog whose one file is small."""
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GW_DETECTRON_WEIGHTS", raising=False)
    monkeypatch.delenv("GW_DETECTRON_MIRROR", raising=False)
    record = PublishedWeights("R-18", "drive-id", 50.0, positions="S1-B1")
    monkeypatch.setattr(catalog, "CATALOG", {record.name: record})
    monkeypatch.setattr(catalog, "download", _impatient(catalog.download))
    return tmp_path / "cache" / "gw_detectron"


def _impatient(download):
    return lambda url, path: download(url, path, timeout=(1, 1), retries=0)


@pytest.fixture
def server(r18_file, monkeypatch):
    with serving(r18_file.read_bytes()) as server:
        monkeypatch.setenv("GW_DETECTRON_MIRROR", server.url())
        yield server


def test_records_of_the_published_files():
    assert {record.name: (record.drive_id, record.top1) for record in CATALOG.values()} == {
        "imagenet/R-50": ("1bNeTDhfu5jg8aBatOCSQAe_WzTouUfHA", 77.72),
        "imagenet/R-101": ("1BnuzZzpaQ6rgBHho5mOQhBWBh1Lh-trK", 78.71),
        "imagenet/X-50-32x4d": ("1pJSIbjeHpELJ5zlWOF6ekRGjykRYf6tO", 78.43),
        "imagenet/X-101-32x8d": ("1lVAvTSCnHs-Ij5gt7ubQvLmZzUQdKUNt", 80.43),
        "imagenet/R-50-GN64": ("1xqGsCDD4Y_rv6PjTtACAs8D918fjUT55", None),
        "imagenet/R-50-GN64-advanced": ("1pHRhjc67M5wki5fWy44SG5lj06q71gat", None),
    }
    assert len({record.file for record in CATALOG.values()}) == len(CATALOG)
    for record in CATALOG.values():
        assert record.url == f"https://drive.google.com/uc?id={record.drive_id}"
        assert record.positions == "S1-B2"


def test_detectron2_loads_the_address(server, r18, detector_cfg):
    model = build_model(detector_cfg)
    DetectionCheckpointer(model).load(f"gw://{NAME}")
    report = load_checkpoint(build_model(detector_cfg), open_checkpoint(f"gw://{NAME}"))
    assert str(report).startswith("backbone: 82/82 tensors; FPN and heads start new")
    value = model.backbone.bottom_up.stem.conv1.weight
    assert torch.equal(value, r18["conv1.weight"])


def test_downloaded_and_converted_once(server, cache):
    first = PathManager.get_local_path(f"gw://{NAME}")
    written = {path: path.stat().st_mtime_ns for path in cache.iterdir() if path.suffix != ".lock"}
    assert PathManager.get_local_path(f"gw://{NAME}") == first
    assert written == {path: path.stat().st_mtime_ns for path in cache.iterdir() if path.suffix != ".lock"}
    assert len(server.requests) == 1
    with PathManager.open(f"gw://{NAME}", "rb") as file:
        assert file.read(1) == b"\x80"


def test_first_hash_is_recorded_and_others_are_refused(server, cache, tmp_path):
    local_weights(NAME)
    note = json.loads((cache / "R-18-GW-S1-B1.json").read_text())
    assert note["source"].endswith(FILE)
    (cache / FILE).unlink()
    (cache / "R-18-GW-S1-B1.pkl").unlink()
    server.data = _other_weights(tmp_path)
    with pytest.raises(WeightsFileError, match=f"gw://{NAME} with SHA-256 {note['source_sha256']}, recorded .*json"):
        local_weights(NAME)
    assert not (cache / "R-18-GW-S1-B1.pkl").exists()


def _other_weights(tmp_path):
    torch.save(authors_state(make_network("R-18", "S1-B1", seed=9)), tmp_path / "other.pth")
    return (tmp_path / "other.pth").read_bytes()


def test_damaged_conversion_is_repeated(server, cache):
    path = local_weights(NAME)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + b"x")
    assert local_weights(NAME).read_bytes() == good
    assert len(server.requests) == 1


@pytest.mark.parametrize(("fault", "message"), [("webpage", "web page"), ("declares-shorter", "cut off")])
def test_files_of_a_bad_server_are_not_kept(server, cache, monkeypatch, fault, message):
    monkeypatch.setenv("GW_DETECTRON_MIRROR", server.url(fault))
    with pytest.raises(WeightsFileError, match=f"(?s)gw://{NAME} .'http.*{message}.*try again"):
        local_weights(NAME)
    assert [path.name for path in cache.iterdir()] == [f"{FILE}.lock"]
    monkeypatch.setenv("GW_DETECTRON_MIRROR", server.url())
    assert local_weights(NAME).is_file()


def test_offline_with_an_empty_cache(cache, monkeypatch):
    monkeypatch.setenv("GW_DETECTRON_MIRROR", "http://127.0.0.1:9/weights/")
    with pytest.raises(FileAccessError) as caught:
        local_weights(NAME)
    message = str(caught.value)
    assert f"save http://127.0.0.1:9/weights/{FILE} as {cache / FILE}" in message
    assert f"GW_DETECTRON_WEIGHTS to a folder with {FILE}" in message


def test_file_saved_in_the_cache_by_hand(r18_file, cache, monkeypatch):
    monkeypatch.setattr(catalog, "download", None)
    cache.mkdir(parents=True)
    (cache / FILE).write_bytes(r18_file.read_bytes())
    assert local_weights(NAME) == cache / "R-18-GW-S1-B1.pkl"


def test_local_folder_comes_first(r18_file, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(catalog, "download", None)
    monkeypatch.setenv("GW_DETECTRON_WEIGHTS", str(tmp_path / "mine"))
    with pytest.raises(
        FileNotFoundError, match=f"{FILE} not found, needed .* save https://drive.google.com/uc.id=drive-id"
    ):
        local_weights(NAME)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / FILE).write_bytes(r18_file.read_bytes())
    assert local_weights(NAME) == local_weights(NAME) == cache / "R-18-GW-S1-B1.pkl"
    (tmp_path / "mine" / FILE).write_bytes(_other_weights(tmp_path))
    with pytest.raises(WeightsFileError, match="to trust the new file, remove"):
        local_weights(NAME)


def test_weights_of_another_network(server, monkeypatch):
    record = PublishedWeights("R-18", "drive-id", 50.0, positions="S1-B2")
    monkeypatch.setattr(catalog, "CATALOG", {record.name: record})
    with pytest.raises(WeightsFileError, match=r"positions \('S1-B2'\): the weights have BN, GW.* at S1-B1"):
        local_weights(NAME)


@pytest.mark.parametrize("recorded", [True, False])
def test_the_mixture_with_gn_is_converted_as_gn(recorded, tmp_path, monkeypatch):
    """Its tensors are those of GW with a scale of (C,); checkpoints of the authors' script record the norm."""
    record = next(record for record in CATALOG.values() if record.label == "GN64")
    state = make_network("R-50", record.positions).state_dict()
    checkpoint = training_checkpoint(state)
    checkpoint["cfg"].norm, checkpoint["cfg"].norm_cfg = "GN", {"num_groups": 64}
    torch.save(checkpoint if recorded else state, tmp_path / record.file)
    monkeypatch.setattr(catalog, "CATALOG", {record.name: record})
    monkeypatch.setenv("GW_DETECTRON_WEIGHTS", str(tmp_path))
    norms = load_weights(local_weights(record.name)).provenance.norms
    assert (norms.norm, norms.positions) == ("BN", "S1-B2")
    assert norm_key(norms.whiten_norm, 64) == norm_key("GN:groups=64", 64)


def test_damaged_record(server, cache):
    local_weights(NAME)
    (cache / "R-18-GW-S1-B1.json").write_text("{")
    with pytest.raises(WeightsFileError, match=r"R-18-GW-S1-B1\.json': damaged record"):
        local_weights(NAME)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_local_file_by_its_path(r18, r18_file, tmp_path, suffix):
    path = r18_file
    if suffix == ".safetensors":
        path = tmp_path / "mine.safetensors"
        convert_file(r18_file, path)
    found = PathManager.get_local_path(f"gw://file/{path}")
    assert PathManager.get_local_path(f"gw://file/{path}") == found
    assert found.endswith(".pkl")
    assert torch.equal(
        load_weights(found).tensors["res2.0.conv1.weight"], convert(r18, norm="GW").tensors["res2.0.conv1.weight"]
    )


def test_unknown_names():
    with pytest.raises(
        ValueError, match=r"gw://imagenet/R-51'\): unknown name. Fix: give gw://imagenet/R-18, gw://file/<path> or"
    ):
        PathManager.get_local_path("gw://imagenet/R-51")
    with pytest.raises(FileNotFoundError, match=r"none\.pth'\): file not found"):
        PathManager.get_local_path("gw://file/none.pth")


def test_damaged_conversion_of_a_local_file_is_repeated(r18_file):
    converted = catalog.local_weights(f"file/{r18_file}")
    whole = converted.read_bytes()
    converted.write_bytes(whole[: len(whole) // 2])
    assert catalog.local_weights(f"file/{r18_file}").read_bytes() == whole


def test_a_file_replaced_after_hashing_does_not_enter_the_cache(r18_file, tmp_path, monkeypatch):
    path = tmp_path / "mine.pth"
    path.write_bytes(r18_file.read_bytes())
    convert_now = catalog.convert_file

    def replace_and_convert(source, *args, **kwargs):
        source.write_bytes(_other_weights(tmp_path))
        return convert_now(source, *args, **kwargs)

    monkeypatch.setattr(catalog, "convert_file", replace_and_convert)
    with pytest.raises(WeightsFileError, match="the file was replaced. Fix: try again"):
        local_weights(f"file/{path}")
    monkeypatch.setattr(catalog, "convert_file", convert_now)
    converted = load_weights(local_weights(f"file/{r18_file}"))
    assert torch.equal(converted.tensors["stem.conv1.weight"], load_weights(r18_file).tensors["stem.conv1.weight"])
