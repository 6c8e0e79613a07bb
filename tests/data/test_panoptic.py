"""Keypoints, segment ids and semantic masks of the synthetic dataset, against its masks and COCO's own readers."""

import contextlib
import io
import json
import os

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, DatasetMapper, MetadataCatalog
from detectron2.data.detection_utils import create_keypoint_hflip_indices
from detectron2.data.transforms import RandomFlip
from detectron2.evaluation import SemSegEvaluator
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from gw_detectron.data import SyntheticConfig, make_synthetic, register_synthetic
from gw_detectron.data.synthetic import draw_scene
from gw_detectron.data.synthetic.annotations import KEYPOINTS, to_coco
from gw_detectron.data.synthetic.panoptic import to_panoptic

BACKGROUND_ID = 7  # after six classes
TINY = SyntheticConfig(num_train=12, num_val=8, min_side=64, max_side=90, max_objects=4, crowd_fraction=0.4)
SEPARATED = "gw_synthetic_val_panoptic_separated"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    make_synthetic(root, TINY)
    register_synthetic(root, TINY)
    yield root / "gw_synthetic"
    register_synthetic()


def content(root, task):
    return json.loads((root / "annotations" / f"{task}_val.json").read_text())


def segment_ids(root, name):
    red, green, blue = np.moveaxis(np.asarray(Image.open(root / "panoptic_val" / name), dtype=int), -1, 0)
    return red + 256 * green + 256**2 * blue  # Source: id2rgb of COCO's panopticapi


def test_keypoints_are_the_extreme_points_of_the_visible_part():
    checked = 0
    for index in range(TINY.num_train):
        for obj in draw_scene(TINY, "train", index).objects:
            annotation = to_coco(obj, 1, 1)
            points = np.reshape(annotation["keypoints"], (4, 3))
            if obj.crowd:
                assert not points.any() and annotation["num_keypoints"] == 0
                continue
            assert annotation["num_keypoints"] == 4 and (points[:, 2] == 2).all()
            x, y, width, height = annotation["bbox"]
            (_, top), (left, _), (_, bottom), (right, _) = points[:, :2] + 0.5
            np.testing.assert_allclose([left, top, right - left, bottom - top], [x, y, width, height], atol=0.02)
            rows, columns = np.nonzero(obj.mask)  # tips thinner than a pixel cover no pixel center
            for (px, py), edge, axis in zip(
                points[:, :2], (rows.min(), columns.min(), rows.max(), columns.max()), (1, 0, 1, 0), strict=True
            ):
                assert abs((px, py)[axis] - edge) < 2.5
                assert np.hypot(columns - px, rows - py).min() < 3
            checked += 1
    assert checked > 15


def test_the_coco_api_scores_the_true_keypoints_100(root):
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(root / "annotations" / "instances_val.json"))
        keys = ("image_id", "category_id", "keypoints")
        results = [{key: a[key] for key in keys} | {"score": 1.0} for a in truth.anns.values() if not a["iscrowd"]]
        score = COCOeval(truth, truth.loadRes(results), "keypoints")
        score.params.kpt_oks_sigmas = np.full(len(KEYPOINTS), 0.1)
        score.evaluate()
        score.accumulate()
        score.summarize()
    assert score.stats[0] == pytest.approx(1.0)


def test_a_flip_exchanges_left_and_right(root):
    record = next(r for r in DatasetCatalog.get("gw_synthetic_train") if not r["annotations"][0]["iscrowd"])
    flips = create_keypoint_hflip_indices(["gw_synthetic_train"])
    arguments = {"is_train": True, "image_format": "RGB", "use_keypoint": True, "keypoint_hflip_indices": flips}
    plain, flipped = (
        DatasetMapper(augmentations=augmentations, **arguments)(record)["instances"].gt_keypoints.tensor[0]
        for augmentations in ([], [RandomFlip(prob=1.0)])
    )
    top, left, bottom, right = plain[:, 0]
    mirrored = record["width"] - torch.stack([top, right, bottom, left])
    torch.testing.assert_close(flipped[:, 0], mirrored)
    torch.testing.assert_close(flipped[:, 1], plain[[0, 3, 2, 1], 1])


