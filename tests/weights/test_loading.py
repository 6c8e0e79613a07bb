"""Load an opened checkpoint: what was read is loaded, and a missing backbone tensor is an error."""

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
    NormRecorder,
    convert,
    convert_file,
    load_checkpoint,
    open_checkpoint,
    open_start_weights,
)

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


def _convert_to(path, state, norm=None):
    torch.save(state, path.with_suffix(".pth"))
    convert_file(path.with_suffix(".pth"), path, norm=norm)
    return open_checkpoint(path)


def _copied(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def _assert_unchanged(model, before):
    assert all(
        torch.equal(value, before[name]) for name, value in model.state_dict().items()
    )


WHOLE = "backbone: 82/82 tensors; FPN and heads are randomly initialized, as expected"


def test_a_whole_backbone(model, r18, tmp_path):
    assert _load(model, _converted(r18), tmp_path) == WHOLE

    content = _converted(r18)
    content["model"] = {name: value.half() for name, value in content["model"].items()}
    content["model"]["res2.0.conv2.norm.num_batches_tracked"] = torch.tensor(3)
    assert _load(model, content, tmp_path) == WHOLE


def test_a_whole_detector_and_one_of_other_classes(model, tmp_path):
    state = model.state_dict()
    others = sum(not name.startswith("backbone.bottom_up.") for name in state)
    expected = f"backbone: 82/82 tensors; FPN and heads: {others}/{others}"
    assert _load(model, {"model": dict(state)}, tmp_path) == expected

    layer = "roi_heads.box_predictor.cls_score"
    content = {"model": {**state, f"{layer}.weight": torch.ones(3, 16)}}
    report = _load(model, content, tmp_path)
    assert report.endswith(f"{others - 1}/{others}; new outputs: {layer} 3 -> 7")


def test_a_detector_without_fpn(r18, detector_cfg, tmp_path):
    detector_cfg.MODEL.BACKBONE.NAME = "build_gw_resnet_backbone"
    detector_cfg.MODEL.RPN.IN_FEATURES = detector_cfg.MODEL.ROI_HEADS.IN_FEATURES = [
        "res4"
    ]
    detector_cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[32]]
    report = _load(build_model(detector_cfg), _converted(r18), tmp_path)
    assert report.startswith("backbone: 82/82 tensors")


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("res3.0.conv1.norm.weight", {}),
        ("res2.0.conv2.norm.running_var", {}),  # which FrozenBN would fill in
        # of a wrong shape Detectron2 only warns
        ("stem.conv1.norm.weight", {"stem.conv1.norm.weight": torch.ones(1, 64, 1, 1)}),
    ],
)
def test_a_missing_tensor_is_an_error_unless_allowed(
    model, r18, tmp_path, name, replacement
):
    content = _converted(r18)
    del content["model"][name]
    content["model"] |= replacement
    before = _copied(model)

    with pytest.raises(WeightsError, match=rf"(?s)81/82.*{name}.*--allow-partial"):
        _load(model, content, tmp_path)
    _assert_unchanged(model, before)
    assert "81/82" in _load(model, content, tmp_path, allow_partial=True)


def test_a_bias_of_another_network_is_an_error(model, r18, tmp_path):
    content = _converted(r18)
    content["model"]["stem.conv1.bias"] = torch.ones(64)
    with pytest.raises(WeightsError, match="stem.conv1.bias"):
        _load(model, content, tmp_path)


def test_weights_of_other_layers(model, r18, detector_cfg, tmp_path):
    with pytest.raises(WeightsError, match="(?s)0/82.*weights convert"):
        _load(model, {"model": r18}, tmp_path)
    detector_cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
    with pytest.raises(WeightsError, match="82/100"):
        _load(build_model(detector_cfg), _converted(r18), tmp_path)


def test_names_of_tensors_prove_norms_without_a_record(model, tmp_path):
    bn = _converted(make_network("R-18").state_dict(), norm=None)
    with pytest.raises(
        WeightsError, match=r"9 layers differ \(.*stem\.conv1\.norm BN in the"
    ):
        _load(model, bn, tmp_path)

    caffe2 = {"conv1_gn_s": torch.ones(64), "conv1_gn_b": torch.zeros(64)}
    with pytest.raises(
        WeightsError, match="20 layers differ .*norm GN in the checkpoint, GW"
    ):
        _load(model, caffe2, tmp_path)
    _load(model, caffe2, tmp_path, allow_partial=True)


