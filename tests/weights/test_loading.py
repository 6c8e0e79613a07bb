"""Load an opened checkpoint: exactly what was read is loaded, and a missing backbone tensor is an error."""

import logging
import pickle
import re
from collections import OrderedDict

import numpy as np
import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import build_model
from torch import nn

from gw_detectron.errors import (
    ConfigError,
    FileAccessError,
    MissingFileError,
    RefusedFileError,
    WeightsError,
    WeightsFileError,
)
from gw_detectron.modeling import gw_resnet
from gw_detectron.norms import convert_convs
from gw_detectron.weights import (
    GWDetectionCheckpointer,
    convert,
    convert_file,
    load_checkpoint,
    open_checkpoint,
    open_start_weights,
)
from gw_detectron.weights.records import NormRecord

from .synthetic import make_network

NOT_FINITE = (float("nan"), float("inf"), -float("inf"), 1e300)


@pytest.fixture
def model(detector_cfg):
    return build_model(detector_cfg)


def _load(model, content, tmp_path, *, allow_partial=False):
    torch.save(content, tmp_path / "weights.pth")
    checkpoint = open_checkpoint(str(tmp_path / "weights.pth"))
    return str(load_checkpoint(model, checkpoint, allow_partial=allow_partial))


def _converted(state, norm="GW"):
    return {"model": convert(state, norm=norm).tensors, "matching_heuristics": True}


