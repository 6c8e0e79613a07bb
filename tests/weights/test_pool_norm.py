"""The norm between the last average pooling and the classifier, for learning decorrelated features."""

import dataclasses

import pytest
import torch
from torch import nn

from gw_detectron.data import synthetic_images
from gw_detectron.errors import UnknownNormError
from gw_detectron.layers import BatchWhitening2d, GroupWhitening2d
from gw_detectron.modeling import add_pool_norm
from gw_detectron.norms import norm_spec
from gw_detectron.weights import convert, convert_file, load_weights, to_torchvision
from gw_detectron.weights.reference_networks import config_for, detectron2_classifier, torchvision_classifier
from gw_detectron.weights.verify import verify
from gw_detectron.weights.weights_io import write_weights

from .synthetic import authors_state, make_network, training_checkpoint

CHANNELS = 512
BW = "BW:channels=32,running=matrix"
# their statistics look like those of the usual norms; a rotation has more tensors
UNUSUAL = {
    "BW:channels=32,solver=zca,running=covariance": lambda: BatchWhitening2d(CHANNELS, 32, "zca", running="covariance"),
    "GW:groups=32": lambda: GroupWhitening2d(CHANNELS, 32),
    "BW:channels=32,rotation=cayley": lambda: BatchWhitening2d(CHANNELS, 32, rotation="cayley"),
}
NORMS = {
    "GW": lambda: GroupWhitening2d(CHANNELS),
    "BN": lambda: nn.BatchNorm2d(CHANNELS),
    "BW:channels=32,running=matrix": lambda: BatchWhitening2d(CHANNELS, 32),
    "BW:channels=64,running=covariance": lambda: BatchWhitening2d(CHANNELS, running="covariance"),
}