@pytest.mark.parametrize(("kind", "positions"), [("GN", ""), ("GW", "ALL")])
def test_weights_without_batch_norm_where_the_model_has_it(
    detector_cfg, tmp_path, caplog, kind, positions
):
    """FrozenBN would fill in the statistics."""
    state = make_network(
        "R-18", positions, norm="GN" if kind == "GN" else "BN"
    ).state_dict()
    checkpoint = _convert_to(tmp_path / "a.pkl", state, kind)
    detector_cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
    model = build_model(detector_cfg)

    with pytest.raises(
        WeightsError, match=rf"20 layers differ \(.*{kind}.*, FrozenBN here"
    ):
        load_checkpoint(model, checkpoint)
    report = load_checkpoint(model, checkpoint, allow_partial=True)
    assert "20 layers differ" in caplog.text
    assert str(report).startswith("backbone: 60/100 tensors;")


def test_a_run_with_other_options_is_refused(r18_file, tmp_path, detector_cfg, caplog):
    convert_file(r18_file, tmp_path / "a.pkl")
    weights = open_checkpoint(tmp_path / "a.pkl")
    detector_cfg.MODEL.RESNETS.WHITEN_NORM = (
        "GW:eps=1e-3"  # may be changed for fine-tuning
    )
    load_checkpoint(build_model(detector_cfg), weights)
    assert "records no norms" not in caplog.text

    detector_cfg.MODEL.RESNETS.WHITEN_NORM = "GW:groups=32"
    model = build_model(detector_cfg)
    with pytest.raises(
        WeightsError, match=r"9 layers differ \(.*stem.conv1.norm GW:groups=64"
    ):
        load_checkpoint(model, weights)
    load_checkpoint(model, weights, allow_partial=True)


@pytest.mark.parametrize("kind", ["training", "bare", "module."])
def test_a_checkpoint_without_a_record_gives_a_warning(model, tmp_path, caplog, kind):
    state = model.state_dict()
    content = {"model": state, "iteration": 9, "optimizer": None, (1, 2): {}}
    if kind == "bare":
        content["matching_heuristics"] = True
        content["model"] = model.backbone.bottom_up.state_dict()
    elif kind == "module.":  # of DistributedDataParallel
        content["model"] = {f"module.{name}": state[name] for name in state}
    _load(model, content, tmp_path)
    assert "records no norms" in caplog.text


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_names_of_wrapped_models(model, detector_cfg, tmp_path, prefix):
    """Of torch.compile, of DistributedDataParallel and of AveragedModel, which also counts."""
    state = model.state_dict()
    content = {f"{prefix}{name}": value for name, value in state.items()}
    content["n_averaged"] = torch.tensor(3)
    loaded = build_model(detector_cfg)

    report = _load(loaded, {"model": content}, tmp_path)

    assert report == "backbone: 82/82 tensors; FPN and heads: 28/28"
    assert all(map(torch.equal, loaded.state_dict().values(), state.values()))


def test_a_part_of_the_names_is_of_a_compiled_backbone(model, detector_cfg, tmp_path):
    state = model.state_dict()
    content = {
        name.replace("backbone.", "backbone._orig_mod."): value
        for name, value in state.items()
    }
    loaded = build_model(detector_cfg)

    _load(loaded, {"model": content}, tmp_path)

    assert all(map(torch.equal, loaded.state_dict().values(), state.values()))


def test_statistics_in_the_fpn_prove_batch_norm(detector_cfg, tmp_path):
    detector_cfg.MODEL.FPN.NORM = "BN"
    state = build_model(detector_cfg).state_dict()
    detector_cfg.MODEL.FPN.NORM = "GW:groups=4"
    with pytest.raises(
        WeightsError, match=r"8 layers differ \(backbone.fpn_\w+.norm BN"
    ):
        _load(build_model(detector_cfg), {"model": state}, tmp_path)


def test_converted_weights_may_belong_to_standardized_convolutions(
    detector_cfg, tmp_path
):
    """Such as R-50-GN-WS: the file has the raw values."""
    state = make_network("R-18", norm="GN").state_dict()
    checkpoint = _convert_to(tmp_path / "a.pkl", state, "GN")
    detector_cfg.MODEL.RESNETS.NORM = "GN"
    detector_cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
    detector_cfg.MODEL.RESNETS.CONV = "WS"
    assert not load_checkpoint(build_model(detector_cfg), checkpoint).missing