def test_whole_backbones_and_detectors(model, r18, detector_cfg, tmp_path):
    whole = "backbone: 82/82 tensors; FPN and heads are randomly initialized, as expected"
    assert _load(model, _converted(r18), tmp_path) == whole
    state = model.state_dict()
    others = sum(not name.startswith("backbone.bottom_up.") for name in state)
    expected = f"backbone: 82/82 tensors; FPN and heads: {others}/{others}"
    assert _load(model, {"model": dict(state)}, tmp_path) == expected
    state["roi_heads.box_predictor.cls_score.weight"] = torch.ones(3, 16)
    report = _load(model, {"model": state}, tmp_path)
    assert report.endswith(
        f"{others - 1}/{others}, new: roi_heads.box_predictor.cls_score.weight"
    )
    halves = {name: value.half() for name, value in _converted(r18)["model"].items()}
    counter = {"res2.0.conv2.norm.num_batches_tracked": torch.tensor(3)}
    assert (
        _load(model, {"model": halves | counter, "matching_heuristics": True}, tmp_path)
        == whole
    )
    detector_cfg.MODEL.BACKBONE.NAME = "build_gw_resnet_backbone"  # without FPN
    detector_cfg.MODEL.RPN.IN_FEATURES = detector_cfg.MODEL.ROI_HEADS.IN_FEATURES = ["res4"]
    detector_cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[32]]
    assert _load(build_model(detector_cfg), _converted(r18), tmp_path).startswith(
        "backbone: 82/82 tensors"
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("res3.0.conv1.norm.weight", lambda value: None),
        ("res2.0.conv2.norm.running_var", lambda value: None),  # which FrozenBN would fill in
        (
            "stem.conv1.norm.weight",
            lambda value: value.view(1, -1, 1, 1),
        ),  # Detectron2 only warns
    ],
)
def test_a_missing_tensor_is_an_error_unless_allowed(model, r18, tmp_path, name, change):
    content = _converted(r18)
    value = change(content["model"].pop(name))
    content["model"] |= {} if value is None else {name: value}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        WeightsError, match=rf"(?s)81/82.*Missing: backbone.bottom_up.{name}.*--allow-partial"
    ):
        _load(model, content, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "81/82" in _load(model, content, tmp_path, allow_partial=True)


def test_weights_of_other_layers(model, r18, detector_cfg, tmp_path):
    with pytest.raises(WeightsError, match=r"0/82.*(?s:.)*gw-detectron weights convert"):
        _load(model, {"model": r18}, tmp_path)
    detector_cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
    with pytest.raises(WeightsError, match="82/100"):
        _load(build_model(detector_cfg), _converted(r18), tmp_path)
    # without a record, names of tensors prove norms
    content = _converted(make_network("R-18").state_dict(), norm=None)
    with pytest.raises(
        WeightsError,
        match=r"9 layers differ \(backbone\.bottom_up\.stem\.conv1\.norm BN in the",
    ):
        _load(model, content, tmp_path)
    content = {"conv1_gn_s": torch.ones(64), "conv1_gn_b": torch.zeros(64)}  # Caffe2's
    with pytest.raises(WeightsError, match=r"20 layers differ .*norm GN in the checkpoint, GW"):
        _load(model, content, tmp_path)
    _load(model, content, tmp_path, allow_partial=True)


@pytest.mark.parametrize(("kind", "positions"), [("GN", ""), ("GW", "ALL")])
def test_weights_without_batch_norm_where_the_model_has_it(
    detector_cfg, tmp_path, caplog, kind, positions
):
    """FrozenBN would fill in the statistics."""
    state = make_network("R-18", positions, norm="GN" if kind == "GN" else "BN").state_dict()
    torch.save(state, tmp_path / "a.pth")
    convert_file(tmp_path / "a.pth", tmp_path / "a.pkl", norm=kind)
    checkpoint = open_checkpoint(str(tmp_path / "a.pkl"))
    detector_cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
    model = build_model(detector_cfg)
    with pytest.raises(
        WeightsError, match=rf"20 layers differ \(.*stem.conv1.norm {kind}.*, FrozenBN here"
    ):
        load_checkpoint(model, checkpoint)
    report = load_checkpoint(model, checkpoint, allow_partial=True)
    assert "trained with other norms: 20 layers differ" in caplog.text
    assert str(report).startswith("backbone: 60/100 tensors")


def test_a_run_with_other_options_is_refused(r18_file, tmp_path, detector_cfg, caplog):
    convert_file(r18_file, tmp_path / "a.pkl")
    weights = open_checkpoint(tmp_path / "a.pkl")
    detector_cfg.MODEL.RESNETS.WHITEN_NORM = "GW:eps=1e-3"  # may be changed for fine-tuning
    load_checkpoint(build_model(detector_cfg), weights)
    assert "records no norms" not in caplog.text
    detector_cfg.MODEL.RESNETS.WHITEN_NORM = "GW:groups=32"
    model = build_model(detector_cfg)
    with pytest.raises(
        WeightsError, match=r"9 layers differ \(backbone.bottom_up.stem.conv1.norm GW:groups=64"
    ):
        load_checkpoint(model, weights)
    load_checkpoint(model, weights, allow_partial=True)
    torch.save(
        {"model": model.state_dict(), "iteration": 9, "optimizer": None, (1, 2): {}},
        tmp_path / "other.pth",
    )
    load_checkpoint(model, open_checkpoint(tmp_path / "other.pth"))
    assert "records no norms" in caplog.text
    bare = {
        name.removeprefix("backbone.bottom_up."): value
        for name, value in model.state_dict().items()
    }
    parallel = {
        f"module.{name}": value for name, value in model.state_dict().items()
    }  # as DistributedDataParallel
    for content in ({"model": parallel}, {"model": bare, "matching_heuristics": True}):
        caplog.clear()
        _load(model, content, tmp_path)
        assert "records no norms" in caplog.text


def test_statistics_in_the_fpn_prove_batch_norm(detector_cfg, tmp_path):
    detector_cfg.MODEL.FPN.NORM = "BN"
    state = build_model(detector_cfg).state_dict()
    detector_cfg.MODEL.FPN.NORM = "GW:groups=4"
    with pytest.raises(
        WeightsError, match=r"8 layers differ \(backbone.fpn_\w+.norm BN in the checkpoint, GW"
    ):
        _load(build_model(detector_cfg), {"model": state}, tmp_path)


def test_converted_weights_may_belong_to_standardized_convolutions(detector_cfg, tmp_path):
    """Such as R-50-GN-WS: the file has the raw values."""
    torch.save(make_network("R-18", norm="GN").state_dict(), tmp_path / "a.pth")
    convert_file(tmp_path / "a.pth", tmp_path / "a.pkl", norm="GN")
    detector_cfg.MODEL.RESNETS.NORM, detector_cfg.MODEL.RESNETS.WHITEN_POSITIONS = "GN", ""
    detector_cfg.MODEL.RESNETS.CONV = "WS"
    assert not load_checkpoint(
        build_model(detector_cfg), open_checkpoint(tmp_path / "a.pkl")
    ).missing


def test_no_weights_and_live_batch_norm(detector_cfg, r18_file, tmp_path):
    detector_cfg.MODEL.RESNETS.NORM = "BN"
    model = build_model(detector_cfg)
    report = load_checkpoint(model, None)
    assert report.missing and report.new and not report.unexpected
    convert_file(r18_file, tmp_path / "a.pkl")
    report = load_checkpoint(model, open_checkpoint(str(tmp_path / "a.pkl")))
    assert str(report).startswith("backbone: 82/82 tensors")
    for start in map(open_start_weights, ("", None)):
        assert (start.address, start.checkpoint()) == ("", None)


def test_detectron2s_own_imagenet_weights_load_whole(detector_cfg, tmp_path):
    """They have Caffe2's names, statistics in scale and shift, a classifier, and a bias of the first convolution."""
    detector_cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
    model = build_model(detector_cfg)
    arrays = {
        "conv1_b": np.zeros(64, np.float32),
        "fc1000_w": np.zeros((1000, 512), np.float32),
    }
    for name, value in model.backbone.bottom_up.state_dict().items():
        name = (
            name.replace("stem.conv1.norm", "res_conv1_bn")
            .replace("stem.conv1", "conv1")
            .replace(".norm", "_bn")
        )
        for layer, branch in (
            ("conv1", "branch2a"),
            ("conv2", "branch2b"),
            ("shortcut", "branch1"),
        ):
            name = re.sub(rf"(res\d)\.(\d)\.{layer}", rf"\1_\2_{branch}", name)
        name = name.replace("bn.weight", "bn_s").replace(".weight", "_w").replace(".bias", "_b")
        if ".running" not in name:
            arrays[name] = value.numpy()
    (tmp_path / "R-18.pkl").write_bytes(pickle.dumps(arrays))
    other = build_model(detector_cfg)
    report = load_checkpoint(other, open_checkpoint(str(tmp_path / "R-18.pkl")))
    assert not report.missing and not report.unexpected
    assert str(report).startswith(
        "backbone: 60/100 tensors; 20 FrozenBN without statistics, which fits only Caffe2"
    )
    assert torch.equal(
        other.backbone.bottom_up.res5[1].conv2.weight,
        model.backbone.bottom_up.res5[1].conv2.weight,
    )


@pytest.mark.parametrize(
    "kind", ["detectron2", "module.", "matching", "caffe2", "blobs", "flat"]
)
def test_every_format_loads_as_detectron2_loads_it(detector_cfg, tmp_path, kind):
    """The oracle is Detectron2's own checkpointer, which reads the file by itself."""
    detector_cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
    source = build_model(detector_cfg).state_dict()
    body = {
        name.removeprefix("backbone.bottom_up."): value
        for name, value in source.items()
        if "bottom_up" in name
    }
    arrays = {
        "conv1_w": body["stem.conv1.weight"].numpy(),
        "res_conv1_bn_s": body["stem.conv1.norm.weight"].numpy(),
    }
    path = tmp_path / ("a.pkl" if kind in ("caffe2", "blobs") else "a.pth")
    if kind == "caffe2":  # an ImageNet model of Detectron: a flat dict of arrays
        path.write_bytes(
            pickle.dumps({**arrays, "conv1_w_momentum": arrays["conv1_w"]}, protocol=2)
        )
    elif kind == "blobs":
        path.write_bytes(pickle.dumps({"blobs": arrays, "cfg": "TRAIN: {}"}, protocol=2))
    elif kind == "module.":
        torch.save(
            {"model": OrderedDict((f"module.{name}", value) for name, value in source.items())},
            path,
        )
    else:
        content = {
            "detectron2": {"model": source, "iteration": 3},
            "matching": {"model": body, "matching_heuristics": True},
            "flat": source,
        }[kind]
        torch.save(content, path)
    ours, theirs = build_model(detector_cfg), build_model(detector_cfg)
    theirs.load_state_dict(ours.state_dict())
    DetectionCheckpointer(theirs).load(str(path))
    load_checkpoint(ours, open_checkpoint(str(path)), allow_partial=True)
    assert all(
        torch.equal(value, theirs.state_dict()[name])
        for name, value in ours.state_dict().items()
    )
    assert torch.equal(ours.backbone.bottom_up.stem.conv1.weight, body["stem.conv1.weight"])


def with_value(bad):
    return lambda value: value.double().index_fill(0, torch.tensor([3]), bad)


@pytest.mark.parametrize(
    ("names", "change", "problem"),
    [
        *(
            (
                ["stem.conv1.norm.bias", "res2.0.conv1.weight"],
                with_value(bad),
                "with .* infinite",
            )
            for bad in NOT_FINITE
        ),
        (["res2.0.conv2.norm.running_var"], lambda value: -value, "with a negative variance"),
        (["res2.0.conv1.weight"], lambda value: value.to(torch.int8), "of wrong type"),
    ],
)
def test_values_and_types_that_conversion_refuses(model, r18, tmp_path, names, change, problem):
    content = _converted(r18)
    content["model"] |= {name: change(content["model"][name]) for name in names}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for allow_partial in (False, True):
        with pytest.raises(
            WeightsError,
            match=rf"{len(names)} tensors {problem}.* \(.*{names[-1]}.*\). Fix: give an",
        ):
            _load(model, content, tmp_path, allow_partial=allow_partial)
    assert all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    )  # nothing was loaded


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        (
            "nowhere.pth",
            MissingFileError,
            r"^MODEL.WEIGHTS: file not found: 'nowhere.pth' \(cwd: .*\). Fix: ",
        ),
        ("catalog://nope", FileAccessError, "^MODEL.WEIGHTS: cannot fetch 'catalog://nope'"),
        (
            "http://127.0.0.1:9/b.pth",
            FileAccessError,
            "^MODEL.WEIGHTS: cannot fetch 'http://127.0.0.1:9/b.pth'",
        ),
        ("{path}?x.pkl", ConfigError, r"unknown option. Fix: leave out '\?x.pkl'"),
    ],
)
def test_addresses_that_cannot_be_opened(tmp_path, monkeypatch, address, error, message):
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path))
    torch.save({"model": {}}, tmp_path / "a.pth")
    with pytest.raises(error, match=message):
        open_checkpoint(address.format(path=tmp_path / "a.pth"))


