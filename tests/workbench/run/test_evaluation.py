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
from gw_detectron.workbench.run.checks import check_run
from gw_detectron.workbench.run.evaluation import (
    DenseCOCOEvaluator,
    build_coco_evaluator,
)

from ..sound_run import config

SIGMAS = [0.1, 0.1]


@pytest.fixture
def crowded(tmp_path):
    """Register an image with ``count`` cells and three dogs, and one with a cell; return the path of the file."""

    def register(count):
        path = tmp_path / f"{count}.json"
        path.write_text(json.dumps(crowded_images(count)))
        register_coco_instances("crowded", {}, str(path), str(tmp_path))
        DatasetCatalog.get("crowded")
        return path

    return register


def crowded_images(count):
    cells = [[10 * (k % 30), 10 * (k // 30), 8, 7 + k % 2] for k in range(count)]
    dogs = [[5, 250, 40 + 9 * k, 30] for k in range(3)]
    # image, class, box
    objects = [(1, 1, box) for box in cells]
    objects += [(1, 2, box) for box in dogs]
    objects.append((2, 1, [10, 10, 30, 30]))

    annotations = []
    for number, (image, category, box) in enumerate(objects, 1):
        x, y, width, height = box
        annotations.append(
            {
                "id": number,
                "image_id": image,
                "category_id": category,
                "bbox": box,
                "area": width * height,
                "iscrowd": 0,
                "keypoints": [x + 2, y + 2, 2, x + 5, y + 5, 2],
                "num_keypoints": 2,
            }
        )
    size = {"height": 300, "width": 300}
    return {
        "images": [{"id": k, "file_name": f"{k}.jpg", **size} for k in (1, 2)],
        "annotations": annotations,
        "categories": [{"id": 1, "name": "cell"}, {"id": 2, "name": "dog"}],
    }


def evaluate(path, task, detections=500):
    """Evaluate detections that are right but for some noise; return the scores and the detections."""
    random = np.random.default_rng(0)
    evaluator = DenseCOCOEvaluator(
        "crowded", detections, tasks=(task,), kpt_oks_sigmas=SIGMAS, distributed=False
    )
    evaluator.reset()
    truth = json.loads(path.read_text())["annotations"]

    for image in (1, 2):
        objects = [
            annotation for annotation in truth if annotation["image_id"] == image
        ]
        boxes = np.array([annotation["bbox"] for annotation in objects])
        boxes = boxes + random.normal(0, 0.4, boxes.shape)
        boxes[:, 2:] += boxes[:, :2]
        keypoints = torch.tensor([annotation["keypoints"] for annotation in objects])
        instances = Instances((300, 300))
        instances.pred_boxes = Boxes(torch.tensor(boxes))
        instances.scores = torch.tensor(random.uniform(0, 1, len(objects)))
        instances.pred_classes = torch.tensor(
            [annotation["category_id"] - 1 for annotation in objects]
        )
        instances.pred_keypoints = keypoints.float().view(-1, 2, 3)
        evaluator.process([{"image_id": image}], [{"instances": instances}])

    scores = evaluator.evaluate()[task]
    return scores, [one for part in evaluator._predictions for one in part["instances"]]


@pytest.mark.parametrize(
    ("count", "detections", "limit"), [(150, 100, 150), (272, 500, 500)]
)
def test_boxes_beyond_the_limit(crowded, count, detections, limit):
    path = crowded(count)

    scores, predictions = evaluate(path, "bbox", detections)

    truth = COCO(str(path))
    reference = COCOeval(truth, truth.loadRes(predictions), "bbox")
    reference.params.maxDets = [1, 10, 100, limit]
    reference.evaluate()
    reference.accumulate()
    precision = reference.eval["precision"]
    standard, dense = (100 * precision[:, :, :, 0, k].mean() for k in (2, 3))
    assert scores["AP"] == pytest.approx(standard)
    assert scores[f"AP@{limit}"] == pytest.approx(dense)
    assert scores["AP"] + 5 < scores[f"AP@{limit}"]
    assert scores["AP-cell"] + scores["AP-dog"] == pytest.approx(2 * scores["AP"])


@pytest.mark.parametrize(
    ("task", "count", "names"),
    [("keypoints", 19, []), ("keypoints", 30, ["AP@500"]), ("bbox", 100, [])],
)
def test_an_ap_is_added_only_beyond_the_limit_of_the_task(crowded, task, count, names):
    scores, _ = evaluate(crowded(count), task)

    assert [name for name in scores if "@" in name] == names
    assert all(scores[name] > scores["AP"] + 10 for name in names)


def test_an_info_that_pycocotools_cannot_copy_is_not_evaluated(crowded):
    path = crowded(5)
    content = json.dumps({**crowded_images(5), "info": "DEEP"})
    path.write_text(content.replace('"DEEP"', "[" * 600 + "]" * 600))

    scores, _ = evaluate(path, "bbox")

    assert scores["AP"] > 50


def test_a_python_dataset_whose_ids_are_names_stays_as_it_is(tmp_path, caplog):
    annotation = {
        "bbox": [5, 5, 25, 25],
        "bbox_mode": BoxMode.XYXY_ABS,
        "category_id": 0,
        "keypoints": [10.0, 10.0, 2],
    }
    record = {"file_name": "a.jpg", "height": 40, "width": 50, "image_id": "a"}
    records = [{**record, "annotations": [annotation]}]
    DatasetCatalog.register("named", lambda: records)
    MetadataCatalog.get("named").thing_classes = ["cell"]

    for _ in range(2):
        evaluator = build_coco_evaluator(
            "named", str(tmp_path), detections=100, tasks=("bbox",)
        )
        (truth,) = evaluator._coco_api.dataset["annotations"]
        assert truth["keypoints"] == [9.5, 9.5, 2]
        assert annotation["keypoints"] == [10, 10, 2]
        assert not hasattr(MetadataCatalog.get("named"), "json_file")
    assert "cached" not in caplog.text

    evaluator.reset()
    instances = Instances((40, 50))
    instances.pred_boxes = Boxes(torch.tensor([[5.0, 5, 25, 25]]))
    instances.scores = torch.ones(1)
    instances.pred_classes = torch.zeros(1, dtype=torch.long)
    evaluator.process([{"image_id": "a"}], [{"instances": instances}])
    assert evaluator.evaluate()["bbox"]["AP"] == pytest.approx(100)


@pytest.mark.parametrize(
    ("count", "best"),
    [(150, "bbox/AP@150"), (150, "bbox/AP@500"), (100, "bbox/AP@100")],
)
@pytest.mark.parametrize("detections", [100, 500])
def test_the_best_weights_may_be_those_of_the_added_ap(
    crowded, tmp_path, count, best, detections
):
    scores, _ = evaluate(crowded(count), "bbox", detections)
    cfg = config(
        tmp_path,
        TEST__BEST=best,
        TEST__EVAL_PERIOD=1,
        DATASETS__TRAIN=("crowded",),
        DATASETS__TEST=("crowded",),
        TEST__DETECTIONS_PER_IMAGE=detections,
    )

    errors = check_run(cfg, LazyCheckpoint()).errors

    names = [f"bbox/{name}" for name in scores]
    refusals = [error for error in errors if "TEST.BEST" in error]
    assert bool(refusals) == (best not in names)
    assert all(name in error for error in refusals for name in names)
