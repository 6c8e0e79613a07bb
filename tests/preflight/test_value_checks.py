"""Config values that cannot work are found before the run, each with its key."""

import pytest
from detectron2.config import get_cfg

from gw_detectron import add_gw_config, model_zoo
from gw_detectron.config import read_config
from gw_detectron.preflight import value_checks
from gw_detectron.preflight.findings import Findings
from gw_detectron.preflight.value_checks import check_values

from .sound_run import one

NAN, INF = float("nan"), float("inf")
WRONG = {
    "DATALOADER.SAMPLER_TRAIN": ["Foo"],
    "DATALOADER.NUM_WORKERS": [-1, 10**6],
    "SOLVER.BASE_LR": [-1.0, 0.0, NAN, INF],
    "SOLVER.MOMENTUM": [-0.1, 1.0, NAN],
    "SOLVER.WEIGHT_DECAY": [-1e-4, NAN, INF],
    "SOLVER.WEIGHT_DECAY_NORM": [-1e-4, NAN, INF],
    "SOLVER.WEIGHT_DECAY_BIAS": [-1e-4, NAN, INF],
    "SOLVER.GAMMA": [-0.1, 0.0, NAN],
    "SOLVER.WARMUP_FACTOR": [-1.0, NAN],
    "SOLVER.WARMUP_ITERS": [-1],
    "SOLVER.WARMUP_METHOD": ["cosine"],
    "SOLVER.CHECKPOINT_PERIOD": [0, -5],
    "SOLVER.MAX_ITER": [0, -1, 10**30],
    "SOLVER.IMS_PER_BATCH": [0, -2],
    "SOLVER.ACCUMULATE": [0, -2, 1.5, True],
    "SOLVER.STEPS": [("a",), (1.5,)],
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": ["full"],
    "SOLVER.CLIP_GRADIENTS.CLIP_VALUE": [0.0, -1.0, NAN],
    "SOLVER.CLIP_GRADIENTS.NORM_TYPE": [0.0, NAN],
    "SOLVER.REFERENCE_WORLD_SIZE": [-1, 7],
    "SEED": [2**32, 10**30],
    "TEST.EVAL_PERIOD": [-1],
    "TEST.DETECTIONS_PER_IMAGE": [0, -1],
    "TEST.AUG.MIN_SIZES": [(), (0,), (1,), ("a",)],
    "TEST.AUG.MAX_SIZE": [1],
    "TEST.EXPECTED_RESULTS": [[[1]], [["bbox", "AP", "x", 1.0]], ["bbox"]],
    "INPUT.MIN_SIZE_TRAIN": [(-5,), ("a",), (), (10**9,), (3.5,)],
    "INPUT.MAX_SIZE_TRAIN": [0, -1],
    "INPUT.MIN_SIZE_TRAIN_SAMPLING": ["all", "range"],
    "INPUT.RANDOM_FLIP": ["diagonal"],
    "INPUT.MASK_FORMAT": ["rle"],
    "INPUT.FORMAT": ["XYZ", "L", "YUV-BT.601"],
    "MODEL.PIXEL_STD": [[0.0, 1.0, 1.0], [1.0], []],
    "MODEL.PIXEL_MEAN": [[1.0, 2.0], [NAN, 0.0, 0.0], ["a", "b", "c"]],
    "MODEL.BACKBONE.FREEZE_AT": [-1, 9],
    "MODEL.RPN.BBOX_REG_LOSS_TYPE": ["l2"],
    "MODEL.RPN.CONV_DIMS": [[0], [-2]],
    "MODEL.RPN.POSITIVE_FRACTION": [-0.5, 1.5],
    "MODEL.RPN.NMS_THRESH": [2.0],
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN": [0, -1],
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": [-0.1, 1.1, NAN],
    "MODEL.ROI_HEADS.NUM_CLASSES": [0, -3],
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": [0],
    "MODEL.ANCHOR_GENERATOR.SIZES": [[], [[]], [[-32]]],
    "MODEL.RESNETS.OUT_FEATURES": [[], [3]],
    "VIS_PERIOD": [-1],
}