def test_no_weights(model):
    report = load_checkpoint(model, None)
    assert report.missing
    assert report.new
    assert not report.unexpected
    for start in (open_start_weights(""), open_start_weights(None)):
        assert start.address == ""
        assert start.checkpoint() is None


def _caffe2_name(name):
    """Name a tensor of Detectron2's ResNet-18 as Caffe2 does."""
    name = name.replace("stem.conv1.norm", "res_conv1_bn").replace(
        "stem.conv1", "conv1"
    )
    name = name.replace(".norm", "_bn")
    branches = {"conv1": "branch2a", "conv2": "branch2b", "shortcut": "branch1"}
    for layer, branch in branches.items():
        name = re.sub(rf"(res\d)\.(\d)\.{layer}", rf"\1_\2_{branch}", name)
    return (
        name.replace("bn.weight", "bn_s")
        .replace(".weight", "_w")
        .replace(".bias", "_b")
    )


def test_detectron2s_own_imagenet_weights_load_whole(detector_cfg, tmp_path):
    """Statistics are in the scale; there is a classifier, and a bias of the first convolution."""
    detector_cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
    model, other = build_model(detector_cfg), build_model(detector_cfg)
    arrays = {
        "conv1_b": np.zeros(64, np.float32),
        "fc1000_w": np.zeros((1000, 512), np.float32),
    }
    for name, value in model.backbone.bottom_up.state_dict().items():
        if ".running" not in name:
            arrays[_caffe2_name(name)] = value.numpy()
    (tmp_path / "R-18.pkl").write_bytes(pickle.dumps(arrays))

    report = load_checkpoint(other, open_checkpoint(tmp_path / "R-18.pkl"))

    assert not report.missing
    assert not report.unexpected
    assert str(report).startswith(
        "backbone: 60/100 tensors; 20 FrozenBN without statistics"
    )
    ours, theirs = model.backbone.bottom_up, other.backbone.bottom_up
    assert torch.equal(theirs.res5[1].conv2.weight, ours.res5[1].conv2.weight)


def test_only_caffe2s_files_may_lack_statistics(detector_cfg, tmp_path):
    detector_cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
    model = build_model(detector_cfg)
    state = {
        name: value
        for name, value in model.state_dict().items()
        if ".running" not in name
    }
    with pytest.raises(WeightsError, match="(?s)60/100.*running_mean"):
        _load(model, {"model": state}, tmp_path)


def _detectron2_file(kind, source, path):
    """Write a detector's state in a format that Detectron2 reads."""
    prefix = "backbone.bottom_up."
    body = {
        name.removeprefix(prefix): source[name] for name in source if prefix in name
    }
    arrays = {
        "conv1_w": body["stem.conv1.weight"].numpy(),
        "res_conv1_bn_s": body["stem.conv1.norm.weight"].numpy(),
    }
    contents = {
        "detectron2": {"model": source, "iteration": 3},
        "module.": {
            "model": OrderedDict((f"module.{name}", source[name]) for name in source)
        },
        "matching": {"model": body, "matching_heuristics": True},
        "flat": source,
        # an ImageNet model of Detectron, and a detector
        "caffe2.pkl": {**arrays, "conv1_w_momentum": arrays["conv1_w"]},
        "blobs.pkl": {"blobs": arrays, "cfg": "TRAIN: {}"},
    }
    if path.suffix == ".pkl":
        path.write_bytes(pickle.dumps(contents[kind], protocol=2))
    else:
        torch.save(contents[kind], path)


@pytest.mark.parametrize(
    "kind", ["detectron2", "module.", "matching", "flat", "caffe2.pkl", "blobs.pkl"]
)
def test_every_format_loads_as_detectron2_loads_it(detector_cfg, tmp_path, kind):
    """The oracle is Detectron2's own checkpointer, which reads the file by itself."""
    detector_cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
    source = build_model(detector_cfg).state_dict()
    path = tmp_path / (f"a-{kind}" if kind.endswith(".pkl") else "a.pth")
    _detectron2_file(kind, source, path)
    ours, theirs = build_model(detector_cfg), build_model(detector_cfg)
    theirs.load_state_dict(ours.state_dict())

    DetectionCheckpointer(theirs).load(str(path))
    load_checkpoint(ours, open_checkpoint(path), allow_partial=True)

    _assert_unchanged(ours, theirs.state_dict())
    name = "backbone.bottom_up.stem.conv1.weight"
    assert torch.equal(ours.state_dict()[name], source[name])