def test_every_pixel_belongs_to_the_segment_of_its_mask(root):
    annotations = content(root, "panoptic")["annotations"]
    assert len(annotations) == TINY.num_val
    for index, annotation in enumerate(annotations):
        ids = segment_ids(root, annotation["file_name"])
        objects = draw_scene(TINY, "val", index).objects
        segments = {segment["id"]: segment for segment in annotation["segments_info"]}
        assert set(np.unique(ids)) == set(segments)  # nothing is void, nothing is empty
        for obj, identifier in zip(objects, segments, strict=False):
            np.testing.assert_array_equal(ids == identifier, obj.mask)
            assert segments[identifier]["category_id"] == obj.category + 1
            assert segments[identifier]["iscrowd"] == obj.crowd
        for identifier, segment in segments.items():
            rows, columns = np.nonzero(ids == identifier)
            assert segment["area"] == len(rows)
            x, y, width, height = segment["bbox"]
            assert (x, y, x + width, y + height) == (
                columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
            )  # fmt: skip
        background = [identifier for identifier, s in segments.items() if s["category_id"] == BACKGROUND_ID]
        semantic = np.asarray(Image.open(root / "panoptic_stuff_val" / annotation["file_name"]))
        np.testing.assert_array_equal(semantic, np.isin(ids, background))


def test_ids_above_255_use_the_other_channels():
    (obj,) = draw_scene(SyntheticConfig(max_objects=1, crowd_fraction=0.0), "train", 0).objects
    labels = to_panoptic([obj] * 300, BACKGROUND_ID)  # the last one owns what all share
    assert [segment["id"] for segment in labels.segments] == list(range(1, 302))
    assert (labels.image[obj.mask] == [300 - 256, 1, 0]).all()
    assert (labels.image[~obj.mask] == [301 - 256, 1, 0]).all()


def test_an_image_without_background_has_no_segment_for_it():
    (obj,) = draw_scene(SyntheticConfig(max_objects=1, crowd_fraction=0.0), "train", 0).objects
    obj.visible = np.full_like(obj.visible, -1.0)
    labels = to_panoptic([obj], BACKGROUND_ID)
    assert [segment["category_id"] for segment in labels.segments] == [obj.category + 1]
    assert not labels.semantic.any()


def test_the_categories_tell_things_from_stuff(root):
    categories = content(root, "panoptic")["categories"]
    assert [category["isthing"] for category in categories] == [1] * 6 + [0]
    metadata = MetadataCatalog.get(SEPARATED)
    assert metadata.stuff_classes == ["things", "background"]
    assert metadata.stuff_dataset_id_to_contiguous_id == {0: 0, categories[-1]["id"]: 1}
    assert metadata.evaluator_type == "coco_panoptic_seg"


def test_detectron2_reads_the_panoptic_dataset(root):
    records = DatasetCatalog.get(SEPARATED)
    assert len(records) == TINY.num_val
    mapped = DatasetMapper(is_train=True, augmentations=[], image_format="RGB")(records[0])
    assert mapped["sem_seg"].shape == mapped["image"].shape[1:]
    evaluator = SemSegEvaluator(SEPARATED, distributed=False)
    evaluator.reset()
    for record in records:
        truth = torch.from_numpy(np.asarray(Image.open(record["sem_seg_file_name"])).astype(int))
        logits = torch.nn.functional.one_hot(truth, 2).permute(2, 0, 1)
        evaluator.process([record], [{"sem_seg": logits}])
    assert evaluator.evaluate()["sem_seg"]["mIoU"] == pytest.approx(100)


def test_panoptic_quality_of_the_ground_truth_is_100(root):
    evaluation = pytest.importorskip("panopticapi.evaluation", reason="panopticapi is not installed")
    truth, folder = str(root / "annotations" / "panoptic_val.json"), str(root / "panoptic_val")
    with contextlib.redirect_stdout(io.StringIO()):
        result = evaluation.pq_compute(truth, truth, gt_folder=folder, pred_folder=folder)
    assert result["All"]["pq"] == pytest.approx(1.0)


@pytest.mark.parametrize("folder", ["panoptic_train", "panoptic_stuff_val"])
def test_a_missing_label_image_is_named(tmp_path, folder):
    config = SyntheticConfig(num_train=2, num_val=2, min_side=64, max_side=64)
    found = make_synthetic(tmp_path, config)
    victim = min((found / folder).iterdir())
    os.remove(victim)
    with pytest.raises(ValueError, match=rf"{folder}': 1 of 2 images are missing, first {victim.name}"):
        make_synthetic(tmp_path, config)
