"""Padding and tiles: what they change in a detector whose norms see single samples."""

import numpy as np
import pytest
import torch
from detectron2.structures import Boxes, Instances

from experiments import padding, tiling
from experiments.padding import analyze_padding
from experiments.tiling import analyze_tiling
from experiments.trained_detector import Example, box_ap, load_detector
from gw_detectron.config import read_config
from gw_detectron.data import SyntheticConfig, make_synthetic, register_synthetic
from gw_detectron.errors import ConfigError
from gw_detectron.modeling import build_checked_model

from ..report.fake_run import write_run
from ..tiny_run import CONFIG, OPTS

WAYS = ["whole", "own", "joint"]


@pytest.fixture(scope="module")
def wide_and_tall_images(tmp_path_factory):
    root, data = tmp_path_factory.mktemp("datasets"), SyntheticConfig(num_train=1, num_val=4, min_side=64, max_side=128)
    make_synthetic(root, data)
    register_synthetic(root, data)
    yield
    register_synthetic()


@pytest.fixture(scope="module")
def detectors(wide_and_tall_images, tmp_path_factory):
    """Config file and random weights of a detector, by norm."""
    made = {}
    for norm in ("GW", "GN", "FrozenBN"):
        folder = tmp_path_factory.mktemp(norm)
        keys = {**OPTS, "MODEL.RESNETS.NORM": norm, "MODEL.RESNETS.WHITEN_NORM": norm, "MODEL.FPN.NORM": norm}
        if norm == "FrozenBN":
            keys["MODEL.RESNETS.WHITEN_POSITIONS"] = ""
        cfg = read_config(str(CONFIG), [str(word) for pair in keys.items() for word in pair])
        torch.manual_seed(0)
        torch.save({"model": build_checked_model(cfg, "cpu").state_dict()}, folder / "model.pth")
        (folder / "config.yaml").write_text(cfg.dump())
        made[norm] = {"config_file": str(folder / "config.yaml"), "weights": str(folder / "model.pth")}
    return made


def test_a_run_on_own_data(tmp_path):
    folder = write_run(tmp_path / "run", weights=True)
    arguments = {"config_file": str(folder / "config.yaml"), "weights": str(folder / "model_final.pth")}
    _, examples = load_detector(**arguments, images=2)
    assert len(examples) == 2 and len(examples[0].boxes) > 0
    text = (folder / "config.yaml").read_text().replace("fake_val", "unknown_val")
    (folder / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"DATASETS.TEST \('unknown_val'\): not registered. Fix: register it"):
        load_detector(**arguments)


def found(boxes, scores, classes):
    instances = Instances((64, 64))
    instances.pred_boxes = Boxes(torch.tensor(boxes).reshape(-1, 4))
    instances.scores, instances.pred_classes = torch.tensor(scores), torch.tensor(classes)
    return instances


def levels_of(row):
    return {name: value for name, value in row.items() if name[0] == "p" and name[1:].isdigit()}


# --- AP -------------------------------------------------------------------------------------------------


def test_box_ap_of_right_missing_and_wrong_detections():
    boxes = np.array([[2.0, 3.0, 20.0, 30.0], [30.0, 30.0, 60.0, 50.0]])
    example = Example(torch.zeros(3, 64, 64), boxes, np.array([0, 1]), np.array([0, 0]))
    right = found(boxes.tolist(), [0.9, 0.8], [0, 1])
    assert box_ap([example, example], [right, right]) == pytest.approx(100)
    assert box_ap([example], [found([], [], [])]) == 0
    assert box_ap([example], [right[:1]]) == pytest.approx(50)  # the mean of the classes
    swapped = found(boxes.tolist(), [0.9, 0.8], [1, 0])
    assert box_ap([example], [swapped]) == 0
    moved = boxes + np.array([[0, 0, 0, 9.0], [0, 0, 0, 0]])  # IoU 27 / 36 = 0.75: six of ten thresholds
    assert box_ap([example], [found(moved.tolist(), [0.9, 0.8], [0, 1])]) == pytest.approx((60 + 100) / 2, abs=0.1)


def test_detections_in_a_crowd_are_no_errors():
    boxes = np.array([[0.0, 0.0, 20.0, 20.0], [30.0, 30.0, 60.0, 60.0]])
    example = Example(torch.zeros(3, 64, 64), boxes, np.array([0, 0]), np.array([0, 1]))
    in_crowd = found([[32.0, 32.0, 40.0, 40.0], [0.0, 0.0, 20.0, 20.0]], [0.9, 0.8], [0, 0])
    assert box_ap([example], [in_crowd]) == pytest.approx(100)
    assert box_ap([example._replace(crowds=np.array([0, 0]))], [in_crowd]) < 50


