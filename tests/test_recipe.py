"""The recipe from the data: what it sets, what it leaves to the user, and odd data."""

import itertools
import json
import re
import shutil

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.data.samplers import RepeatFactorTrainingSampler
from detectron2.modeling import build_model
from PIL import Image

from gw_detectron import auto_config
from gw_detectron.config import get_value, list_configs, read_config, shipped_configs
from gw_detectron.errors import ConfigError, DataError
from gw_detectron.workbench.commands.train import get_parser
from gw_detectron.workbench.commands.train import run_here as main
from gw_detectron.workbench.run import Trainer

from .photos import photo_names, write_photos
from .tiny_run import config_of

MASK = [[0, 0, 9, 0, 9, 9]]


def content(images=20, side=256, objects=5, size=40, classes=2, **fields):
    """Square objects on square images, the classes in turn."""
    annotations = []
    for image, number in itertools.product(range(images), range(objects)):
        annotations.append(
            {
                "image_id": image,
                "category_id": (image + number) % classes,
                "bbox": [0, 0, size, size],
                "segmentation": MASK,
                **fields,
            }
        )
    return {
        "images": [
            {"id": n, "file_name": f"{n}.png", "width": side, "height": side}
            for n in range(images)
        ],
        "categories": [{"id": n, "name": f"class {n}"} for n in range(classes)],
        "annotations": annotations,
    }


def recipe(tmp_path, data, *changes, config="own_mask_rcnn_R_18_FPN_GW", **options):
    cfg = read_config(f"Own-Data/{config}.yaml")
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", *changes])
    (tmp_path / "data.json").write_text(json.dumps(data))
    reasons = auto_config(cfg, tmp_path / "data.json", tmp_path, **options)
    assert all(reasons.values())
    return cfg, reasons


def test_small_dense_objects_get_pixels_anchors_and_room(tmp_path):
    cfg, reasons = recipe(tmp_path, content(objects=300, size=8))

    scales = cfg.INPUT.MIN_SIZE_TRAIN
    assert np.median(scales) == cfg.INPUT.MIN_SIZE_TEST == 384  # the most on a CPU
    assert len(set(scales)) > 1
    assert cfg.INPUT.AUGMENTATIONS
    assert cfg.SOLVER.EMA == 0.999

    assert cfg.MODEL.ANCHOR_GENERATOR.SIZES[0][0] <= 16
    assert cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE == 1024
    for use in ("TRAIN", "TEST"):
        assert cfg.MODEL.RPN[f"PRE_NMS_TOPK_{use}"] == 1500
        assert cfg.MODEL.RPN[f"POST_NMS_TOPK_{use}"] == 900

    assert cfg.TEST.DETECTIONS_PER_IMAGE >= 300
    assert "300 objects" in reasons["TEST.DETECTIONS_PER_IMAGE"]


def test_a_gpu_gets_larger_images(tmp_path):
    cfg, _ = recipe(tmp_path, content(objects=300, size=8), "MODEL.DEVICE", "cuda")
    assert cfg.INPUT.MIN_SIZE_TEST == 512  # twice the image, no more


@pytest.mark.parametrize(
    ("device", "objects", "regions"),
    [
        *(("cpu", 12, 128), ("cpu", 25, 128), ("cpu", 60, 256)),
        *(("cuda", 12, 128), ("cuda", 25, 256), ("cuda", 60, 512)),
    ],
)
def test_dense_objects_get_more_regions(tmp_path, device, objects, regions):
    cfg, _ = recipe(tmp_path, content(objects=objects), "MODEL.DEVICE", device)
    assert regions == cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE


def test_large_objects_get_small_images_or_large_anchors(tmp_path):
    cfg, _ = recipe(tmp_path, content(objects=1, size=250))
    assert cfg.INPUT.MIN_SIZE_TEST == 160  # the least

    large = content(side=900, objects=1, size=800)
    cfg, _ = recipe(tmp_path, large, "INPUT.MIN_SIZE_TRAIN", (800,))
    (largest,) = cfg.MODEL.ANCHOR_GENERATOR.SIZES[-1]
    assert largest >= 0.8 * 800 * cfg.INPUT.MIN_SIZE_TRAIN[0] / 900