def checked(key: str, value: object, eval_only: bool = False) -> Findings:
    cfg, findings = get_cfg(), Findings()
    add_gw_config(cfg)
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ("a",)
    *path, name = key.split(".")
    node = cfg
    for part in path:
        node = node[part]
    node[name] = value  # merging would refuse some of the types before
    check_values(cfg, findings, eval_only=eval_only)
    return findings


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_value_that_cannot_work(key, value):
    problems = checked(key, value).problems
    assert problems and all("Fix: " in problem for problem in problems)
    assert any(key in problem for problem in problems), problems


def flat(node, prefix=""):
    for key, value in node.items():
        yield from flat(value, f"{prefix}{key}.") if hasattr(value, "items") else [(f"{prefix}{key}", value)]


def test_none_and_other_types_are_found_for_every_key():
    cfg = get_cfg()
    add_gw_config(cfg)
    keys = dict(flat(cfg))
    assert len(keys) > 180
    optional = {key for key in keys if not checked(key, None).problems}
    norms = {key for key in keys if key.endswith((".NORM", "WHITEN_NORM"))}
    assert optional == norms | {"MODEL.WEIGHTS", "SOLVER.WEIGHT_DECAY_NORM", "SOLVER.WEIGHT_DECAY_BIAS"}
    for key, value in keys.items():
        for wrong in ({"a": "b"}, object(), b"x", 1 if isinstance(value, str) else "x"):
            assert one(checked(key, wrong)).startswith(key)


@pytest.mark.parametrize("name", [name for name in model_zoo.list_configs() if name.endswith(".yaml")])
def test_the_values_of_all_configs_are_accepted(name):
    findings = Findings()
    assert check_values(read_config(model_zoo.get_config_file(name)), findings, eval_only=False)
    assert findings == Findings()


def test_training_values_do_not_matter_for_an_evaluation():
    assert checked("SOLVER.BASE_LR", -1.0, eval_only=True) == Findings()


@pytest.mark.parametrize(
    ("kind", "size", "fits"),
    [
        ("relative", [0.9, 0.9], True),
        ("relative_range", [0, 0.9], False),
        ("absolute", [384, 600], True),
        ("absolute", [0.9, 0.9], False),
        ("absolute_range", [600, 384], False),
        ("absolute", [384], False),
    ],
)
def test_size_of_crops(kind, size, fits):
    cfg, findings = get_cfg(), Findings()
    add_gw_config(cfg)
    cfg.INPUT.CROP.ENABLED, cfg.INPUT.CROP.TYPE, cfg.INPUT.CROP.SIZE = True, kind, size
    check_values(cfg, findings, eval_only=False)
    assert fits == (not findings.problems)


@pytest.mark.parametrize("mask_format", ["polygon", "bitmask"])
def test_cropped_polygons_need_shapely(check, monkeypatch, mask_format):
    monkeypatch.setattr(value_checks.importlib.util, "find_spec", lambda name: None)
    assert "needs the package shapely" in one(check(INPUT__CROP__ENABLED=True, INPUT__MASK_FORMAT=mask_format))
    assert not check(INPUT__CROP__ENABLED=True, MODEL__MASK_ON=False).problems


@pytest.mark.parametrize("key", ["TRAIN", "TEST"])
@pytest.mark.parametrize("names", [(0,), ([],), (None,)])
def test_datasets_that_are_no_names(check, key, names):
    assert one(check(**{f"DATASETS__{key}": names})).startswith(f"DATASETS.{key} ({names!r}): not a list")


def test_values_scaled_to_the_number_of_processes(check):
    assert "SOLVER.REFERENCE_WORLD_SIZE (4): does not divide" in one(check(SOLVER__REFERENCE_WORLD_SIZE=4))
    assert "a batch of one image" in one(check(SOLVER__REFERENCE_WORLD_SIZE=2))


def test_several_wrong_values_are_named_together_with_other_problems(check):
    problems = check(SOLVER__BASE_LR=-1.0, TEST__EVAL_PERIOD=-1, MODEL__BACKBONE__FREEZE_AT=2).problems
    assert [problem.partition(" ")[0] for problem in problems] == [
        *("SOLVER.BASE_LR", "TEST.EVAL_PERIOD", "MODEL.BACKBONE.FREEZE_AT"),
    ]