# --- padding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["GW", "GN"])
def test_padding_changes_the_features_of_batches(detectors, norm):
    result = analyze_padding(**detectors[norm], batches=[1, 2, 4])
    alone, *together = result.rows
    assert result.settings["images"] == 4 and [row["batch"] for row in result.rows] == [1, 2, 4]
    assert set(levels_of(alone)) == {"p2", "p3", "p4", "p5", "p6"}
    assert set(levels_of(alone).values()) == {0.0}
    assert all(value > 0 for row in together for value in levels_of(row).values())
    assert alone["padding"] < together[0]["padding"] < together[1]["padding"] < 1


def test_padding_does_not_change_the_features_of_fixed_norms_far_from_it(detectors):
    frozen, whitened = (analyze_padding(**detectors[norm], batches=[4]).rows[0]["p2"] for norm in ("FrozenBN", "GW"))
    assert frozen < 0.5 * whitened


def test_features_of_an_image_have_its_own_size_in_every_batch(detectors):
    model, _ = load_detector(**detectors["GW"], images=1)
    group = [torch.rand(3, 64, 64), torch.rand(3, 150, 64)]  # the batch has levels of 5 and 3 rows below each other
    shapes = [{name: values.shape for name, values in features.items()} for features in padding._features(model, group)]
    alone = [{name: values.shape for name, values in next(padding._features(model, [x])).items()} for x in group]
    assert shapes == alone and shapes[0]["p6"] == (32, 1, 1)


# --- tiles ----------------------------------------------------------------------------------------------


def test_tiles_are_cut_row_by_row():
    image = torch.arange(3 * 4 * 6).reshape(3, 4, 6)
    cut = tiling._tiles(image, 2)
    assert torch.equal(cut[0], image[:, :2, :3]) and torch.equal(cut[1], image[:, :2, 3:])
    assert torch.equal(cut[2], image[:, 2:, :3]) and torch.equal(cut[3], image[:, 2:, 3:])


def test_boxes_are_clipped_to_their_tile():
    boxes = np.array([[30.0, 10.0, 50.0, 20.0], [0.0, 0.0, 10.0, 10.0], [35.0, 30.0, 45.0, 60.0]])
    clipped, inside = tiling._clip(boxes, (0, 40), (32, 32))  # the tile of rows 0 to 32, columns 40 to 72
    assert inside.tolist() == [True, False, False]  # one half, nothing, 5 x 2 of 10 x 30 pixels
    assert clipped[0].tolist() == [0, 10, 10, 20]


@pytest.mark.parametrize("norm", ["GW", "GN"])
def test_joint_statistics_bring_tiles_closer_to_the_image(detectors, norm):
    result = analyze_tiling(**detectors[norm], tiles=[2])
    assert [row["statistics"] for row in result.rows] == WAYS and {row["images"] for row in result.rows} == {4}
    whole, own, joint = result.rows
    assert set(levels_of(whole).values()) == {0.0}
    assert joint["p2"] < own["p2"]


def test_one_tile_is_the_image(detectors):
    whole, own, joint = analyze_tiling(**detectors["GW"], tiles=[1], images=1).rows
    assert set(levels_of(own).values()) == set(levels_of(joint).values()) == {0.0}
    assert whole["AP"] == own["AP"] == joint["AP"]


# --- bad input ------------------------------------------------------------------------------------------


def test_wrong_numbers_are_refused(detectors):
    with pytest.raises(ConfigError, match=r"batches \(\[0\]\): expected positive numbers. Fix: give 1 or more"):
        analyze_padding(**detectors["GW"], batches=[0])
    with pytest.raises(ConfigError, match=r"tiles \(\[\]\): expected positive numbers"):
        analyze_tiling(**detectors["GW"], tiles=[])
    with pytest.raises(ConfigError, match=r"tiles \(4\): no image has 128 pixels per side. Fix: give fewer tiles"):
        analyze_tiling(**detectors["GW"], tiles=[4])
    with pytest.raises(ConfigError, match=r"images \(-1\): negative"):
        load_detector(**detectors["GW"], images=-1)


def test_norms_without_statistics_of_samples_have_none_to_share(detectors):
    with pytest.raises(ValueError, match="no GroupWhitening2d or nn.GroupNorm"):
        analyze_tiling(**detectors["FrozenBN"], tiles=[2])
