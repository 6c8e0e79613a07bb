import json
import sys

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from PIL import Image

from gw_detectron.export import export_detector, read_image_for
from gw_detectron.model_zoo import get_config

FIELDS = ["pred_boxes", "pred_classes", "pred_masks", "scores"]


@pytest.fixture(scope="module")
def cfg():
    """A Mask R-CNN with whitening in the backbone, FPN and both heads."""
    cfg = get_config("quick_schedules/mask_rcnn_R_18_FPN_GW_demo.yaml")
    cfg.merge_from_list(
        ["MODEL.FPN.OUT_CHANNELS", 32, "MODEL.ROI_BOX_HEAD.FC_DIM", 32, "MODEL.ROI_BOX_HEAD.NUM_CONV", 1]
    )
    cfg.merge_from_list(["MODEL.ROI_MASK_HEAD.NUM_CONV", 1, "MODEL.RPN.POST_NMS_TOPK_TEST", 20])
    return cfg


@pytest.fixture(scope="module")
def model(cfg):
    torch.manual_seed(0)
    model = build_model(cfg)
    with torch.no_grad():  # random boxes of clearly different scores
        model.roi_heads.box_predictor.cls_score.weight.normal_(0, 2)
        model.proposal_generator.rpn_head.objectness_logits.weight.normal_(0, 0.5)
    return model


@pytest.fixture(scope="module")
def image():
    return 255 * torch.rand(3, 96, 128, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def exported(model, image, tmp_path_factory):
    pytest.importorskip("detectron2.export", reason="this Detectron2 imports Caffe2 there", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("detector") / "out"
    return folder, export_detector(model, folder, image, sides=(96, 200), source={"weights": "none"})


@pytest.mark.parametrize("size", [(96, 128), (160, 96), (70, 141)])
def test_the_trace_agrees_at_other_sizes(exported, model, size):
    folder, report = exported
    assert report["outputs"] == [*FIELDS, "image_size"]
    image = 255 * torch.rand(3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.eval().inference([{"image": image}], do_postprocess=False)[0]
        *found, image_size = torch.jit.load(folder / "model.ts")(image)
    assert len(expected) > 0
    assert tuple(image_size.tolist()) == size
    for name, value in zip(FIELDS, found, strict=True):
        field = expected.get(name)
        assert torch.allclose(value, field if isinstance(field, torch.Tensor) else field.tensor, atol=1e-4), name


def test_an_image_with_nothing_in_it(exported, image):
    traced = torch.jit.load(exported[0] / "model.ts")
    with torch.no_grad():
        traced.state_dict()["model.roi_heads.box_predictor.cls_score.bias"][-1] = 1e4  # everything is background
        found = traced(image)
    assert [tuple(value.shape) for value in found] == [(0, 4), (0,), (0, 1, 28, 28), (0,), (2,)]


def test_the_report(exported):
    folder, report = exported
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "model.ts", "parity.json"]
    assert json.loads((folder / "parity.json").read_text()) == json.loads(json.dumps(report))
    assert report["input"]["channels"] == "RGB" and len(report["input"]["pixel_mean"]) == 3
    sizes = [(case["height"], case["width"]) for case in report["cases"]]
    assert sizes == [(96, 128), (57, 102), (96, 128)]
    assert report["cases"][0]["detections"] > 0
    assert report["cases"][0]["levels"]["pred_boxes"]["shape"] == [report["cases"][0]["detections"], 4]
    assert report["worst_relative"] < 1e-5


def test_the_readme_needs_torch_and_torchvision_alone(exported, run_readme):
    printed = run_readme(exported[0], forbid=("gw_detectron", "detectron2", "fvcore"))
    assert "image_size (2,)" in printed
    text = (exported[0] / "README.md").read_text()
    assert "a shorter side of 96 and a longer side of at most\n  200 pixels: do the same." in text
    assert exported[1]["resized_in_evaluation"] == {"shorter": 96, "longer_at_most": 200}


def test_the_model_stays_as_it_is(exported, model, image, tmp_path):
    model.train()
    export_detector(model, tmp_path / "out", image)  # without sides, the README names none
    assert "do the same" not in (tmp_path / "out" / "README.md").read_text()
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_image_without_detections_is_refused(exported, cfg, image, tmp_path):
    cfg = cfg.clone()
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.999
    with pytest.raises(ValueError, match="image: the detector finds nothing in it"):
        export_detector(build_model(cfg), tmp_path / "out", image)
    assert list(tmp_path.iterdir()) == []


def test_other_models_are_refused(exported, model, image, tmp_path):
    with pytest.raises(ValueError, match=r"model \('GWFPN'\): only a GeneralizedRCNN .*Fix: export its backbone"):
        export_detector(model.backbone, tmp_path / "out", image)


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()


def test_a_model_that_cannot_be_traced_is_refused(exported, model, image, tmp_path, monkeypatch):
    head = type(model.roi_heads.box_head)
    forward = head.forward
    monkeypatch.setattr(head, "forward", lambda self, x: Opaque.apply(forward(self, x)))
    with pytest.raises(ValueError, match=r"cannot trace this detector: .*Opaque.* Fix: export its backbone"):
        export_detector(model, tmp_path / "out", image)
    assert list(tmp_path.iterdir()) == []


def test_a_detectron2_that_needs_caffe2(model, image, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "detectron2.export", None)
    with pytest.raises(ImportError, match=r"detectron2.export: .*main branch, or the 0.5 that tools/install"):
        export_detector(model, tmp_path / "out", image)


def test_an_image_is_read_as_in_evaluation(cfg, tmp_path):
    Image.fromarray(np.full((40, 80, 3), (250, 20, 10), np.uint8)).save(tmp_path / "red.png")
    image = read_image_for(cfg, tmp_path / "red.png")
    assert image.shape == (3, 128, 256)
    assert image[:, 0, 0].tolist() == [250, 20, 10]
    cfg = cfg.clone()
    cfg.INPUT.FORMAT = "BGR"
    assert read_image_for(cfg, tmp_path / "red.png")[:, 0, 0].tolist() == [10, 20, 250]


def test_what_is_no_image(cfg, tmp_path):
    with pytest.raises(FileNotFoundError, match="image .*red.png.*: file not found"):
        read_image_for(cfg, tmp_path / "red.png")
    (tmp_path / "red.png").write_text("red")
    with pytest.raises(ValueError, match="red.png.*cannot be read: "):
        read_image_for(cfg, tmp_path / "red.png")


@pytest.mark.parametrize("key", ["INPUT.MIN_SIZE_TEST", "INPUT.MAX_SIZE_TEST"])
def test_a_negative_size_is_refused(cfg, tmp_path, key):
    Image.fromarray(np.zeros((40, 80, 3), np.uint8)).save(tmp_path / "black.png")
    cfg = cfg.clone()
    cfg.merge_from_list([key, -5])
    with pytest.raises(ValueError, match=rf"^{key} \(-5\): expected at least \d. Fix: "):
        read_image_for(cfg, tmp_path / "black.png")
