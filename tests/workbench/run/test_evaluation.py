"""AP of images with more objects than COCO's limit of detections: the standard one, and one that counts all."""

import json

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.structures import Boxes, BoxMode, Instances
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from gw_detectron.weights import LazyCheckpoint
from gw_detectron.workbench.run.config_checks import preflight
from gw_detectron.workbench.run.evaluation import DenseCOCOEvaluator, build_coco_evaluator

from ..checks.sound_run import config

SIGMAS = [0.1, 0.1]


def grid(count):
    return [
        [10 * (number % 30), 10 * (number // 30), 8, 7 + number % 2] for number in range(count)
    ]


@pytest.fixture
def crowded(tmp_path):
    """Register an image with ``count`` cells and three dogs, and one with a cell; return the path of the file."""

    def register(count):
        boxes = [(1, box, 1) for box in grid(count)] + [
            (1, [5, 250, 40 + 9 * k, 30], 2) for k in range(3)
        ]
        boxes.append((2, [10, 10, 30, 30], 1))
        annotations = [
            {
                "id": number,
                "image_id": image,
                "category_id": category,
                "bbox": box,
                "area": box[2] * box[3],
                "iscrowd": 0,
            }
            | {
                "keypoints": [box[0] + 2, box[1] + 2, 2, box[0] + 5, box[1] + 5, 2],
                "num_keypoints": 2,
            }
            for number, (image, box, category) in enumerate(boxes, 1)
        ]
        images = [
            {"id": k, "file_name": f"{k}.jpg", "height": 300, "width": 300} for k in (1, 2)
        ]
        categories = [{"id": 1, "name": "cell"}, {"id": 2, "name": "dog"}]
        path = tmp_path / f"{count}.json"
        path.write_text(
            json.dumps({"images": images, "annotations": annotations, "categories": categories})
        )
        register_coco_instances("crowded", {}, str(path), str(tmp_path))
        DatasetCatalog.get("crowded")
        return path

    return register


def evaluate(path, tasks, detections=500):
    """Evaluate detections that are right but for some noise."""
    random = np.random.default_rng(0)
    evaluator = DenseCOCOEvaluator(
        "crowded", detections, tasks=tasks, kpt_oks_sigmas=SIGMAS, distributed=False
    )
    evaluator.reset()
    truth = json.loads(path.read_text())["annotations"]
    for image in (1, 2):
        found = [each for each in truth if each["image_id"] == image]
        boxes = np.array([each["bbox"] for each in found]) + random.normal(
            0, 0.4, (len(found), 4)
        )
        boxes[:, 2:] += boxes[:, :2]
        instances = Instances((300, 300))
        instances.pred_boxes = Boxes(torch.tensor(boxes))
        instances.scores = torch.tensor(random.uniform(0, 1, len(found)))
        instances.pred_classes = torch.tensor([each["category_id"] - 1 for each in found])
        instances.pred_keypoints = torch.tensor(
            [each["keypoints"] for each in found], dtype=torch.float
        ).view(-1, 2, 3)
        evaluator.process([{"image_id": image}], [{"instances": instances}])
    return evaluator.evaluate(), [
        each for one in evaluator._predictions for each in one["instances"]
    ]


@pytest.mark.parametrize(("count", "detections", "limit"), [(150, 100, 150), (272, 500, 500)])
def test_boxes_beyond_the_limit(crowded, count, detections, limit):
    path = crowded(count)
    results, predictions = evaluate(path, ("bbox",), detections)
    reference = COCOeval(COCO(str(path)), COCO(str(path)).loadRes(predictions), "bbox")
    reference.params.maxDets = [1, 10, 100, limit]
    reference.evaluate()
    reference.accumulate()
    standard, dense = (100 * reference.eval["precision"][:, :, :, 0, k].mean() for k in (2, 3))
    assert results["bbox"]["AP"] == pytest.approx(standard) and results["bbox"][
        f"AP@{limit}"
    ] == pytest.approx(dense)
    assert results["bbox"]["AP"] + 5 < results["bbox"][f"AP@{limit}"]
    assert results["bbox"]["AP-cell"] + results["bbox"]["AP-dog"] == pytest.approx(
        2 * results["bbox"]["AP"]
    )


@pytest.mark.parametrize(
    ("task", "count", "names"),
    [("keypoints", 19, []), ("keypoints", 30, ["AP@500"]), ("bbox", 100, [])],
)
def test_an_ap_is_added_only_beyond_the_limit_of_the_task(crowded, task, count, names):
    scores = evaluate(crowded(count), (task,))[0][task]
    assert [name for name in scores if "@" in name] == names
    assert all(scores[name] > scores["AP"] + 10 for name in names)


def test_a_python_dataset_whose_ids_are_names_stays_as_it_is(tmp_path):
    each = {
        "bbox": [5, 5, 25, 25],
        "bbox_mode": BoxMode.XYXY_ABS,
        "category_id": 0,
        "keypoints": [10.0, 10.0, 2],
    }
    records = [
        {
            "file_name": "a.jpg",
            "height": 40,
            "width": 50,
            "image_id": "a",
            "annotations": [each],
        }
    ]
    DatasetCatalog.register("named", lambda: records)
    MetadataCatalog.get("named").thing_classes = ["cell"]
    for _ in range(2):
        evaluator = build_coco_evaluator(
            "named", str(tmp_path), detections=100, tasks=("bbox",)
        )
        (truth,) = evaluator._coco_api.dataset["annotations"]
        assert truth["keypoints"] == [9.5, 9.5, 2] and each["keypoints"] == [10, 10, 2]
    evaluator.reset()
    boxes, scores, classes = (
        Boxes(torch.tensor([[5.0, 5, 25, 25]])),
        torch.ones(1),
        torch.zeros(1, dtype=torch.long),
    )
    found = Instances((40, 50), pred_boxes=boxes, scores=scores, pred_classes=classes)
    evaluator.process([{"image_id": "a"}], [{"instances": found}])
    assert evaluator.evaluate()["bbox"]["AP"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("count", "best"), [(150, "bbox/AP@150"), (150, "bbox/AP@500"), (100, "bbox/AP@100")]
)
@pytest.mark.parametrize("detections", [100, 500])
def test_the_best_weights_may_be_those_of_the_added_ap(
    crowded, tmp_path, count, best, detections
):
    names = [
        f"bbox/{name}" for name in evaluate(crowded(count), ("bbox",), detections)[0]["bbox"]
    ]
    sets = {
        "DATASETS__TRAIN": ("crowded",),
        "DATASETS__TEST": ("crowded",),
        "TEST__DETECTIONS_PER_IMAGE": detections,
    }
    found = preflight(
        config(tmp_path, TEST__BEST=best, TEST__EVAL_PERIOD=1, **sets), LazyCheckpoint()
    ).errors
    refused = [error for error in found if "TEST.BEST" in error]
    assert bool(refused) == (best not in names) and all(
        name in error for error in refused for name in names
    )
