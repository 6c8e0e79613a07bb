"""Converted weights on disk: atomic, with record and config, loadable by stock Detectron2; verified; by command."""

import pickle
import shutil

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import get_cfg
from detectron2.modeling import build_model
from safetensors.torch import save_file

from gw_detectron import add_gw_config
from gw_detectron.errors import UnknownNormError, UserError, WeightsFileError
from gw_detectron.weights import (
    convert,
    convert_file,
    load_checkpoint,
    load_weights,
    open_checkpoint,
)
from gw_detectron.weights.network import PREPROCESSING, TORCHVISION
from gw_detectron.weights.reading import sha256_of
from gw_detectron.weights.verify import verify
from gw_detectron.workbench.commands import weights as weights_command
from gw_detectron.workbench.console import errors_reported
from gw_detectron.workbench.images.samples import sample_images

from .synthetic import authors_state, make_network


@pytest.fixture(scope="module")
def images():
    return [image.resize((64, 64)) for image in sample_images(2)]


@pytest.fixture(scope="module")
def converted(r18_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("converted") / "r18.pkl"
    convert_file(r18_file, path)
    return path


def test_writes_tensors_and_record(r18, r18_file, tmp_path):
    convert_file(r18_file, tmp_path / "a.pkl")
    conversion = load_weights(tmp_path / "a.pkl")
    expected = convert(r18, norm="GW").tensors
    assert conversion.tensors.keys() == expected.keys()
    assert all(torch.equal(conversion.tensors[name], value) for name, value in expected.items())
    origin = conversion.provenance
    assert (origin.source, origin.source_sha256) == ("r18.pth", sha256_of(r18_file))
    assert origin.tool.startswith("gw_detectron ")
    assert conversion.architecture.name == "R-18" and conversion.preprocessing == TORCHVISION
    assert conversion.norms["bn1"] == "GW:groups=64,iters=5,eps=0,solver=newton"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pkl", "a.yaml"]
    with pytest.raises(
        ValueError, match=r"norm \('GW:groups=32'\): the weights have GW:groups=64"
    ):
        load_weights(tmp_path / "a.pkl", norm="GW:groups=32")
    content = pickle.loads((tmp_path / "a.pkl").read_bytes())
    assert content["matching_heuristics"] is True
    assert content["__author__"].startswith("gw_detectron")
    assert content["norms"]["res2.0.conv2.norm"] == "BN" and content["norms"][
        "stem.conv1.norm"
    ].startswith("GW:")
    assert {value.dtype.name for value in content["model"].values()} == {"float32"}
    save_file(
        {name: value.contiguous() for name, value in r18.items()}, tmp_path / "timm.safetensors"
    )
    assert (
        convert_file(
            tmp_path / "timm.safetensors", tmp_path / "c.pkl", norm="GW"
        ).positions.positions
        == "S1-B1"
    )


def test_stock_detectron2_loads_it_with_the_written_config(
    r18, r18_file, tmp_path, detector_cfg
):
    convert_file(r18_file, tmp_path / "a.pkl")
    cfg = get_cfg()
    add_gw_config(cfg)
    cfg.merge_from_other_cfg(detector_cfg)
    cfg.MODEL.RESNETS.WHITEN_POSITIONS = "S1-B2"  # to be corrected by the yaml
    cfg.merge_from_file(str(tmp_path / "a.yaml"))
    assert cfg.INPUT.FORMAT == "RGB"
    assert cfg.MODEL.PIXEL_STD == [58.395, 57.12, 57.375]
    model = build_model(cfg)
    DetectionCheckpointer(model).load(cfg.MODEL.WEIGHTS)
    assert not load_checkpoint(build_model(cfg), open_checkpoint(cfg.MODEL.WEIGHTS)).missing
    state = model.backbone.bottom_up.state_dict()
    assert all(
        torch.equal(state[name], value)
        for name, value in convert(r18, norm="GW").tensors.items()
    )


def test_invalid_weights_write_nothing(r18, tmp_path):
    torch.save({**r18, "conv1.weight": r18["conv1.weight"] / 0}, tmp_path / "broken.pth")
    (tmp_path / "a.pkl").write_text("precious")
    with pytest.raises(
        WeightsFileError, match="(?s)broken.pth'\\): .*NaN or infinite: conv1.weight"
    ):
        convert_file(tmp_path / "broken.pth", tmp_path / "a.pkl", norm="GW", overwrite=True)
    assert (tmp_path / "a.pkl").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pkl", "broken.pth"]


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("", "", "wrong suffix"),
        ("", "a.pkl", "file not found"),
        ("r18.pth", "a.pth", "Fix: end the name in .pkl"),
        ("r18.pth", "own.yaml/a.pkl", "own.yaml/a.*': was not written"),
        ("r18.pth", "own.pkl", "--force"),
        (".", "a.pkl", "'.': cannot be read"),
        ("broken.safetensors", "a.pkl", "record of the file: damaged"),
    ],
)
def test_paths_that_cannot_be_used(
    r18, r18_file, converted, tmp_path, monkeypatch, source, target, message
):
    shutil.copy(r18_file, tmp_path)
    shutil.copy(converted, tmp_path / "own.pkl")
    (tmp_path / "own.yaml").write_text("my own config")
    tensors = {name: value.contiguous() for name, value in r18.items()}
    save_file(tensors, tmp_path / "broken.safetensors", {"norms": "{"})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        convert_file(source, target)
    assert (tmp_path / "own.yaml").read_text() == "my own config" and not (
        tmp_path / "a.pkl"
    ).exists()
    convert_file("r18.pth", "own.pkl", overwrite=True)
    assert "S1-B1" in (tmp_path / "own.yaml").read_text()
    convert_file("r18.pth", "new/folder/a.pkl")
    assert (tmp_path / "new/folder/a.pkl").is_file()


