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

from .fake_run import results_file, write_run

CAT = 5
DOG = 9
DATASET = {
    "images": [
        {"id": 1, "width": 200, "height": 100},
        {"id": 2, "width": 200, "height": 100},
    ],
    "categories": [{"id": CAT, "name": "cat"}, {"id": DOG, "name": "dog"}],
}
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


def detections(truth, found):
    """Return boxes (image, class, box, crowd) and (image, class, box, score) as Detections."""
    annotations = [
        {
            "id": number,
            "image_id": image,
            "category_id": category,
            "bbox": box,
            "area": box[2] * box[3],
            "iscrowd": crowd,
        }
        for number, (image, category, box, crowd) in enumerate(truth, 1)
    ]
    coco = COCO()
    coco.dataset = {**DATASET, "annotations": annotations}
    coco.createIndex()

    keys = ("image_id", "category_id", "bbox", "score")
    return Detections(
        cfg=default_config(),
        metadata=Metadata(thing_classes=["cat", "dog"]),
        records={},
        truth=coco,
        results=[dict(zip(keys, values, strict=True)) for values in found],
        tasks=["bbox"],
    )


def test_a_hand_made_image_is_matched():
    image, other = detections(TRUTH, FOUND).match(0.5)
    rows = [
        (
            match.kind,
            match.detection and match.detection["score"],
            match.annotation and match.annotation["id"],
        )
        for match in image.matches
    ]

    assert rows == [
        ("correct", 0.9, 1),
        ("duplicate", 0.8, None),
        ("wrong class", 0.7, 2),
        ("poor box", 0.65, None),
        ("background", 0.6, None),
        ("missed", None, 3),
    ]
    assert image.num_errors == 5
    (missed,) = other.matches
    assert (missed.kind, missed.annotation["id"]) == ("missed", 5)


def test_the_score_of_the_best_f1():
    threshold, f1 = detections(TRUTH, FOUND).best_threshold
    assert threshold == pytest.approx((0.9 + 0.8) / 2)
    assert f1 == 2 / (1 + 4)
    more = [*FOUND, (1, CAT, [80, 0, 20, 20], 0.75), (2, DOG, [100, 50, 20, 20], 0.72)]
    threshold, f1 = detections(TRUTH, more).best_threshold
    assert threshold == pytest.approx((0.72 + 0.7) / 2)
    assert f1 == 6 / (4 + 4)
    assert detections(TRUTH, []).best_threshold == (0.5, 0.0)


def test_the_object_of_a_correct_box_may_have_the_id_0():
    found = detections([(1, CAT, [0, 0, 20, 20], 0)], [(1, CAT, [0, 0, 20, 20], 0.9)])
    found.truth.dataset["annotations"][0]["id"] = 0
    found.truth.createIndex()
    assert found.best_threshold == (pytest.approx(0.45), 1.0)


def test_a_box_of_another_class_does_not_take_the_object_from_f1():
    truth = [(1, CAT, [0, 0, 20, 20], 0)]
    found = [(1, DOG, [0, 0, 20, 20], 0.9), (1, CAT, [0, 0, 20, 20], 0.8)]

    score, f1 = detections(truth, found).best_threshold
    assert (score, f1) == (pytest.approx(0.4), pytest.approx(2 / 3))
    # the kinds of errors compare no classes before the match
    kinds = [match.kind for match in detections(truth, found).match(0.0)[0].matches]
    assert kinds == ["wrong class", "duplicate"]


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
    truth = [(1, CAT, box, 0) for box in boxes]
    found = [(1, CAT, box, 0.9) for box in boxes]
    scores = detections(truth, found).scores("bbox")

    assert scores["AP@150"] == pytest.approx(100)
    assert scores["AP"] < 70
    assert "AP@150" not in detections(TRUTH, FOUND).scores("bbox")


def test_precision_and_ap_by_hand():
    truth = [(1, CAT, [0, 0, 20, 20], 0), (1, CAT, [50, 0, 20, 20], 0)]
    found = [
        (1, CAT, [0, 0, 20, 20], 0.9),
        (1, CAT, [150, 0, 20, 20], 0.8),
        (1, CAT, [50, 0, 20, 20], 0.7),
    ]
    curve = detections(truth, found).precision("bbox", 0.5)

    # recall 0 to 0.5, then to 1
    assert np.allclose(curve[:, 0], [1] * 51 + [2 / 3] * 50)
    assert np.isnan(curve[:, 1]).all()  # no dogs


def test_a_mask_is_small_by_its_own_area():
    square = [0, 0, 20, 0, 20, 20, 0, 20]
    thin = [50, 0, 149, 99, 148, 99]  # with a large box
    boxes = [(1, CAT, [0, 0, 20, 20], 0.8), (1, CAT, [50, 0, 99, 99], 0.9)]
    own = detections([(1, CAT, [0, 0, 20, 20], 0)], boxes)
    own = dataclasses.replace(own, tasks=["segm"])
    own.truth.anns[1]["segmentation"] = [square]
    for result, outline in zip(own.results, (square, thin), strict=True):
        mask = {"image_id": 1, "segmentation": [outline]}
        result["segmentation"] = own.truth.annToRLE(mask)

    scores = own.scores("segm")
    assert scores["AP"] == pytest.approx(50)
    assert scores["APs"] == pytest.approx(50)


def test_a_polygon_that_detectron2_leaves_out_is_not_drawn(tmp_path):
    file = tmp_path / "a.png"
    Image.new("RGB", (200, 100)).save(file)
    own = detections(TRUTH, FOUND)
    own = dataclasses.replace(
        own, records={1: {"file_name": file}}, tasks=["bbox", "segm"]
    )
    square = [0, 0, 20, 0, 20, 20, 0, 20]
    other = [1, 2, 3, 4, 5, 6, 7]  # three points and a half

    pictures = []
    for polygons in ([square], [square, other]):
        annotation = {**own.truth.anns[1], "segmentation": polygons}
        pictures.append(own.draw(1, [annotation], [""]))
    assert np.array_equal(*pictures)


def as_instances(record, results):
    """Return COCO results of an image as Detectron2's instances."""
    boxes = torch.tensor([result["bbox"] for result in results])
    corners = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
    instances = Instances((record["height"], record["width"]))
    instances.pred_boxes = Boxes(corners)
    instances.scores = torch.tensor([result["score"] for result in results])
    instances.pred_classes = torch.tensor(
        [result["category_id"] - 10 for result in results]
    )
    return instances


def test_scores_are_those_of_detectron2(tmp_path):
    run = RunFolder(write_run(tmp_path))
    records = run.records  # registers the dataset
    results = json.loads(results_file(tmp_path).read_text())
    evaluator = COCOEvaluator(
        run.dataset, tasks=("bbox",), distributed=False, use_fast_impl=False
    )
    evaluator.reset()
    for record in records:
        own = [result for result in results if result["image_id"] == record["image_id"]]
        evaluator.process([record], [{"instances": as_instances(record, own)}])
    expected = evaluator.evaluate()["bbox"]

    rows = write_report(tmp_path)["ap_per_class"]
    for row in rows:
        assert row["box AP"] == pytest.approx(expected[f"AP-{row['class']}"])
    for score in ("AP", "AP50", "AP75"):
        mean = np.mean([row[f"box {score}"] for row in rows])
        assert mean == pytest.approx(expected[score])
    assert 10 < expected["AP"] < 90
