"""Check the type and range of every config value."""

import importlib.util
import inspect
import operator
import re
from collections.abc import Iterator
from typing import Any

import detectron2.data.build
from detectron2.config import CfgNode
from detectron2.modeling import box_regression
from detectron2.utils import comm

from ..config import default_config, flat_keys, get_value
from ..modeling.norm_keys import NORM_KEYS
from .findings import Findings

_LARGEST = 2**31 - 1  # of integers; torch has no larger sizes
# keys for which Detectron2 accepts None
_OPTIONAL = {*NORM_KEYS, "MODEL.WEIGHTS", "SOLVER.WEIGHT_DECAY_NORM", "SOLVER.WEIGHT_DECAY_BIAS"}
# Pattern of keys -> interval of all their numbers; "(" and ")" exclude the end. The first match counts. Patterns also
# cover the keys that newer versions of Detectron2 add.
_INTERVALS = (
    (r"SOLVER\.(BASE_LR|GAMMA|CLIP_GRADIENTS\.CLIP_VALUE)", "(0, inf)"),
    (r"SOLVER\.CLIP_GRADIENTS\.NORM_TYPE", "(0, inf]"),
    (r"SOLVER\.MOMENTUM", "[0, 1)"),
    (r"SOLVER\.(CHECKPOINT_PERIOD|MAX_ITER|IMS_PER_BATCH|ACCUMULATE)", "[1, inf)"),
    (r"SOLVER\..*|TEST\.EVAL_PERIOD|VIS_PERIOD|DATALOADER\.REPEAT_THRESHOLD", "[0, inf)"),
    (r"DATALOADER\.NUM_WORKERS", "[0, 1024]"),
    (r"INPUT\.MIN_SIZE_.*", "[0, 65535]"),  # 0: images keep their size
    (r"INPUT\.MAX_SIZE_.*", "[1, 65535]"),
    (r"TEST\.AUG\.M.._SIZES?", "[8, 65535]"),  # Detectron2 cannot flip an image of one pixel
    (r"TEST\.(DETECTIONS_PER_IMAGE|PRECISE_BN\.NUM_ITER)|.*(TOPK_.*|BATCH_SIZE_PER_IMAGE)", "[1, inf)"),
    (r"MODEL\.BACKBONE\.FREEZE_AT", "[0, 5]"),
    (r"MODEL\.RESNETS\.RES5_DILATION", "[1, 2]"),
    (r"MODEL\.RPN\.CONV_DIMS", "[-1, 65535]"),  # -1: as many channels as the input
    (r"MODEL\..*(DEPTH|NUM_GROUPS|PER_GROUP|CHANNELS|_DIMS?|NUM_CLASSES|NUM_KEYPOINTS|COMMON_STRIDE)", "[1, 65535]"),
    (r"MODEL\..*POOLER_RESOLUTION", "[1, 1024]"),
    (r"MODEL\..*(POOLER_SAMPLING_RATIO|NUM_CONVS?|NUM_FC|MIN_KEYPOINTS_PER_IMAGE)", "[0, 1024]"),
    (r"MODEL\..*((?<!BOUNDARY)_THRESH|_THRESH_TEST|_FRACTION|IOU_THRESHOLDS|IOUS)", "[0, 1]"),
    (r"MODEL\..*(LOSS_WEIGHT|_BETA|LOSS_GAMMA|AREA_LIMIT|PROPOSAL_GENERATOR\.MIN_SIZE)", "[0, inf)"),
    (r"MODEL\.(.*\.BBOX_REG_WEIGHTS|PIXEL_STD|ANCHOR_GENERATOR\.(SIZES|ASPECT_RATIOS))|TEST\..*SIGMAS", "(0, inf)"),
    (r"MODEL\.ANCHOR_GENERATOR\.OFFSET", "[0, 1)"),
    (r"MODEL\.RETINANET\.PRIOR_PROB", "(0, 1)"),
    (r"MODEL\.RETINANET\.FOCAL_LOSS_ALPHA", "[-1, 1]"),
    (r"MODEL\..*|GLOBAL\.HACK", "(-inf, inf)"),
)
# keys -> allowed strings; Detectron2 compares some of them only in its source
_LOSSES = tuple(dict.fromkeys(re.findall(r'loss_type == "(\w+)"', inspect.getsource(box_regression))))
_CHOICES = {
    "INPUT.FORMAT": ("RGB", "BGR", "L"),  # Detectron2 gives YUV-BT.601 in float64, which no model takes
    "INPUT.MASK_FORMAT": ("polygon", "bitmask"),
    "INPUT.RANDOM_FLIP": ("horizontal", "vertical", "none"),
    "INPUT.CROP.TYPE": ("relative_range", "relative", "absolute", "absolute_range"),
    "INPUT.MIN_SIZE_TRAIN_SAMPLING": ("choice", "range"),
    "DATALOADER.SAMPLER_TRAIN": re.findall(r'sampler_name == "(\w+)"', inspect.getsource(detectron2.data.build)),
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": ("value", "norm"),
    "SOLVER.WARMUP_METHOD": ("linear", "constant"),
    **{f"MODEL.{part}.BBOX_REG_LOSS_TYPE": _LOSSES for part in ("RPN", "ROI_BOX_HEAD", "RETINANET")},
}
# architectures that Detectron2's GeneralizedRCNNWithTTA refuses, or of which it leaves out predictions
_WITHOUT_AUGMENTATION = ("RetinaNet", "GWRetinaNet", "PanopticFPN", "SemanticSegmentor")
# list keys -> example of a value; they must not be empty
_NOT_EMPTY = {
    "INPUT.MIN_SIZE_TRAIN": "(800,)",
    "TEST.AUG.MIN_SIZES": "(400, 500, 600)",
    "MODEL.PIXEL_MEAN": "[123.675, 116.28, 103.53]",
    "MODEL.PIXEL_STD": "[58.395, 57.12, 57.375]",
    "MODEL.ANCHOR_GENERATOR.SIZES": "[[32], [64], [128], [256], [512]]",
    "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS": "[[0.5, 1.0, 2.0]]",
    "MODEL.RESNETS.OUT_FEATURES": "['res2', 'res3', 'res4', 'res5']",
    "MODEL.RPN.IN_FEATURES": "['p2', 'p3', 'p4', 'p5', 'p6']",
    "MODEL.ROI_HEADS.IN_FEATURES": "['p2', 'p3', 'p4', 'p5']",
}
# lists of whole numbers or names, which the default does not show -> type of the items, example
_ITEMS = (
    ("SOLVER.STEPS", int, (60000, 80000)),
    ("INPUT.MIN_SIZE_TRAIN", int, (640, 800)),
    ("TEST.AUG.MIN_SIZES", int, (640, 800)),
    ("MODEL.FPN.IN_FEATURES", str, ("res4", "res5")),
    *((f"DATASETS.{key}", str, ("name",)) for key in ("TRAIN", "TEST", "PROPOSAL_FILES_TRAIN", "PROPOSAL_FILES_TEST")),
)


