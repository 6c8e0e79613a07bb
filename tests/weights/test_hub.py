"""``gw://hf/`` addresses, against a local server with the headers of the Hugging Face hub."""

import ast
import hashlib
import pickle
import sys
from pathlib import Path

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.utils.file_io import PathManager
from safetensors.torch import save

from gw_detectron.checkpoint import load_checkpoint, open_checkpoint
from gw_detectron.errors import FileAccessError, MissingPackageError, UnknownNormError
from gw_detectron.weights import convert_file, local_weights
from gw_detectron.weights import hub as hub_module

from .server import serving


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    for name in ("HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "gw_detectron"


@pytest.fixture(scope="module")
def weights(r18_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "backbone.safetensors"
    convert_file(r18_file, path)
    return path.read_bytes()


@pytest.fixture
def hub(weights, monkeypatch):
    with serving(weights) as server:
        publish(server, weights)
        monkeypatch.setenv("HF_ENDPOINT", server.url("").rstrip("/"))
        yield server


def publish(server, data):
    server.data, server.etag = data, f'"{hashlib.sha256(data).hexdigest()}"'


def test_a_detector_loads_the_weights_of_a_repository(hub, r18, detector_cfg):
    report = load_checkpoint(model := build_model(detector_cfg), open_checkpoint("gw://hf/fine/repo"))
    assert str(report).startswith("backbone: 82/82 tensors; FPN and heads start new")
    assert torch.equal(model.backbone.bottom_up.stem.conv1.weight, r18["conv1.weight"])


@pytest.mark.parametrize("name", ["redirect/repo", "fine/repo/sub/R-18.safetensors", "fine/repo@v1.0"])
def test_redirect_file_and_revision(hub, name):
    assert local_weights(f"hf/{name}").is_file()


def test_downloaded_and_converted_once(hub):
    first = PathManager.get_local_path("gw://hf/fine/repo")
    assert PathManager.get_local_path("gw://hf/fine/repo/backbone.safetensors") == first
    assert len(hub.requests) == 1


def test_the_cache_serves_without_a_connection(hub, monkeypatch):
    first = local_weights("hf/fine/repo")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert local_weights("hf/fine/repo") == first


def test_a_new_commit_of_a_branch_is_fetched(hub, weights):
    first = local_weights("hf/fine/repo")
    publish(hub, weights[:-1] + bytes([weights[-1] ^ 1]))  # one bit of a weight
    assert local_weights("hf/fine/repo") != first
    publish(hub, weights)
    assert local_weights("hf/fine/repo") == first
    assert len(hub.requests) == 2


def test_the_token_is_sent_to_the_hub_alone(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert local_weights("hf/other-host/repo").is_file()
    assert {host for host, token in hub.tokens if token} == {"127.0.0.1"}
    assert ("127.0.0.1", "Bearer hf_secret") in hub.tokens and ("localhost", "") in hub.tokens


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", r"status 404. Fix: check owner, repository, file and revision; or download"),
        ("private", r"status 401. Fix: check owner and repository; if it is private, set HF_TOKEN"),
        ("gated", r"status 403. Fix: accept the conditions on its page, and set HF_TOKEN"),
        ("truncated", r"file should be of size \d+ but has size \d+.*Fix: check the connection"),
    ],
)
def test_errors_of_the_hub(hub, fault, message):
    address = f"gw://hf/{fault}/repo"
    with pytest.raises(FileAccessError, match=rf"^weights \('{address}'\): not in the cache.*{message}"):
        PathManager.get_local_path(address)


def test_offline_with_an_empty_cache(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with pytest.raises(
        FileAccessError, match=r"refused.* Fix: check the connection and HF_ENDPOINT; or download .*gw://file/"
    ):
        local_weights("hf/owner/repo")


def test_another_hash_than_the_hubs_is_refused_and_not_kept(hub, weights):
    publish(hub, weights)
    hub.data = weights[:-1] + bytes([weights[-1] ^ 1])
    with pytest.raises(ValueError, match=r"the SHA-256 is \w{64}, the hub's is \w{64}.*Fix: try again"):
        local_weights("hf/fine/repo")
    hub.data = weights
    assert local_weights("hf/fine/repo").is_file()


def test_weights_without_norms_are_refused(hub, r18):
    publish(hub, save({name: value.contiguous() for name, value in r18.items()}))
    with pytest.raises(UnknownNormError, match="Fix: state it, e.g. --norm GW"):
        local_weights("hf/fine/repo")


def test_a_pickle_under_the_name_of_safetensors_is_refused(hub):
    publish(hub, pickle.dumps({"model": {}}))
    with pytest.raises(ValueError, match="its name ends in .safetensors, but it is a"):
        local_weights("hf/fine/repo")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("repo", "incomplete address"),
        ("owner/", "incomplete address"),
        ("owner/repo@", "incomplete address"),
        ("owner/repo/model.pkl", "not a safetensors file"),
        ("owner/re--po..", "Fix: give another name"),
    ],
)
def test_wrong_addresses(name, message):
    with pytest.raises(ValueError, match=message):
        local_weights(f"hf/{name}")


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackageError, match=r'pip install "gw-detectron\[weights\]"'):
        local_weights("hf/owner/repo")


def test_the_client_is_imported_at_use_alone():
    body = ast.parse(Path(hub_module.__file__).read_text()).body
    imports = [ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports and not any("huggingface_hub" in line for line in imports)