@pytest.mark.parametrize(
    "content",
    [[1, 2], {"model": [1]}, {"model": {"a": 1}}, {"state_dict": {"a": torch.ones(1)}}],
)
def test_a_file_without_tensors_by_name(tmp_path, content):
    torch.save(content, tmp_path / "a.pth")
    with pytest.raises(
        WeightsFileError,
        match="^MODEL.WEIGHTS: .*a.pth' ?.*(instead of a dict|is not a dense tensor)",
    ):
        open_checkpoint(str(tmp_path / "a.pth"))


def test_the_option_of_an_address_asks_for_matching_names(model, r18, tmp_path):
    torch.save({"model": convert(r18, norm="GW").tensors}, tmp_path / "a.pth")
    checkpoint = open_checkpoint(f"{tmp_path / 'a.pth'}?matching_heuristics=True")
    other = open_checkpoint(tmp_path / "a.pth")
    assert other.address == str(tmp_path / "a.pth")
    (tmp_path / "a.pth").unlink()  # what was read is what is loaded
    for _ in range(2):  # loading does not use it up
        assert str(load_checkpoint(model, checkpoint)).startswith("backbone: 82/82")
    assert torch.equal(model.backbone.bottom_up.stem.conv1.weight, r18["conv1.weight"])
    with pytest.raises(WeightsError, match="0/82"):
        load_checkpoint(model, other)