def with_value(bad):
    return lambda value: value.double().index_fill(0, torch.tensor([3]), bad)


@pytest.mark.parametrize(
    ("names", "change", "problem"),
    [
        *(
            (
                ["stem.conv1.norm.bias", "res2.0.conv1.weight"],
                with_value(bad),
                "infinite",
            )
            for bad in NOT_FINITE
        ),
        (["res2.0.conv2.norm.running_var"], lambda value: -value, "negative"),
        (["res2.0.conv1.weight"], lambda value: value.to(torch.int8), "type"),
    ],
)
def test_values_and_types_that_conversion_refuses(
    model, r18, tmp_path, names, change, problem
):
    content = _converted(r18)
    for name in names:
        content["model"][name] = change(content["model"][name])
    before = _copied(model)

    for allow_partial in (False, True):
        with pytest.raises(
            WeightsError, match=rf"{len(names)} .*{problem}.*{names[-1]}"
        ):
            _load(model, content, tmp_path, allow_partial=allow_partial)
    _assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("nowhere.pth", MissingFileError),
        ("catalog://nope", FileAccessError),
        ("http://127.0.0.1:9/b.pth", FileAccessError),
        ("{folder}/a.pth?x.pkl", ConfigError),
    ],
)
def test_addresses_that_cannot_be_opened(tmp_path, monkeypatch, address, error):
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path))
    torch.save({"model": {}}, tmp_path / "a.pth")
    address = address.format(folder=tmp_path)
    with pytest.raises(error, match=f"^MODEL.WEIGHTS.*{re.escape(address)}"):
        open_checkpoint(address)


@pytest.mark.parametrize(
    "content",
    [[1, 2], {"model": [1]}, {"model": {"a": 1}}, {"state_dict": {"a": torch.ones(1)}}],
)
def test_a_file_without_tensors_by_name(tmp_path, content):
    torch.save(content, tmp_path / "a.pth")
    with pytest.raises(WeightsFileError, match="^MODEL.WEIGHTS: .*a.pth'"):
        open_checkpoint(tmp_path / "a.pth")


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"blobs": {}},
        {"a_momentum": np.ones(1)},
        {"model": {}, "__author__": "me", "matching_heuristics": True},
    ],
)
def test_a_file_without_tensors(model, tmp_path, content):
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(content, protocol=2))
    checkpoint = open_checkpoint(tmp_path / "a.pkl")
    with pytest.raises(WeightsFileError, match="^MODEL.WEIGHTS .*a.pkl.*no tensors"):
        load_checkpoint(model, checkpoint, allow_partial=True)


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
    backbone = gw_resnet(depth, freeze_at=0, norm="BN", **options)
    return nn.ModuleDict({"backbone": backbone, "head": nn.Linear(2, 2)})


def test_training_goes_on(tmp_path, caplog):
    model, other = detector(), detector()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    checkpointer = GWDetectionCheckpointer(model, str(tmp_path), optimizer=optimizer)
    checkpointer.save("model", iteration=7)

    restored = torch.optim.SGD(other.parameters(), 0.2)
    checkpointer = GWDetectionCheckpointer(other, str(tmp_path), optimizer=restored)
    with caplog.at_level(logging.INFO, logger="gw_detectron"):
        rest = checkpointer.resume_or_load("", resume=True)

    assert rest["iteration"] == 7
    assert restored.param_groups[0]["lr"] == 0.1
    _assert_unchanged(other, model.state_dict())
    assert "backbone: " in caplog.text

    restored.param_groups[0]["lr"] = 0.2
    checkpointer.resume_or_load(f"{tmp_path}/model.pth", resume=False)  # a new training
    assert restored.param_groups[0]["lr"] == 0.2


