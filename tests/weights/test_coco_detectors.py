"""Start from a detector that was trained on COCO: files in the form of Detectron2's and Detectron's model zoos."""

import pickle
import re

import numpy as np
import pytest
import torch
from detectron2 import model_zoo
from detectron2.config import get_cfg
from detectron2.modeling import build_model

from gw_detectron.config import read_config
from gw_detectron.errors import MissingFileError, WeightsError
from gw_detectron.weights import load_checkpoint, open_checkpoint, open_start_weights
from gw_detectron.weights.opening import is_detector, local_file

FASTER = "COCO-Detection/faster_rcnn_R_50_FPN_3x"
MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x"
RETINANET = "COCO-Detection/retinanet_R_50_FPN_3x"
OWN = {
    FASTER: "Own-Data/own_faster_rcnn_R_50_FPN_zoo.yaml",
    MASK: "Own-Data/own_mask_rcnn_R_50_FPN_zoo.yaml",
    RETINANET: "Own-Data/own_retinanet_R_50_FPN_zoo.yaml",
}
BOX_OUTPUTS = (
    "new outputs: roi_heads.box_predictor.cls_score 81 -> 4, "
    "roi_heads.box_predictor.bbox_pred 320 -> 12"
)


def zoo_config(name):
    cfg = get_cfg()
    cfg.merge_from_file(model_zoo.get_config_file(f"{name}.yaml"))
    cfg.MODEL.WEIGHTS = ""
    cfg.MODEL.DEVICE = "cpu"
    return cfg


def own_config(name, *opts):
    return read_config(name, ["MODEL.DEVICE", "cpu", *opts])


def zoo_detector(name, path):
    """Build a detector of Detectron2's zoo with random values, and write it as the zoo does."""
    torch.manual_seed(0)
    model = build_model(zoo_config(name)).eval()
    arrays = {key: value.numpy() for key, value in model.state_dict().items()}
    content = {"model": arrays, "__author__": "Detectron2 Model Zoo"}
    path.write_bytes(pickle.dumps(content))
    return model


def load(cfg, path):
    model = build_model(cfg).eval()
    return model, str(load_checkpoint(model, open_checkpoint(path)))


@torch.no_grad()
def features(model):
    pixels = torch.randint(0, 256, (3, 96, 130), generator=torch.Generator())
    images = model.preprocess_image([{"image": pixels.float()}])
    return model.backbone(images.tensor)


def assert_same_features(model, expected):
    theirs = features(expected)
    for level, ours in features(model).items():
        torch.testing.assert_close(ours, theirs[level], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        (FASTER, BOX_OUTPUTS),
        (MASK, f"{BOX_OUTPUTS}, roi_heads.mask_head.predictor 80 -> 3"),
        (RETINANET, "new outputs: head.cls_score 720 -> 27"),
    ],
)
def test_only_the_class_outputs_are_new(tmp_path, name, outputs):
    expected = zoo_detector(name, tmp_path / "zoo.pkl")
    classes = ("MODEL.ROI_HEADS.NUM_CLASSES", 3, "MODEL.RETINANET.NUM_CLASSES", 3)

    model, report = load(own_config(OWN[name], *classes), tmp_path / "zoo.pkl")

    assert report.startswith("backbone: 265/265 tensors")
    assert report.endswith(outputs)
    assert_same_features(model, expected)
    theirs = expected.state_dict()
    for key, value in model.state_dict().items():
        assert value.shape != theirs[key].shape or torch.equal(value, theirs[key])


@pytest.mark.parametrize("name", [FASTER, MASK, RETINANET])
def test_the_configs_are_those_of_the_zoo(name):
    """Every key of the architecture and the input that Detectron2's config decides."""
    ours = own_config(OWN[name])
    theirs = zoo_config(name)
    address = model_zoo.get_checkpoint_url(f"{name}.yaml")
    path = address.removeprefix("https://dl.fbaipublicfiles.com/detectron2/")
    assert ours.MODEL.WEIGHTS.removeprefix("detectron2://") == path

    nodes = ["RESNETS", "FPN"]
    if name == RETINANET:
        nodes += ["RETINANET"]
    else:
        nodes += ["RPN", "ROI_HEADS", "ROI_BOX_HEAD", "ROI_MASK_HEAD"]
    for node in nodes:
        for key, value in theirs.MODEL[node].items():
            if key not in ("NAME", "OUT_FEATURES"):
                assert ours.MODEL[node][key] == value, (node, key)
    sizes = ours.MODEL.ANCHOR_GENERATOR.SIZES
    np.testing.assert_allclose(sizes, theirs.MODEL.ANCHOR_GENERATOR.SIZES)
    assert ours.MODEL.PIXEL_MEAN == theirs.MODEL.PIXEL_MEAN
    assert ours.MODEL.PIXEL_STD == theirs.MODEL.PIXEL_STD
    assert ours.INPUT.FORMAT == theirs.INPUT.FORMAT


