"""Padding and tiles: what they change in a detector whose norms see single samples."""

import pytest
import torch
from detectron2.structures import Boxes, BoxMode, Instances

from examples.shapes import ShapesConfig, write_shapes
from experiments.padding import analyze_padding
from experiments.tiling import analyze_tiling
from experiments.trained_detector import box_ap, load_detector
from gw_detectron.config import read_config
from gw_detectron.modeling import build_checked_model

from ..tiny_run import CONFIG, OPTS, key_words

MODES = (BoxMode.XYWH_ABS, BoxMode.XYXY_ABS)


@pytest.fixture(scope="module")
def wide_and_tall_images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets") / "shapes"
    write_shapes(
        folder, ShapesConfig(num_train=1, num_val=4, min_side=64, max_side=128)
    )
    return folder


@pytest.fixture(scope="module", params=["GW", "GN"])
def detector(request, wide_and_tall_images, tmp_path_factory):
    """Config file and random weights of a detector with this norm."""
    norm = request.param
    keys = {
        **OPTS,
        "MODEL.RESNETS.NORM": norm,
        "MODEL.RESNETS.WHITEN_NORM": norm,
        "MODEL.FPN.NORM": norm,
    }
    cfg = read_config(CONFIG, key_words(keys))
    torch.manual_seed(0)
    model = build_checked_model(cfg, "cpu")

    folder = tmp_path_factory.mktemp("detector")
    torch.save({"model": model.state_dict()}, folder / "model.pth")
    (folder / "config.yaml").write_text(cfg.dump())
    (folder / "datasets.yaml").write_text(
        f"""
val:
  gw_synthetic_val:
    json: {wide_and_tall_images}/annotations/instances_val.json
    images: {wide_and_tall_images}/val
"""
    )
    return {
        "config_file": str(folder / "config.yaml"),
        "weights": str(folder / "model.pth"),
    }


def test_box_ap_of_right_and_missing_boxes(detector):
    _, inputs, evaluator = load_detector(**detector, images=3)
    objects = []
    nothing = []
    for record in inputs:
        size = (record["height"], record["width"])
        boxes = [each["bbox"] for each in record["annotations"]]
        instances = Instances(size)
        instances.pred_boxes = Boxes(BoxMode.convert(torch.tensor(boxes), *MODES))
        instances.pred_classes = torch.tensor(
            [each["category_id"] for each in record["annotations"]]
        )
        instances.scores = torch.ones(len(boxes))
        objects.append(instances)
        nothing.append(instances[:0])

    assert box_ap(evaluator, inputs, objects) == pytest.approx(100, abs=0.1)
    assert box_ap(evaluator, inputs, nothing) == 0
    assert 0 < box_ap(evaluator, inputs, [*objects[:2], nothing[2]]) < 90


def test_padding_changes_the_features_of_batches(detector):
    result = analyze_padding(**detector, batches=[1, 2, 4], images=0)

    assert result.settings["images"] == 4
    assert [row["batch"] for row in result.rows] == [1, 2, 4]
    shares = [row["padding"] for row in result.rows]
    assert shares == sorted(set(shares))
    assert shares[-1] < 1
    for level in ("p2", "p3", "p4", "p5", "p6"):
        alone, *together = (row[level] for row in result.rows)
        assert alone == 0
        assert min(together) > 0


def test_ways_to_predict_in_tiles(detector):
    result = analyze_tiling(**detector, tile=64, overlap=16, images=3)

    ways = [row["statistics"] for row in result.rows]
    assert ways[:5] == ["whole", "tile", "image", "windows", "shrunk"]
    for row in result.rows:
        assert row["seconds per image"] > 0
        assert 0 <= row["AP"] <= 100