def test_long_objects_get_long_anchors(tmp_path):
    cfg, _ = recipe(tmp_path, content(bbox=[0, 0, 160, 10]))
    assert min(cfg.MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS[0]) <= 0.25


def test_a_trained_detector_keeps_its_anchors_and_trains_half_as_long(tmp_path):
    long = content(bbox=[0, 0, 160, 10])
    config = "own_mask_rcnn_R_50_FPN_zoo"
    zoo = read_config(f"Own-Data/{config}.yaml")
    cfg, reasons = recipe(tmp_path, long, config=config)
    other, _ = recipe(tmp_path, long, "MODEL.WEIGHTS", "R-50.pkl", config=config)

    assert cfg.MODEL.ANCHOR_GENERATOR == zoo.MODEL.ANCHOR_GENERATOR
    assert other.MODEL.ANCHOR_GENERATOR != zoo.MODEL.ANCHOR_GENERATOR
    assert cfg.SOLVER.BASE_LR == other.SOLVER.BASE_LR / 2
    assert abs(2 * cfg.SOLVER.MAX_ITER - other.SOLVER.MAX_ITER) <= 1
    assert "trained detector" in reasons["SOLVER.BASE_LR"]


def test_masks_decide_their_format_and_whether_there_is_a_mask_head(tmp_path):
    cfg, _ = recipe(tmp_path, content(segmentation={"size": [256, 256], "counts": "0"}))
    assert cfg.MODEL.MASK_ON
    assert cfg.INPUT.MASK_FORMAT == "bitmask"

    cfg, reasons = recipe(tmp_path, content(segmentation=[]))
    assert not cfg.MODEL.MASK_ON
    assert "100 of 100" in reasons["MODEL.MASK_ON"]


def test_images_of_rare_classes_are_repeated(tmp_path):
    data = content(images=60, classes=3, objects=1, category_id=0)
    often = content(images=50, objects=1, category_id=2)
    rare = content(images=1, objects=1, category_id=1)
    data["annotations"] += often["annotations"] + rare["annotations"]

    cfg, _ = recipe(tmp_path, data)

    assert cfg.DATALOADER.SAMPLER_TRAIN == "RepeatFactorTrainingSampler"
    records = [
        {"annotations": [a for a in data["annotations"] if a["image_id"] == n]}
        for n in range(60)
    ]
    factors = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency(
        records, cfg.DATALOADER.REPEAT_THRESHOLD
    )
    assert factors[0] > 2
    assert (factors[1:] == 1).all()


def test_without_a_rare_class_no_image_is_repeated(tmp_path):
    cfg, _ = recipe(tmp_path, content(classes=9))
    assert cfg.DATALOADER.SAMPLER_TRAIN == "TrainingSampler"


@pytest.mark.parametrize(
    ("config", "images", "rate"),
    [
        ("own_mask_rcnn_R_18_FPN_GW", 1, 0.02),
        ("own_mask_rcnn_R_18_FPN_GW", 4, 0.04),
        ("own_mask_rcnn_R_18_FPN_GN", 4, 0.02),
        ("own_faster_rcnn_R_50_FPN_GW", 8, 0.01),  # the recipe of COCO, scaled linearly
    ],
)
def test_rate_and_length_follow_from_the_batch(tmp_path, config, images, rate):
    cfg, _ = recipe(
        tmp_path, content(), "SOLVER.IMS_PER_BATCH", images, config=config, epochs=8
    )
    assert pytest.approx(rate) == cfg.SOLVER.BASE_LR
    assert 8 * 20 / images == cfg.SOLVER.MAX_ITER == cfg.TEST.EVAL_PERIOD