def check_values(cfg: CfgNode, findings: Findings, *, eval_only: bool) -> bool:
    """Check type and range of every value, also of parts that the run does not use.

    Args:
        cfg: the config.
        findings: problems are added.
        eval_only: the run evaluates only; ``SOLVER`` is not checked then.

    Returns:
        False if a value has the wrong type, so that other checks cannot read the config.
    """
    defaults = default_config()
    if wrong_types := list(_wrong_types(cfg, defaults)):
        findings.problems += wrong_types
        return False
    problems = [*_outside_of_ranges(cfg, defaults), *_contradictions(cfg)]
    findings.problems += [problem for problem in problems if not (eval_only and problem.startswith("SOLVER."))]
    return True


def _wrong_types(cfg: CfgNode, defaults: CfgNode) -> Iterator[str]:
    for key in flat_keys(defaults):
        default = get_value(defaults, key)
        try:
            value = get_value(cfg, key)
        except AttributeError:
            yield f"{key}: missing. Fix: start from detectron2.config.get_cfg() and gw_detectron.add_gw_config."
            continue
        if not (_same_type(value, default) or (value is None and key in _OPTIONAL)):
            yield f"{key} ({value!r}): wrong type. Fix: set it to a value of the type of its default, {default!r}."


def _same_type(value: Any, default: Any) -> bool:
    """Compare the types of a value and a default, of lists by their elements."""
    if default is None:
        return value is None or _alike(value, 1.0)  # SOLVER.WEIGHT_DECAY_BIAS of later versions of Detectron2
    if isinstance(default, (list, tuple)):
        leaf = next(_leaves(default), None)
        return isinstance(value, (list, tuple)) and (leaf is None or all(_alike(item, leaf) for item in _leaves(value)))
    if isinstance(default, float) and isinstance(value, dict):
        return all(_alike(item, default) for item in value.values())  # loss weights by name
    return _alike(value, default) and not (type(default) is int and isinstance(value, float))