def source(norm: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Build a ResNet-18 with this norm before its classifier; return it and its weights with the authors' names."""
    network, layer = make_network("R-18", "S1-B1"), (NORMS | UNUSUAL)[norm]()
    torch.manual_seed(0)
    for _ in range(3):  # more columns than channels, correlated
        layer(torch.randn(200, CHANNELS, 1, 1) @ torch.randn(1, 1) + torch.rand(200, 1, 1, 1))
    nn.init.uniform_(layer.weight, 0.5, 1.5)
    nn.init.uniform_(layer.bias, -0.5, 0.5)
    rotation = "rotate.parametrizations.whole.original"
    if rotation in layer.state_dict():
        layer.load_state_dict(layer.state_dict() | {rotation: torch.randn_like(layer.state_dict()[rotation])})
    state = authors_state(network) | {f"last_bn.{name}": value.detach() for name, value in layer.state_dict().items()}
    if norm == "GW":  # scale and shift of the authors' layer for vectors
        state |= {f"last_bn.{name}": state[f"last_bn.{name}"][None] for name in ("weight", "bias")}
    network.avgpool = nn.Sequential(network.avgpool, layer)
    return network.eval(), state


@pytest.mark.parametrize(
    "norm", [norm if norm in ("BN", BW) else pytest.param(norm, marks=pytest.mark.slow) for norm in NORMS]
)
def test_both_classifiers_agree_with_the_source(norm, tmp_path):
    network, state = source(norm)
    torch.save(state, tmp_path / "r18.pth")
    stated = None if norm == "BN" else norm
    convert_file(tmp_path / "r18.pth", tmp_path / "r18.pkl", norm="GW", keep_fc=True, pool_norm=stated)
    conversion = load_weights(tmp_path / "r18.pkl")
    provenance = conversion.provenance
    assert conversion.pool_norm == norm

    x = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        expected = network(x)
        torch.testing.assert_close(torchvision_classifier(conversion, state)(x), expected, rtol=1e-4, atol=1e-4)
        ours = detectron2_classifier(conversion, config_for(provenance))
        torch.testing.assert_close(ours(x)["linear"], expected, rtol=1e-4, atol=1e-4)
    assert norm_spec(ours.avgpool.norm).startswith(norm.partition(":")[0])

    images = [image.resize((64, 64)) for image in synthetic_images(2)]
    found = verify(tmp_path / "r18.pkl", images, source=tmp_path / "r18.pth", norm="GW")
    assert found.agrees and found.subject.relative["logits"] < 1e-7


@pytest.mark.parametrize("norm", UNUSUAL)
def test_stated_norm_is_stored_with_the_weights(norm, tmp_path, caplog):
    caplog.set_level("WARNING", "gw_detectron")  # trainings of other tests leave DEBUG
    network, state = source(norm)
    torch.save(state, tmp_path / "r18.pth")
    convert_file(tmp_path / "r18.pth", tmp_path / "r18.pkl", norm="GW", keep_fc=True, pool_norm=norm)
    convert_file(tmp_path / "r18.pkl", tmp_path / "again.safetensors", keep_fc=True)
    for name in ("r18.pkl", "again.safetensors"):
        conversion = load_weights(tmp_path / name)
        provenance = conversion.provenance
        assert conversion.pool_norm == provenance.pool_norm == norm
        x = torch.randn(3, 3, 64, 64)
        with torch.no_grad():
            for model in (
                torchvision_classifier(conversion, state),
                detectron2_classifier(conversion, config_for(provenance)),
            ):
                found = model(x)
                logits = found["linear"] if isinstance(found, dict) else found
                torch.testing.assert_close(logits, network(x), rtol=1e-4, atol=1e-4)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("norm", [norm for norm in NORMS | UNUSUAL if norm != "BN"])
def test_unproven_norm_is_refused(norm):
    with pytest.raises(UnknownNormError, match=r"pool_norm \(last_bn\): .*do not show|GN or GW.*--pool-norm"):
        convert(source(norm)[1], norm="GW", keep_fc=True)


def test_flags_of_the_authors_script_record_the_norm():
    state = training_checkpoint(source("GW")[1])
    assert convert(state, keep_fc=True).pool_norm == "GW:groups=64,iters=5,eps=0"
    assert convert(source("BN")[1], norm="GW", keep_fc=True).pool_norm == "BN"


@pytest.mark.parametrize(("norm", "assumed"), [("GW:groups=32", "GW"), ("BN", "BN"), (BW, BW)])
def test_version_0_1_0_assumed_the_norm(norm, assumed, tmp_path, caplog):
    torch.save(source(norm)[1], tmp_path / "r18.pth")
    written = convert_file(tmp_path / "r18.pth", tmp_path / "a.pkl", norm="GW", keep_fc=True, pool_norm=norm)
    old = dataclasses.replace(written.provenance, whiten_norm=None, pool_norm=None)
    write_weights(tmp_path / "old.pkl", dataclasses.replace(written, provenance=old))
    caplog.clear()
    assert load_weights(tmp_path / "old.pkl").pool_norm == assumed
    assert (f"pool_norm ({assumed}): assumed" in caplog.text) == (norm != "BN")
    assert load_weights(tmp_path / "old.pkl", pool_norm=norm).pool_norm == norm


@pytest.mark.parametrize(
    ("norm", "stated", "words"),
    [
        (
            "BW:channels=32,rotation=cayley",
            "BW:channels=32",
            "1 unexpected, not part of BW:channels=32.*last_bn.rotate",
        ),
        (
            "BW:channels=32,rotation=cayley",
            "BW:channels=64,rotation=cayley",
            r"expected \(512, 64\): last_bn.running_matrix \(512, 32",
        ),
        ("GW", "BN", "2 missing: last_bn.running_mean"),
        ("BN", "GW", "2 unexpected, not part of GW, the norm before the classifier"),
        ("GW", "GW:groups=48", r"pool_norm \('GW:groups=48'\).* 512 channels"),
        ("GW", "XN", r"pool_norm \('XN'\): unknown norm"),
    ],
)
def test_norm_that_contradicts_the_tensors(norm, stated, words):
    with pytest.raises(ValueError, match=f"(?s){words}"):
        convert(source(norm)[1], norm="GW", keep_fc=True, pool_norm=stated)


def test_pool_norm_needs_the_classifier():
    with pytest.raises(ValueError, match=r"pool_norm \('GW'\): needs the classifier. Fix: add keep_fc"):
        convert(source("GW")[1], norm="GW", pool_norm="GW")


def test_to_torchvision_restores_the_names():
    state = source("BN")[1]
    renamed = to_torchvision(convert(state, norm="GW", keep_fc=True).tensors)
    kept = {name for name in state if not name.endswith("num_batches_tracked")}
    assert renamed.keys() == kept
    assert all(torch.equal(renamed[name], state[name].reshape(renamed[name].shape)) for name in kept)


def test_norm_is_dropped_with_the_classifier():
    conversion = convert(source("GW")[1], norm="GW")
    assert conversion.pool_norm == ""
    assert not any(name.startswith("avgpool") for name in conversion.tensors)
    assert {row.note for row in conversion.rows if row.source.startswith("last_bn")} == {
        "norm before the classifier, not part of the backbone"
    }


def test_unused_norm_of_the_authors_resnexts_is_dropped():
    state = authors_state(make_network("X-50-32x4d", "S1-B2"))
    state |= {"last_bn.weight": torch.ones(1, 2048), "last_bn.bias": torch.zeros(1, 2048)}
    assert convert(state, norm="GW", keep_fc=True).pool_norm == ""
    assert "avgpool.norm.weight" in convert(state, norm="GW", keep_fc=True, pool_norm="GW").tensors


def test_missing_tensor_of_the_norm():
    state = source("BN")[1]
    del state["last_bn.running_mean"]
    with pytest.raises(ValueError, match="1 missing: last_bn.running_mean"):
        convert(state, norm="GW", keep_fc=True)


@pytest.mark.parametrize("norm", ["GW:groups=16,solver=zca,eps=0", "BW:channels=32,solver=zca,eps=0"])
def test_norm_decorrelates_pooled_features(norm):
    """Groups of a sample under GW, channels over the batch under BW."""
    network = make_network("R-18").double()
    add_pool_norm(network, norm, CHANNELS)
    features = torch.randn(100, CHANNELS, 7, 7, dtype=torch.float64) + torch.randn(100, CHANNELS, 1, 1)
    pooled = network.avgpool.double().train()(features)
    rows = pooled[0].reshape(16, -1) if norm.startswith("GW") else pooled[:, :32, 0, 0].T
    covariance = rows @ rows.mT / rows.shape[1]
    torch.testing.assert_close(covariance, torch.eye(len(rows), dtype=torch.float64), rtol=0, atol=1e-8)


def test_norm_that_does_not_fit():
    with pytest.raises(ValueError, match="'GW:groups=48'.* 512 channels"):
        add_pool_norm(make_network("R-18"), "GW:groups=48", CHANNELS)