def test_the_rate_of_retinanet(tmp_path):
    changes = ["MODEL.META_ARCHITECTURE", "RetinaNet", "SOLVER.IMS_PER_BATCH", 16]
    cfg, _ = recipe(tmp_path, content(), *changes, config="own_faster_rcnn_R_50_FPN_GW")
    assert cfg.SOLVER.BASE_LR == 0.01


@pytest.mark.parametrize(
    ("images", "passes", "times"), [(8, 100, 5), (250, 24, 4), (4000, 12, 2)]
)
def test_length_and_periods_follow_from_the_images(tmp_path, images, passes, times):
    cfg, _ = recipe(tmp_path, content(images=images, objects=1))

    assert passes * images // 2 == cfg.SOLVER.MAX_ITER
    assert cfg.SOLVER.MAX_ITER // times == cfg.TEST.EVAL_PERIOD
    assert cfg.TEST.EVAL_PERIOD % cfg.SOLVER.CHECKPOINT_PERIOD == 0
    assert 0 < cfg.SOLVER.CHECKPOINT_PERIOD <= cfg.SOLVER.MAX_ITER / 10


def test_objects_as_large_as_the_image_have_positive_anchors():
    for name in list_configs():
        if name.startswith("Own-Data/"):
            assert read_config(name).MODEL.RPN.BOUNDARY_THRESH == -1, name


def test_the_class_of_the_smallest_objects_decides_the_image_size(tmp_path):
    data = content(side=900, size=300, category_id=0)
    for annotation in data["annotations"][::20]:
        annotation |= {"category_id": 1, "bbox": [0, 0, 20, 20]}

    cfg, _ = recipe(tmp_path, data)

    assert cfg.INPUT.MIN_SIZE_TEST == 384


def test_given_keys_stay(tmp_path):
    given = {
        "INPUT.MIN_SIZE_TRAIN": (96,),
        "INPUT.AUGMENTATIONS": [],
        "SOLVER.MAX_ITER": 40,
        "MODEL.ANCHOR_GENERATOR.SIZES": [[9]] * 5,
    }
    words = [word for pair in given.items() for word in pair]

    cfg, reasons = recipe(tmp_path, content(objects=300, size=8), *words, given=given)

    assert not given.keys() & reasons.keys()
    assert {key: get_value(cfg, key) for key in given} == given
    assert cfg.INPUT.MIN_SIZE_TEST == 96  # follows from them
    assert cfg.SOLVER.STEPS == (30, 36)


@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_the_rate_drops_before_the_end_of_the_shortest_run(tmp_path, iterations):
    keys = ["SOLVER.MAX_ITER", iterations, "DATASETS.TEST", ("kitchen", "garden")]
    cfg, _ = recipe(tmp_path, content(), *keys, given=keys)
    assert all(step < iterations for step in cfg.SOLVER.STEPS)
    assert cfg.TEST.BEST == "kitchen/segm/AP"

    keys += ["TEST.EVAL_PERIOD", 0]
    cfg, _ = recipe(tmp_path, content(), *keys, given=keys)
    assert not cfg.TEST.BEST  # it would need evaluations


@pytest.mark.parametrize(
    ("val", "best"),
    [
        (content(objects=100, classes=1), "AP"),
        (content(objects=101, classes=1), "AP@101"),
        ([], "AP"),
    ],
)
def test_the_best_weights_have_the_ap_that_counts_all_objects(tmp_path, val, best):
    (tmp_path / "val.json").write_text(json.dumps(val))
    register_coco_instances("dense", {}, f"{tmp_path}/val.json", f"{tmp_path}")
    dense = ("DATASETS.TEST", ("dense",))

    cfg, _ = recipe(tmp_path, content(), *dense)
    assert f"segm/{best}" == cfg.TEST.BEST

    cfg, _ = recipe(tmp_path, content(), *dense, "MODEL.KEYPOINT_ON", True)
    assert cfg.TEST.BEST.startswith("keypoints/AP")