def test_a_record_must_fit_the_tensors(converted, tmp_path):
    content = pickle.loads(converted.read_bytes())
    content["norms"] |= {"res2.0.conv1.norm": "BN", "res2.0.conv2.norm": "GW"}
    (tmp_path / "b.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(WeightsFileError, match="(?s)b.pkl.*(missing|positions)"):
        load_weights(tmp_path / "b.pkl")


def test_detectron2_names_do_not_show_the_preprocessing(tmp_path):
    tensors = convert(make_network("R-18").state_dict()).tensors
    torch.save({"model": tensors}, tmp_path / "a.pth")
    with pytest.raises(
        WeightsFileError, match="preprocessing .not recorded.*--preprocessing.* detectron2-msra"
    ):
        load_weights(tmp_path / "a.pth")
    with pytest.raises(WeightsFileError, match=r"preprocessing \('BGR'\): unknown"):
        load_weights(tmp_path / "a.pth", preprocessing="BGR")
    convert_file(tmp_path / "a.pth", tmp_path / "a.pkl", preprocessing="detectron2-msra")
    config = load_weights(tmp_path / "a.pkl").config()
    assert config["INPUT"]["FORMAT"] == "BGR" and config["MODEL"]["PIXEL_STD"] == [
        1.0,
        1.0,
        1.0,
    ]
    with pytest.raises(
        WeightsFileError, match=r"preprocessing \('torchvision'\): the file records .*BGR"
    ):
        load_weights(tmp_path / "a.pkl", preprocessing="torchvision")
    arrays = {name: value.numpy() for name, value in tensors.items()}
    (tmp_path / "zoo.pkl").write_bytes(
        pickle.dumps({"model": arrays, "__author__": "torchvision"})
    )
    assert load_weights(tmp_path / "zoo.pkl").preprocessing == TORCHVISION


# --- verification ---


def test_right_weights_agree(converted, r18_file, images):
    found = verify(converted, images, source=r18_file)
    assert found.agrees and max(found.relative.values()) < 1e-10
    assert set(found.relative) == {"stem", "res2", "res3", "res4", "res5"}


def test_the_source_reveals_a_wrong_conversion(converted, r18_file, images, tmp_path):
    content = pickle.loads(converted.read_bytes())
    first, second = "res2.0.conv1.weight", "res2.0.conv2.weight"
    tensors = content["model"]
    tensors[first], tensors[second] = tensors[second], tensors[first]
    (tmp_path / "swapped.pkl").write_bytes(pickle.dumps(content))
    assert verify(tmp_path / "swapped.pkl", images).agrees  # consistent in itself
    assert not verify(tmp_path / "swapped.pkl", images, source=r18_file).agrees
    torch.save(authors_state(make_network("R-18", "S1-B1", seed=5)), tmp_path / "other.pth")
    with pytest.raises(ValueError, match="were converted from .*r18.pth"):
        verify(converted, images, source=tmp_path / "other.pth")


def test_a_wrong_claim_disagrees(images, tmp_path):
    """The tensors of GN and GW look alike, so only the source's norm reveals a wrong claim."""
    torch.save(make_network("R-18", norm="GN").state_dict(), tmp_path / "gn.pth")
    convert_file(tmp_path / "gn.pth", tmp_path / "gw.pkl", norm="GW")
    with pytest.raises(UnknownNormError, match="--norm GN"):
        verify(tmp_path / "gw.pkl", images, source=tmp_path / "gn.pth")
    for source in (tmp_path / "gn.pth", None):
        assert not verify(tmp_path / "gw.pkl", images, source=source, norm="GN").agrees
    assert verify(tmp_path / "gw.pkl", images, source=tmp_path / "gn.pth", norm="GW").agrees


@pytest.mark.parametrize(
    "preprocessing", [name for name in PREPROCESSING if name != "torchvision"]
)
def test_other_preprocessing_than_torchvisions(images, tmp_path, preprocessing):
    torch.save(
        {"model": convert(make_network("R-50").state_dict()).tensors}, tmp_path / "a.pth"
    )
    convert_file(tmp_path / "a.pth", tmp_path / "a.pkl", preprocessing=preprocessing)
    assert verify(tmp_path / "a.pkl", images[:1], source=tmp_path / "a.pth").agrees


# --- the command ---


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setattr(weights_command, "sample_images", lambda: sample_images(1))

    def run(*words):
        with errors_reported():
            return weights_command.main(
                weights_command.get_parser().parse_args([str(word) for word in words])
            )

    return run


def test_convert_and_verify_by_command(command, r18_file, tmp_path, capsys, monkeypatch):
    command("convert", r18_file, tmp_path / "a.pkl")
    assert "82 tensors of R-18 with BN, GW:groups=64" in capsys.readouterr().out
    for name in ("detectron2-msra", "torchvision"):
        command("convert", "--force", "--preprocessing", name, r18_file, tmp_path / "a.pkl")
        assert load_weights(tmp_path / "a.pkl").preprocessing == PREPROCESSING[name]
    sample_images(1)[0].save(tmp_path / "0.png")
    assert command("verify", tmp_path / "a.pkl", "--source", r18_file)
    assert "AGREES" in capsys.readouterr().out
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    assert not command("verify", tmp_path / "a.pkl", "--norm", "GW:groups=32")
    assert "DISAGREES" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("norms", "variance"), [("ALL", 1.0), ("ALL", 1 - 1e-5), ("half", 1.0), ("some", 1.0)]
)
def test_caffe_weights_with_torchvisions_names_are_not_taken_for_torchvisions(
    tmp_path, norms, variance
):
    """BN's statistics are multiplied into its scale: BGR images, and often another stride. Asked, not guessed."""
    tensors = make_network("R-50").state_dict()
    for name in [each for each in tensors if each.endswith(("running_mean", "running_var"))]:
        if norms != "some" or not name.startswith("layer4"):
            tensors[name] = torch.full_like(
                tensors[name], variance if name.endswith("var") else 0
            )
    torch.save(
        {name: value.half() if norms == "half" else value for name, value in tensors.items()},
        tmp_path / "a.pth",
    )
    if norms == "some":
        assert load_weights(tmp_path / "a.pth").preprocessing == TORCHVISION
        return
    with pytest.raises(
        WeightsFileError, match="running means are 0.*--preprocessing.* detectron2-msra"
    ):
        convert_file(tmp_path / "a.pth", tmp_path / "a.pkl")
    config = convert_file(
        tmp_path / "a.pth", tmp_path / "a.pkl", preprocessing="detectron2-msra"
    ).config()  # the fix
    assert config["INPUT"]["FORMAT"] == "BGR" and config["MODEL"]["RESNETS"]["STRIDE_IN_1X1"]


@pytest.mark.parametrize("prefix", ["", "backbone.body.", "module.backbone.body."])
def test_a_backbone_of_maskrcnn_benchmark_is_asked_for_its_images_and_converted(
    tmp_path, prefix
):
    tensors = make_network("R-18").state_dict()
    theirs = {
        f"{prefix}{'' if name[:5] == 'layer' else 'stem.'}{name}": value
        for name, value in tensors.items()
    }
    torch.save(
        {"model": {name: value for name, value in theirs.items() if "fc" not in name}},
        tmp_path / "a.pth",
    )
    with pytest.raises(WeightsFileError, match="maskrcnn-benchmark.*--preprocessing"):
        convert_file(tmp_path / "a.pth", tmp_path / "a.pkl")
    found = convert_file(
        tmp_path / "a.pth", tmp_path / "a.pkl", preprocessing="detectron2-msra"
    ).tensors  # the fix
    assert all(
        torch.equal(found[name], value) for name, value in convert(tensors).tensors.items()
    )