def _alike(value: Any, example: Any) -> bool:
    return isinstance(value, type(example)) if isinstance(example, (bool, str)) else _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from value.values()
    else:
        yield value


def _outside_of_ranges(cfg: CfgNode, defaults: CfgNode) -> Iterator[str]:
    for key, example in _NOT_EMPTY.items():
        if not list(_leaves(get_value(cfg, key))):
            yield f"{key} (empty): needs at least one value. Fix: set it to e.g. {example}."
    for key in flat_keys(defaults):
        value, default = get_value(cfg, key), get_value(defaults, key)
        interval = next((interval for pattern, interval in _INTERVALS if re.fullmatch(pattern, key)), "")
        numbers = list(filter(_is_number, _leaves(value)))
        if interval and not all(_inside(number, interval) for number in numbers):
            text = f"not in the interval {interval}"
            yield f"{key} ({value!r}): {text}. Fix: give a value in it; the default is {default!r}."
        elif key != "SEED" and any(isinstance(number, int) and abs(number) > _LARGEST for number in numbers):
            yield f"{key} ({value!r}): too large. Fix: give at most {_LARGEST}; the default is {default!r}."
    for key, choices in _CHOICES.items():
        if (value := get_value(cfg, key)) not in choices:
            yield f"{key} ('{value}'): unknown. Fix: set it to one of {', '.join(choices)}."


def _inside(value: float, interval: str) -> bool:
    low, high = (float(text) for text in interval[1:-1].split(","))
    above = operator.ge if interval[0] == "[" else operator.gt
    below = operator.le if interval[-1] == "]" else operator.lt
    return above(value, low) and below(value, high)


def _contradictions(cfg: CfgNode) -> Iterator[str]:
    """Yield problems that depend on several keys or on a list's form."""
    largest_seed = 2**32 - comm.get_world_size()  # NumPy's limit; every process adds its number
    if int(cfg.SEED) > largest_seed:
        yield f"SEED ({cfg.SEED}): too large. Fix: give a whole number from 0 to {largest_seed}, or -1 for any."
    for key, kind, example in _ITEMS:
        if not all(isinstance(item, kind) and not isinstance(item, bool) for item in get_value(cfg, key)):
            yield f'{key} ({get_value(cfg, key)!r}): not a list of {kind.__name__}. Fix: set it to e.g. "{example}".'
    yield from _solver_problems(cfg)
    yield from _input_problems(cfg)
    yield from _model_problems(cfg)
    yield from _test_problems(cfg)


def _solver_problems(cfg: CfgNode) -> Iterator[str]:
    solver = cfg.SOLVER
    if solver.NESTEROV and not solver.MOMENTUM:
        yield "SOLVER.NESTEROV (True): needs a momentum. Fix: set SOLVER.MOMENTUM 0.9 or SOLVER.NESTEROV False."
    scale = solver.REFERENCE_WORLD_SIZE
    if scale > 0 and solver.IMS_PER_BATCH % scale:
        yield (
            f"SOLVER.REFERENCE_WORLD_SIZE ({scale}): does not divide SOLVER.IMS_PER_BATCH ({solver.IMS_PER_BATCH}). "
            "Fix: set it to the number of processes that the batch was chosen for, or to 0."
        )