ODD = {
    "one object": content(images=1, objects=1),
    "1000 classes": content(images=200, classes=1000),
    "no pixel to spare": content(side=1, size=1),
    "some boxes of zero area": {
        **content(),
        "annotations": content()["annotations"] + content(size=0)["annotations"],
    },
    "mixed sizes": {
        **content(),
        "images": [{"id": n, "width": 8 + 90 * n, "height": 40} for n in range(20)],
    },
}


@pytest.mark.parametrize("name", ODD)
def test_odd_data_give_a_config_that_can_be_built(tmp_path, name):
    cfg, _ = recipe(tmp_path, ODD[name])

    steps = [0, *cfg.SOLVER.STEPS, cfg.SOLVER.MAX_ITER]
    assert steps == sorted(set(steps))
    assert cfg.SOLVER.WARMUP_ITERS < cfg.SOLVER.MAX_ITER
    cfg.MODEL.DEVICE = "meta"
    with torch.device("meta"):
        model = build_model(cfg)
    assert model.roi_heads.num_classes == len(ODD[name]["categories"])


@pytest.mark.parametrize(
    "data",
    [
        content(objects=0),
        content(size=0),
        content(iscrowd=1),
        content(ignore=1),
        [],
        content(bbox=None),
    ],
)
def test_data_without_an_object_to_learn_are_refused(tmp_path, data):
    with pytest.raises(DataError):
        recipe(tmp_path, data)


@pytest.mark.parametrize(
    ("data", "words"),
    [({"shapes": []}, "no list images"), ({"images": []}, "not in COCO format")],
)
def test_another_format_is_refused_with_a_fix(tmp_path, data, words):
    with pytest.raises(DataError, match=f"data.json': .*{words}.* Fix: "):
        recipe(tmp_path, data)


@pytest.mark.parametrize("epochs", [0, -1, np.inf, np.nan])
def test_epochs_are_above_zero(tmp_path, epochs):
    with pytest.raises(ConfigError, match="--epochs"):
        recipe(tmp_path, content(), epochs=epochs)