_DETECTRON = {
    r"backbone\.fpn_lateral(\d)\.": r"fpn_inner_res\1_2_sum_lateral.",
    r"backbone\.fpn_output(\d)\.": r"fpn_res\1_2_sum.",
    r"proposal_generator\.rpn_head\.conv\.": "conv_rpn_fpn2.",
    r"proposal_generator\.rpn_head\.objectness_logits\.": "rpn_cls_logits_fpn2.",
    r"proposal_generator\.rpn_head\.anchor_deltas\.": "rpn_bbox_pred_fpn2.",
    r"roi_heads\.box_head\.fc1\.": "fc6.",
    r"roi_heads\.box_head\.fc2\.": "fc7.",
    r"roi_heads\.box_predictor\.": "",
    r"backbone\.bottom_up\.stem\.conv1\.norm\.": "res_conv1_bn.",
    r"backbone\.bottom_up\.stem\.": "",
    r"backbone\.bottom_up\.(res\d)\.(\d)\.shortcut": r"\1_\2_branch1",
    r"backbone\.bottom_up\.(res\d)\.(\d)\.conv1": r"\1_\2_branch2a",
    r"backbone\.bottom_up\.(res\d)\.(\d)\.conv2": r"\1_\2_branch2b",
    r"backbone\.bottom_up\.(res\d)\.(\d)\.conv3": r"\1_\2_branch2c",
    r"\.norm\.": "_bn.",
    r"_bn\.weight$": "_bn_s",
    r"\.weight$": "_w",
    r"\.bias$": "_b",
}


def test_a_detector_of_detectron(tmp_path):
    """Caffe2's names, statistics in the scale, and the background as the first class."""
    expected = build_model(zoo_config(FASTER)).eval()
    blobs = {}
    for name, value in expected.state_dict().items():
        if ".running_var" in name:
            value.fill_(1)
        if ".running" in name:
            continue
        array = value.numpy()
        if "bbox_pred" in name:
            array = value.new_zeros(324, *value.shape[1:]).numpy()
        for pattern, theirs in _DETECTRON.items():
            name = re.sub(pattern, theirs, name)
        blobs[name] = array
    (tmp_path / "model.pkl").write_bytes(pickle.dumps({"blobs": blobs}))
    cfg = own_config(OWN[FASTER], "MODEL.ROI_HEADS.NUM_CLASSES", 3)

    model, report = load(cfg, tmp_path / "model.pkl")

    assert report.endswith(BOX_OUTPUTS)
    assert_same_features(model, expected)


@pytest.mark.parametrize(
    ("opts", "layer"),
    [
        (
            ("MODEL.ROI_BOX_HEAD.NUM_CONV", 4, "MODEL.ROI_BOX_HEAD.NUM_FC", 1),
            r"roi_heads.box_head.conv1.weight none -> \[256, 256, 3, 3\]",
        ),
        (("MODEL.FPN.NORM", "GN"), "backbone.fpn_lateral2.norm.weight none ->"),
        (
            ("MODEL.ROI_BOX_HEAD.FC_DIM", 512),
            r"box_head.fc2.weight \[1024, 1024\] -> \[512, 512\]",
        ),
        (
            ("MODEL.FPN.OUT_CHANNELS", 128),
            r"fpn_output2.weight \[256, 256, 3, 3\] -> \[128, 128, 3, 3\]",
        ),
    ],
)
def test_another_detector_is_refused(tmp_path, opts, layer):
    zoo_detector(FASTER, tmp_path / "zoo.pkl")
    cfg = own_config(OWN[FASTER], *opts)
    with pytest.raises(WeightsError, match=layer):
        load(cfg, tmp_path / "zoo.pkl")


def test_a_run_folder_is_a_start(tmp_path):
    with pytest.raises(MissingFileError, match="a folder without the checkpoint"):
        open_start_weights(str(tmp_path)).checkpoint()

    torch.save({"model": {"a.weight": torch.ones(1)}}, tmp_path / "model_final.pth")
    start = open_start_weights(str(tmp_path))
    assert start.checkpoint().tensors.keys() == {"a.weight"}
    assert local_file(str(tmp_path)) == start.address


def test_a_part_of_the_detector_that_the_model_lacks_is_named(tmp_path):
    zoo_detector(MASK, tmp_path / "zoo.pkl")
    _, report = load(own_config(OWN[FASTER]), tmp_path / "zoo.pkl")
    assert report.endswith("; not in the model: roi_heads.mask_head")


def test_a_detector_is_known_by_its_heads(tmp_path):
    zoo_detector(RETINANET, tmp_path / "zoo.pkl")
    assert is_detector(str(tmp_path / "zoo.pkl"))
    assert is_detector(own_config(OWN[MASK]).MODEL.WEIGHTS)

    backbone = {"model": {"res2.0.conv1.weight": torch.ones(1)}}
    torch.save(backbone, tmp_path / "R-50.pth")
    for address in ("", "gw://imagenet/R-50", str(tmp_path / "R-50.pth"), "none.pth"):
        assert not is_detector(address)
