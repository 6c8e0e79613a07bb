"""Padding and tiles: what they change in a detector whose norms see single samples."""

import numpy as np
import pytest
import torch
from detectron2.structures import Boxes, Instances

from experiments.padding import analyze_padding
from experiments.tiling import analyze_tiling
from experiments.trained_detector import Example, box_ap
from gw_detectron.config import read_config
from gw_detectron.modeling import build_checked_model
from gw_detectron.workbench.dataset import SyntheticConfig, make_synthetic, register_synthetic

from ..tiny_run import CONFIG, OPTS


@pytest.fixture(scope="module")
def wide_and_tall_images(tmp_path_factory):
    root, data = (
        tmp_path_factory.mktemp("datasets"),
        SyntheticConfig(num_train=1, num_val=4, min_side=64, max_side=128),
    )
    make_synthetic(root, data)
    register_synthetic(root, data)
    yield
    register_synthetic()


@pytest.fixture(scope="module", params=["GW", "GN"])
def detector(request, wide_and_tall_images, tmp_path_factory):
    """Config file and random weights of a detector with this norm."""
    norm, folder = request.param, tmp_path_factory.mktemp("detector")
    keys = {
        **OPTS,
        "MODEL.RESNETS.NORM": norm,
        "MODEL.RESNETS.WHITEN_NORM": norm,
        "MODEL.FPN.NORM": norm,
    }
    cfg = read_config(str(CONFIG), [str(word) for pair in keys.items() for word in pair])
    torch.manual_seed(0)
    torch.save({"model": build_checked_model(cfg, "cpu").state_dict()}, folder / "model.pth")
    (folder / "config.yaml").write_text(cfg.dump())
    return {"config_file": str(folder / "config.yaml"), "weights": str(folder / "model.pth")}


def found(boxes, scores, classes):
    instances = Instances((64, 64))
    instances.pred_boxes = Boxes(torch.tensor(boxes).reshape(-1, 4))
    instances.scores, instances.pred_classes = torch.tensor(scores), torch.tensor(classes)
    return instances


def levels_of(row):
    return {name: value for name, value in row.items() if name[0] == "p" and name[1:].isdigit()}


def test_box_ap_of_right_missing_and_wrong_detections():
    boxes = np.array([[2.0, 3.0, 20.0, 30.0], [30.0, 30.0, 60.0, 50.0]])
    example = Example(torch.zeros(3, 64, 64), boxes, np.array([0, 1]), np.array([0, 0]))
    right = found(boxes.tolist(), [0.9, 0.8], [0, 1])
    assert box_ap([example, example], [right, right]) == pytest.approx(100)
    assert box_ap([example], [found([], [], [])]) == 0
    assert box_ap([example], [right[:1]]) == pytest.approx(50)  # the mean of the classes
    swapped = found(boxes.tolist(), [0.9, 0.8], [1, 0])
    assert box_ap([example], [swapped]) == 0
    moved = boxes + np.array(
        [[0, 0, 0, 9.0], [0, 0, 0, 0]]
    )  # IoU 27 / 36 = 0.75: six of ten thresholds
    assert box_ap([example], [found(moved.tolist(), [0.9, 0.8], [0, 1])]) == pytest.approx(
        (60 + 100) / 2, abs=0.1
    )


def test_padding_changes_the_features_of_batches(detector):
    result = analyze_padding(**detector, batches=[1, 2, 4])
    alone, *together = result.rows
    assert result.settings["images"] == 4 and [row["batch"] for row in result.rows] == [1, 2, 4]
    assert set(levels_of(alone)) == {"p2", "p3", "p4", "p5", "p6"}
    assert set(levels_of(alone).values()) == {0.0}
    assert all(value > 0 for row in together for value in levels_of(row).values())
    assert alone["padding"] < together[0]["padding"] < together[1]["padding"] < 1


def test_ways_to_predict_in_tiles(detector):
    result = analyze_tiling(**detector, tile=64, overlap=16, images=3)
    ways = [row["statistics"] for row in result.rows]
    assert ways[:5] == ["whole", "tile", "image", "windows", "shrunk"]
    assert all(row["seconds per image"] > 0 and 0 <= row["AP"] <= 100 for row in result.rows)