def test_auto_without_training_data_is_refused():
    with pytest.raises(ConfigError, match="--auto.*--train-json"):
        main(get_parser().parse_args(["--auto", "--num-gpus", "0"]))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Start a run on photos by the words of its command line, without a step; return its config."""

    def begin(trainer):
        trainer._run.begin()
        trainer._lock.close()

    monkeypatch.setattr(Trainer, "train", begin)
    write_photos(tmp_path, photo_names(12))
    data = [
        *("--train-json", f"{tmp_path}/annotations.json"),
        *("--train-images", f"{tmp_path}/photos"),
        *("--val-fraction", "0.3", "--num-gpus", "0"),
    ]

    def prepared(*flags, keys=()):
        words = [*flags, *data, "OUTPUT_DIR", f"{tmp_path}/out", *keys]
        main(get_parser().parse_args(words))
        return read_config(f"{tmp_path}/out/config.yaml")

    return prepared


def test_a_run_with_auto_alone(run, tmp_path):
    cfg = run("--auto", keys=["MODEL.RPN.POST_NMS_TOPK_TEST", "77"])

    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 3
    assert cfg.MODEL.RESNETS.DEPTH == 18
    assert cfg.MODEL.MASK_ON
    assert cfg.MODEL.RPN.POST_NMS_TOPK_TEST == 77
    images = len(DatasetCatalog.get("custom_train"))
    assert 100 * images // 2 == cfg.SOLVER.MAX_ITER
    log = (tmp_path / "out" / "log.txt").read_text()
    assert re.search("--auto: SOLVER.MAX_ITER.*passes over", log)


def test_a_run_with_auto_keeps_its_recipe_when_its_data_have_grown(run, tmp_path):
    cfg = run("--auto")
    write_photos(tmp_path, photo_names(30))

    assert run("--auto", "--resume").SOLVER.MAX_ITER == cfg.SOLVER.MAX_ITER

    words = ["--auto", "--eval-only", "--num-gpus", "0", "OUTPUT_DIR"]
    evaluated = config_of(get_parser().parse_args([*words, f"{tmp_path}/out"]))
    assert evaluated.INPUT.MIN_SIZE_TEST == cfg.INPUT.MIN_SIZE_TEST != 320
    with pytest.raises(ConfigError, match="OUTPUT_DIR"):
        config_of(get_parser().parse_args([*words, f"{tmp_path}/none"]))


def test_the_config_of_a_run_is_no_choice_of_keys(run, tmp_path):
    first = run("--auto", keys=["SOLVER.BASE_LR", "0.5", "SOLVER.MAX_ITER", "7"])
    shutil.move(tmp_path / "out", tmp_path / "first")

    second = run("--auto", "--config-file", f"{tmp_path}/first")

    assert (first.SOLVER.BASE_LR, first.SOLVER.MAX_ITER) == (0.5, 7)
    assert second.SOLVER.BASE_LR != 0.5
    assert second.SOLVER.MAX_ITER > 7


def test_keys_of_the_users_own_yaml_stay(run, tmp_path):
    shipped = shipped_configs()["Own-Data/own_faster_rcnn_R_18_FPN_GN.yaml"]
    (tmp_path / "base.yaml").write_text(
        f"_BASE_: {shipped}\nSOLVER: {{BASE_LR: 0.003}}\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "_BASE_: base.yaml\nINPUT: {MIN_SIZE_TRAIN: [99]}\n"
    )

    cfg = run("--auto", "--config-file", f"{tmp_path}/mine.yaml")

    assert cfg.SOLVER.BASE_LR == 0.003
    assert list(cfg.INPUT.MIN_SIZE_TRAIN) == [99]
    assert cfg.INPUT.MIN_SIZE_TEST == 99


def deepen(folder):
    """Save photos as gray images of 16 bits."""
    for path in folder.iterdir():
        gray = np.asarray(Image.open(path).convert("L"))
        Image.fromarray(gray.astype(np.uint16) * 200).save(path, format="PNG")


def test_percentiles_keep_the_pixels_of_small_objects(run, tmp_path):
    deepen(tmp_path / "photos")
    path = tmp_path / "annotations.json"
    content = json.loads(path.read_text())
    for annotation in content["annotations"]:
        side = 2 if annotation["image_id"] % 2 else 6
        annotation["bbox"][2:] = [side, side]
        del annotation["segmentation"], annotation["area"]
    path.write_text(json.dumps(content))

    cfg = run("--auto", keys=["MODEL.MASK_ON", "False"])

    low, high = cfg.INPUT.PERCENTILES
    image = content["images"][0]
    covered = 100 * 2 * 4 / (image["width"] * image["height"])
    assert 0 < low < covered / 2
    assert high == 100 - low


def test_deep_images_and_augmentations_reach_the_loaders(run, tmp_path):
    deepen(tmp_path / "photos")
    augmentations = ["INPUT.AUGMENTATIONS", "['RandomCrop(size=48)']"]

    cfg = run("--auto", keys=[*augmentations, "DATALOADER.NUM_WORKERS", "0"])

    assert list(cfg.INPUT.PERCENTILES) == [0.5, 99.5]
    for example in next(iter(Trainer.build_train_loader(cfg))):
        _, height, width = example["image"].shape
        assert height == width
        assert example["image"].max() > 150
    # more than 8 bits are an error otherwise
    next(iter(Trainer.build_test_loader(cfg, "custom_val")))


def test_epochs_set_the_schedule_alone(run, tmp_path):
    cfg = run("--epochs", "4", "--config-file", "own_mask_rcnn_R_18_FPN_GW")

    assert 2 * len(DatasetCatalog.get("custom_train")) == cfg.SOLVER.MAX_ITER
    assert cfg.INPUT.MIN_SIZE_TEST == 320

    (tmp_path / "mine.yaml").write_text(
        "_BASE_: own_mask_rcnn_R_18_FPN_GW\nSOLVER: {MAX_ITER: 7, STEPS: [5]}\n"
    )
    again = run("--epochs", "4", "--config-file", f"{tmp_path}/mine.yaml").SOLVER
    assert (again.MAX_ITER, again.STEPS) == (cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS)