def test_other_norms_are_refused_where_names_fit_by_their_end(tmp_path):
    """Detectron2's heuristics load a bare backbone into a detector."""
    backbone = detector(whiten_norm="GW")["backbone"]
    GWDetectionCheckpointer(backbone, str(tmp_path)).save("model")
    path = f"{tmp_path}/model.pth?matching_heuristics=True"
    with pytest.raises(
        WeightsError, match="backbone.stem.conv1.norm GW.*, GN:groups=64"
    ):
        GWDetectionCheckpointer(detector(whiten_norm="GN:groups=64")).load(path)

    same = detector(whiten_norm="GW")
    GWDetectionCheckpointer(same).load(path)
    assert torch.equal(same["backbone"].stem.conv1.weight, backbone.stem.conv1.weight)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_record_is_found_under_the_names_of_a_parallel_model(
    tmp_path, caplog, prefix
):
    model = detector(whiten_norm="GN:groups=64")
    record = NormRecorder(model).state_dict()
    state = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    content = {
        "model": state,
        "norms": {f"module.{name}": record[name] for name in record},
    }

    with pytest.raises(
        WeightsError, match="9 layers differ .*conv1.norm GN:groups=64.*, GW"
    ):
        _load(detector(whiten_norm="GW"), content, tmp_path)
    _load(detector(whiten_norm="GN:groups=64"), content, tmp_path)
    assert "records no norms" not in caplog.text


@pytest.mark.parametrize("compiled", ["model", "backbone"])
def test_the_norms_of_a_compiled_model_are_compared(tmp_path, compiled):
    """torch.compile(module) adds to the names of tensors and of norms."""
    model = detector(whiten_norm="GW")
    if compiled == "model":
        model = torch.compile(model)
    else:
        model["backbone"] = torch.compile(model["backbone"])
    DetectionCheckpointer(model, str(tmp_path), norms=NormRecorder(model)).save("model")
    path = f"{tmp_path}/model.pth"

    with pytest.raises(WeightsError, match="9 layers differ .*conv1.norm GW.*, GN"):
        GWDetectionCheckpointer(detector(whiten_norm="GN:groups=64")).load(path)
    GWDetectionCheckpointer(detector(whiten_norm="GW")).load(path)


def test_a_compiled_model_is_refused_unless_it_keeps_its_names(tmp_path):
    GWDetectionCheckpointer(detector(), str(tmp_path)).save("model")
    path = f"{tmp_path}/model.pth"

    parted = detector()
    parted["backbone"] = torch.compile(parted["backbone"])
    for model in (torch.compile(detector()), parted):
        with pytest.raises(WeightsError, match=r"renamed .*Fix: .*module.compile\(\)"):
            GWDetectionCheckpointer(model).load(path)

    in_place = detector()
    in_place.compile()
    GWDetectionCheckpointer(in_place).load(path)


@pytest.mark.parametrize("norms", [{}, {"other.stem.conv1.norm": "GN"}])
def test_a_record_of_other_layers_is_no_proof(tmp_path, caplog, norms):
    model = detector(whiten_norm="GW")
    _load(model, {"model": model.state_dict(), "norms": norms}, tmp_path)
    assert "records no norms of 9 layers (backbone.stem.conv1.norm" in caplog.text


@pytest.mark.parametrize(("conv", "is_unclear"), [("", False), ("WS", True)])
def test_weights_without_a_record_may_lack_weight_standardization(
    tmp_path, caplog, conv, is_unclear
):
    model = detector(whiten_positions="")
    convert_convs(model, conv)
    _load(model, {"model": model.state_dict()}, tmp_path)
    text = "records no norms of 20 layers (backbone.stem.conv1"
    assert (text in caplog.text) == is_unclear


def test_standardized_heads_need_no_counterpart(tmp_path):
    """A box head of Faster R-CNN starts a Mask R-CNN, with Weight Standardization in both."""

    def checkpointer(*heads: str, conv: str = "WS") -> GWDetectionCheckpointer:
        model = detector()
        for head in heads:
            model[head] = nn.Sequential(nn.Conv2d(2, 2, 3))
            convert_convs(model[head], conv)
        return GWDetectionCheckpointer(model, str(tmp_path))

    checkpointer("box", "mask").save("both")
    checkpointer("box").save("box")
    checkpointer("box").load(f"{tmp_path}/both.pth")
    checkpointer("box", "mask").load(f"{tmp_path}/box.pth")
    with pytest.raises(WeightsError, match="box.0 WS in the checkpoint"):
        checkpointer("box", conv="").load(f"{tmp_path}/both.pth")


def test_no_address_and_unsafe_files(tmp_path):
    assert GWDetectionCheckpointer(detector()).load("") == {}
    torch.save({"model": detector()}, tmp_path / "code.pth")
    with pytest.raises(RefusedFileError, match="checkpoint"):
        GWDetectionCheckpointer(detector()).load(str(tmp_path / "code.pth"))