def _input_problems(cfg: CfgNode) -> Iterator[str]:
    images = cfg.INPUT
    if images.MIN_SIZE_TRAIN_SAMPLING == "range" and len(images.MIN_SIZE_TRAIN) != 2:
        yield (
            f"INPUT.MIN_SIZE_TRAIN ({images.MIN_SIZE_TRAIN!r}): INPUT.MIN_SIZE_TRAIN_SAMPLING range needs a smallest "
            "and a largest size. Fix: give two, e.g. (640, 800)."
        )
    # INPUT.MASK_FORMAT does not matter: Detectron2 crops polygons before it draws them as bitmasks
    if images.CROP.ENABLED and cfg.MODEL.MASK_ON and importlib.util.find_spec("shapely") is None:
        yield (
            "INPUT.CROP.ENABLED (True): cropping polygons needs the package shapely. Fix: pip install shapely, or set "
            "this key to False."
        )
    if images.CROP.ENABLED:
        kind, size, limit = images.CROP.TYPE, images.CROP.SIZE, 1 if images.CROP.TYPE.startswith("relative") else 65535
        fits = len(size) == 2 and all(0 < item <= limit and (limit == 1 or item == int(item)) for item in size)
        if not fits or (kind == "absolute_range" and size[0] > size[1]):
            text = "[0.9, 0.9], fractions of the image" if limit == 1 else "[384, 600], in pixels"
            yield f"INPUT.CROP.SIZE ({size!r}): unusable for INPUT.CROP.TYPE {kind}. Fix: give e.g. {text}."


def _model_problems(cfg: CfgNode) -> Iterator[str]:
    model = cfg.MODEL
    channels = 1 if cfg.INPUT.FORMAT == "L" else 3
    for key in ("PIXEL_MEAN", "PIXEL_STD"):
        if len(model[key]) != channels:
            yield (
                f"MODEL.{key} ({model[key]!r}): INPUT.FORMAT {cfg.INPUT.FORMAT} has {channels} channels. Fix: give "
                f"{channels} numbers."
            )
    if 0 in model.RPN.CONV_DIMS:
        yield f"MODEL.RPN.CONV_DIMS ({model.RPN.CONV_DIMS!r}): no channels. Fix: give 1 or more, or -1 for the input's."
    for key in ("RPN", "ROI_BOX_HEAD", "RETINANET"):
        if len(model[key].BBOX_REG_WEIGHTS) != 4:
            yield f"MODEL.{key}.BBOX_REG_WEIGHTS ({model[key].BBOX_REG_WEIGHTS!r}): not four numbers. Fix: give four."


def _test_problems(cfg: CfgNode) -> Iterator[str]:
    model = cfg.MODEL
    for row in cfg.TEST.EXPECTED_RESULTS:
        sound = isinstance(row, (list, tuple)) and [isinstance(item, str) for item in row] == [True, True, False, False]
        if not (sound and all(isinstance(item, (int, float)) for item in row[2:])):
            yield (
                f"TEST.EXPECTED_RESULTS ({row!r}): not task, metric, value, tolerance. Fix: give lists such as "
                "['bbox', 'AP', 38.5, 0.2]."
            )
    if cfg.TEST.AUG.ENABLED and (model.KEYPOINT_ON or model.META_ARCHITECTURE in _WITHOUT_AUGMENTATION):
        yield (
            "TEST.AUG.ENABLED (True): Detectron2 has no test-time augmentation for keypoints (MODEL.KEYPOINT_ON) or "
            f"{', '.join(_WITHOUT_AUGMENTATION)}. Fix: set it to False."
        )
    sigmas, points = cfg.TEST.KEYPOINT_OKS_SIGMAS, model.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS
    if model.KEYPOINT_ON and len(sigmas) != points and (sigmas or points != 17):
        yield (
            f"TEST.KEYPOINT_OKS_SIGMAS ({len(sigmas)} values): MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {points}. Fix: "
            "give one sigma per keypoint."
        )
