"""Scores against Detectron2's evaluation and by hand; matches of a hand-made image."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from detectron2.data import Metadata
from detectron2.evaluation import COCOEvaluator
from detectron2.structures import Boxes, Instances
from PIL import Image
from pycocotools.coco import COCO

from gw_detectron.config import default_config
from gw_detectron.workbench.report import RunFolder, write_report
from gw_detectron.workbench.report.detections import Detections

from .fake_run import write_run

CAT, DOG = 5, 9


def detections(truth, found):
    """Boxes (image, class, box, crowd) and (image, class, box, score) as Detections."""
    coco = COCO()
    coco.dataset = {
        "images": [
            {"id": 1, "width": 200, "height": 100},
            {"id": 2, "width": 200, "height": 100},
        ],
        "categories": [{"id": CAT, "name": "cat"}, {"id": DOG, "name": "dog"}],
        "annotations": [
            {
                "id": i,
                "image_id": image,
                "category_id": key,
                "bbox": box,
                "area": box[2] * box[3],
                "iscrowd": crowd,
            }
            for i, (image, key, box, crowd) in enumerate(truth, 1)
        ],
    }
    coco.createIndex()
    results = [
        {"image_id": image, "category_id": key, "bbox": box, "score": score}
        for image, key, box, score in found
    ]
    return Detections(
        default_config(), Metadata(thing_classes=["cat", "dog"]), {}, coco, results, ["bbox"]
    )


TRUTH = [
    (1, CAT, [0, 0, 20, 20], 0),
    (1, DOG, [40, 0, 20, 20], 0),
    (1, CAT, [80, 0, 20, 20], 0),
    (1, CAT, [0, 50, 60, 40], 1),
    (2, DOG, [100, 50, 20, 20], 0),
]
FOUND = [
    (1, CAT, [0, 0, 20, 19], 0.9),  # correct
    (1, CAT, [0, 1, 20, 20], 0.8),  # its duplicate
    (1, CAT, [41, 0, 20, 20], 0.7),  # a dog
    (1, CAT, [90, 0, 20, 20], 0.65),  # IoU 1/3
    (1, DOG, [150, 70, 20, 20], 0.6),  # background
    (1, CAT, [10, 60, 20, 20], 0.95),  # in the crowd
    (1, DOG, [40, 0, 20, 20], 0.3),  # below the score
]


def test_a_hand_made_image_is_matched():
    own = detections(TRUTH, FOUND)
    image, other = own.match(0.5)
    assert [each["score"] for each in image.found] == [0.9, 0.8, 0.7, 0.65, 0.6]
    assert image.kinds == ["correct", "duplicate", "wrong class", "poor box", "background"]
    assert [each["id"] for each in image.missed] == [3] and image.errors == 5
    assert [each and each["id"] for each in image.matched] == [1, None, 2, None, None]
    assert (other.image_id, other.found, [each["id"] for each in other.missed]) == (2, [], [5])


def test_objects_found_at_no_score_are_counted_by_the_reason():
    truth = [
        *TRUTH,
        (2, CAT, [0, 0, 20, 20], 0),
        (2, CAT, [2, 0, 20, 20], 0),
        (2, DOG, [0, 40, 20, 20], 0),
    ]
    found = [*FOUND, (2, CAT, [1, 0, 20, 20], 0.01), (2, CAT, [0, 40, 20, 20], 0.9)]
    assert list(detections(truth, found).unfound().values()) == [1, 1, 1, 1]
    assert list(detections(truth, []).unfound().values()) == [0, 0, 0, 7]


def test_a_perfect_detector_has_full_ap_where_all_its_detections_count():
    boxes = [[1 + 6 * (k % 30), 1 + 6 * (k // 30), 5, 5] for k in range(150)]
    own = detections([(1, CAT, box, 0) for box in boxes], [(1, CAT, box, 0.9) for box in boxes])
    assert own.dense_score("bbox") == {"AP@150": pytest.approx(100)}
    assert own.scores["bbox"].stats[0] < 0.7  # untouched
    assert detections(TRUTH, FOUND).dense_score("bbox") == {}


def test_precision_and_ap_by_hand():
    truth = [(1, CAT, [0, 0, 20, 20], 0), (1, CAT, [50, 0, 20, 20], 0)]
    found = [
        (1, CAT, [0, 0, 20, 20], 0.9),
        (1, CAT, [150, 0, 20, 20], 0.8),
        (1, CAT, [50, 0, 20, 20], 0.7),
    ]
    curve = detections(truth, found).precision("bbox", 0.5)
    assert np.allclose(curve[:, 0], [1] * 51 + [2 / 3] * 50)  # recall 0 to 0.5, then to 1
    assert np.isnan(curve[:, 1]).all()  # no dogs


def test_a_mask_is_small_by_its_own_area():
    found = detections(
        [(1, CAT, [0, 0, 20, 20], 0)],
        [(1, CAT, [0, 0, 20, 20], 0.8), (1, CAT, [50, 0, 99, 99], 0.9)],
    )
    outlines = (
        [0, 0, 20, 0, 20, 20, 0, 20],
        [50, 0, 149, 99, 148, 99],
    )  # the thin one has a large box
    for each, outline in zip(found.results, outlines, strict=True):
        each["segmentation"] = found.truth.annToRLE({"image_id": 1, "segmentation": [outline]})
    found.truth.anns[1]["segmentation"] = [outlines[0]]
    scores = dataclasses.replace(found, tasks=["segm"]).scores["segm"].stats
    assert scores[[0, 3]] == pytest.approx(0.5)  # AP and that of small objects


def test_a_polygon_that_detectron2_leaves_out_is_not_drawn(tmp_path):
    own = detections(TRUTH, FOUND)
    Image.new("RGB", (200, 100)).save(tmp_path / "a.png")
    own = dataclasses.replace(
        own, records={1: {"file_name": tmp_path / "a.png"}}, tasks=["bbox", "segm"]
    )
    square = [0, 0, 20, 0, 20, 20, 0, 20]
    pictures = [
        own.draw(1, [own.truth.anns[1] | {"segmentation": polygons}], [""])
        for polygons in (
            [square],
            [square, [1, 2, 3, 4, 5, 6, 7]],
        )  # the coordinates of three points and a half
    ]
    assert np.array_equal(*pictures)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return RunFolder(write_run(tmp_path_factory.mktemp("run")))


def test_scores_are_those_of_detectron2(run):
    evaluator = COCOEvaluator(
        run.records and run.dataset, tasks=("bbox",), distributed=False, use_fast_impl=False
    )
    evaluator.reset()
    results = json.loads((run.folder / "inference" / "coco_instances_results.json").read_text())
    for record in run.records:
        own = [each for each in results if each["image_id"] == record["image_id"]]
        boxes = torch.tensor([each["bbox"] for each in own])
        instances = Instances((record["height"], record["width"]))
        instances.pred_boxes = Boxes(torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1))
        instances.scores = torch.tensor([each["score"] for each in own])
        instances.pred_classes = torch.tensor([each["category_id"] - 10 for each in own])
        evaluator.process([record], [{"instances": instances}])
    expected = evaluator.evaluate()["bbox"]
    rows = write_report(run.folder)["ap_per_class"]
    assert [row["box AP"] for row in rows] == pytest.approx(
        [expected[f"AP-{row['class']}"] for row in rows]
    )
    assert 10 < expected["AP"] < 90
    assert np.mean([row["box AP"] for row in rows]) == pytest.approx(expected["AP"])
    assert np.mean([row["box AP50"] for row in rows]) == pytest.approx(expected["AP50"])
    assert 100 * np.mean(run.detections.precision("bbox", 0.75)) == pytest.approx(
        expected["AP75"]
    )