# --- the checkpointer for scripts without this package's Trainer ---


def detector(depth: int = 18, **options) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "backbone": gw_resnet(depth, freeze_at=0, norm="BN", **options),
            "head": nn.Linear(2, 2),
        }
    )


def test_norms_are_recorded_and_training_goes_on(tmp_path, caplog):
    model = detector()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    GWDetectionCheckpointer(model, str(tmp_path), optimizer=optimizer).save(
        "model", iteration=7
    )
    other = detector()
    restored = torch.optim.SGD(other.parameters(), 0.2)
    checkpointer = GWDetectionCheckpointer(other, str(tmp_path), optimizer=restored)
    with caplog.at_level(logging.INFO, logger="gw_detectron"):
        rest = checkpointer.resume_or_load("", resume=True)
    assert rest["iteration"] == 7 and restored.param_groups[0]["lr"] == 0.1
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert "backbone: " in caplog.text
    fresh = torch.optim.SGD(other.parameters(), 0.2)
    GWDetectionCheckpointer(other, optimizer=fresh).resume_or_load(
        str(tmp_path / "model.pth"), resume=False
    )
    assert fresh.param_groups[0]["lr"] == 0.2


def test_other_norms_are_refused_where_names_fit_by_their_end(tmp_path):
    """Detectron2's heuristics load a bare backbone into a detector."""
    backbone = detector(whiten_norm="GW")["backbone"]
    GWDetectionCheckpointer(backbone, str(tmp_path)).save("model")
    path = f"{tmp_path}/model.pth?matching_heuristics=True"
    with pytest.raises(
        WeightsError, match="backbone.stem.conv1.norm GW.*, GN:groups=64.* here"
    ):
        GWDetectionCheckpointer(detector(whiten_norm="GN:groups=64")).load(path)
    same = detector(whiten_norm="GW")
    GWDetectionCheckpointer(same).load(path)
    assert torch.equal(same["backbone"].stem.conv1.weight, backbone.stem.conv1.weight)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_record_is_found_under_the_names_of_a_parallel_model(tmp_path, caplog, prefix):
    """And is no proof if its names are others."""
    model = detector(whiten_norm="GN:groups=64")
    record = NormRecord(model).state_dict()
    assert NormRecord(nn.DataParallel(model)).state_dict() == record
    content = {
        "model": {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    }
    recorded = {"norms": {f"module.{name}": spec for name, spec in record.items()}}
    with pytest.raises(
        WeightsError, match="9 layers differ .*backbone.stem.conv1.norm GN:groups=64.*, GW"
    ):
        _load(detector(whiten_norm="GW"), content | recorded, tmp_path)
    _load(detector(whiten_norm="GN:groups=64"), content | recorded, tmp_path)
    assert "records no norms" not in caplog.text
    for norms in ({}, {f"other.{name}": spec for name, spec in record.items()}):
        caplog.clear()
        _load(detector(whiten_norm="GW"), content | {"norms": norms}, tmp_path)
        assert "records no norms of 9 layers (backbone.stem.conv1.norm" in caplog.text


def test_weights_without_a_record_may_lack_weight_standardization(tmp_path, caplog):
    model = detector(whiten_positions="")
    for conv in ("", "WS"):
        convert_convs(model, conv)
        _load(model, {"model": model.state_dict()}, tmp_path)
        assert ("records no norms of 20 layers (backbone.stem.conv1" in caplog.text) == (
            conv == "WS"
        )


def test_standardized_heads_need_no_counterpart(tmp_path):
    """A box head of Faster R-CNN starts a Mask R-CNN, with Weight Standardization in both."""

    def with_heads(*heads: str, conv: str = "WS") -> nn.Module:
        model = nn.ModuleDict(
            {**detector(), **{head: nn.Sequential(nn.Conv2d(2, 2, 3)) for head in heads}}
        )
        for head in heads:
            convert_convs(model[head], conv)
        return model

    GWDetectionCheckpointer(with_heads("box", "mask"), str(tmp_path)).save("both")
    GWDetectionCheckpointer(with_heads("box"), str(tmp_path)).save("box")
    GWDetectionCheckpointer(with_heads("box")).load(f"{tmp_path}/both.pth")
    GWDetectionCheckpointer(with_heads("box", "mask")).load(f"{tmp_path}/box.pth")
    with pytest.raises(WeightsError, match=r"box.0 WS in the checkpoint only"):
        GWDetectionCheckpointer(with_heads("box", conv="")).load(f"{tmp_path}/both.pth")


def test_no_weights_and_unsafe_files(tmp_path):
    assert GWDetectionCheckpointer(detector()).load("") == {}
    torch.save({"model": detector()}, tmp_path / "code.pth")
    with pytest.raises(RefusedFileError, match="checkpoint"):
        GWDetectionCheckpointer(detector()).load(str(tmp_path / "code.pth"))
