"""A run folder as training leaves it, with the detector of a moment's initialization; and a predictor made by hand."""

import numpy as np
import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.data import Metadata
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from PIL import Image

from gw_detectron.config import default_config
from gw_detectron.weights import RUN_RECORD_KEY, RunRecord

from ..export.tiny_networks import detector_config

SIDES = (96, 160)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """A run on a user's data: config.yaml, model_final.pth with its classes, and last_checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    cfg = detector_config(
        "mask",
        MODEL__DEVICE="cpu",
        MODEL__ROI_HEADS__NUM_CLASSES=3,
        INPUT__MIN_SIZE_TEST=SIDES[0],
        INPUT__MAX_SIZE_TEST=SIDES[1],
        DATASETS__TRAIN=("photos_train",),
        DATASETS__TEST=("photos_val",),
    )
    torch.manual_seed(0)
    model = build_model(cfg)
    with torch.no_grad():  # many detections of clearly different scores
        model.proposal_generator.rpn_head.objectness_logits.weight.normal_(0, 0.5)
        model.roi_heads.box_predictor.cls_score.weight.normal_(0, 2)
        model.roi_heads.box_predictor.bbox_pred.weight.normal_(0, 0.5)
    classes = {2: "fork", 7: "cup", 40: "plate"}
    record = RunRecord(cfg.dump(), 0, classes, image_scale=0.5).state_dict()
    DetectionCheckpointer(model, str(folder)).save(
        "model_final", **{RUN_RECORD_KEY: record}
    )
    (folder / "config.yaml").write_text(cfg.dump())
    return folder


@pytest.fixture(scope="session")
def photo():
    """Random pixels, RGB."""
    return np.random.default_rng(0).integers(0, 256, (96, 131, 3), np.uint8)


@pytest.fixture
def photos(tmp_path, photo):
    """A folder of two photos, one of them below it."""
    folder = tmp_path / "photos"
    (folder / "sub").mkdir(parents=True)
    Image.fromarray(photo).save(folder / "b.png")
    Image.fromarray(photo[:, ::-1]).save(folder / "sub" / "a.jpg")
    return folder


class Handmade:
    """Find a square in its upper left corner and an object of low score in every image."""

    score_threshold = 0.5
    image_scale = 0.0
    metadata = Metadata(
        thing_classes=["fork", "cup"], thing_dataset_id_to_contiguous_id={2: 0, 7: 1}
    )

    def __init__(self):
        self.cfg = default_config()
        self.is_full = False

    def __call__(self, image):
        found = Instances(image.shape[:2])
        found.pred_boxes = Boxes(
            torch.tensor([[0.0, 0.0, 10.0, 12.0], [20.0, 20.0, 30.0, 30.0]])
        )
        found.scores, found.pred_classes = (
            torch.tensor([0.75, 0.25]),
            torch.tensor([1, 0]),
        )
        found.pred_masks = torch.zeros(2, *image.shape[:2], dtype=torch.bool)
        found.pred_masks[0, :12, :10] = True
        return found[found.scores > self.score_threshold]


@pytest.fixture
def predictor():
    return Handmade()


@pytest.fixture
def video(tmp_path):
    """A video of five frames, from black to red."""
    cv2 = pytest.importorskip("cv2")
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 8, (64, 48))
    for value in (0, 60, 120, 180, 240):
        writer.write(np.full((48, 64, 3), (0, 0, value), np.uint8))  # BGR
    writer.release()
    return path
