"""Every yaml file under configs/ loads, builds, trains a step and agrees with its table row."""

import functools
import itertools
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import build_model
from detectron2.solver import build_lr_scheduler, build_optimizer
from detectron2.structures import Boxes, Instances, Keypoints, PolygonMasks
from detectron2.utils.events import EventStorage
from torch import nn

from gw_detectron import GroupWhitening2d
from gw_detectron.config import flat_items, read_config
from gw_detectron.layers import Solver
from gw_detectron.modeling import build_checked_model

from .architectures import ARCHITECTURES, gw_places, skip_without_operators
from .coco_rows import (
    LAYOUTS,
    PREPROCESSING,
    R50,
    RECIPE,
    SCRATCH,
    SEG,
    X101,
    B,
    F,
    G,
    W,
)
from .tiny_run import ROOT

CONFIGS = ROOT / "configs"
ALL = sorted(
    str(path.relative_to(CONFIGS).with_suffix(""))
    for path in CONFIGS.rglob("*.yaml")
    if path.name != "datasets.yaml"
)
RUNNABLE = [name for name in ALL if not Path(name).name.startswith("Base-")]
COCO = [
    name for name in RUNNABLE if name.startswith("COCO-") and name not in ARCHITECTURES
]
FROM_SCRATCH = [name for name in COCO if name.startswith("COCO-FromScratch/")]


def load(name: str) -> CfgNode:
    return read_config(CONFIGS / f"{name}.yaml")


@functools.cache
def skeleton(name: str) -> nn.Module:
    """Build the whole model without storage, to look at its structure."""
    skip_without_operators(name)
    return build_checked_model(load(name), "meta")


class NoDuplicates(yaml.SafeLoader):
    """Refuse duplicate keys. PyYAML silently keeps the last one."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key is given twice, {node.start_mark}"
        return super().construct_mapping(node, deep=deep)


@pytest.mark.parametrize("name", ALL)
def test_loads_and_its_dump_reloads_equal(name, tmp_path):
    text = (CONFIGS / f"{name}.yaml").read_text()
    cfg = load(name)
    dump = cfg.dump()
    (tmp_path / "config.yaml").write_text(dump)

    again = read_config(tmp_path / "config.yaml")

    assert cfg.VERSION == 2
    assert yaml.load(text, Loader=NoDuplicates)
    # as yaml, where tuple and list are the same: a nested tuple of Detectron2's defaults comes back as a list
    assert yaml.safe_load(again.dump()) == yaml.safe_load(dump)


def tiny(cfg: CfgNode) -> CfgNode:
    """Scale a config to 64-pixel images with two objects each; keep depth and structure."""
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.WEIGHTS = ""
    cfg.MODEL.RPN.BATCH_SIZE_PER_IMAGE = (
        2048  # all anchors, so that every level is in the loss
    )
    cfg.MODEL.RPN.PRE_NMS_TOPK_TRAIN = 32
    cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 8
    cfg.MODEL.ROI_BOX_HEAD.FC_DIM = 64  # the largest layer of an R-50 detector by far

    sizes = cfg.MODEL.ANCHOR_GENERATOR.SIZES
    shrink = (
        max(map(max, sizes)) / 64
    )  # so that anchors of every level lie inside the image
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [
        [size / shrink for size in level] for level in sizes
    ]
    return cfg


BOXES = torch.tensor([[4.0, 4.0, 30.0, 40.0], [10.0, 20.0, 50.0, 56.0]])
TRIANGLES = BOXES[:, [0, 1, 2, 1, 2, 3]]
KEYPOINTS = torch.tensor([[[17.0, 22.0, 2.0]] * 17, [[30.0, 38.0, 2.0]] * 17])


def tiny_batch(num_classes: int, semantic_classes: int = 2) -> list[dict]:
    batch = []
    for offset in (0.0, 7.0):
        objects = Instances((64, 64))
        objects.gt_boxes = Boxes(BOXES + offset)
        objects.gt_classes = torch.tensor([0, num_classes - 1])
        polygons = (TRIANGLES + offset).tolist()
        objects.gt_masks = PolygonMasks([[polygon] for polygon in polygons])
        objects.gt_keypoints = Keypoints(KEYPOINTS + offset)

        image = torch.randint(0, 256, (3, 64, 64))
        semantic = torch.randint(0, semantic_classes, (64, 64))
        batch.append({"image": image, "instances": objects, "sem_seg": semantic})
    return batch


#: the others are variants of these, larger, or also in a test of runs
FAST = re.compile(
    r"quick_schedules|own_mask_rcnn_R_18|R_50_FPN_(4conv1fc_)?1x_GW$|1x_GW_released$|_WS$|scratch_faster.*_1x_BN_GW$"
)
SLOW = re.compile("_101_|" + "|".join(ARCHITECTURES))


def is_fast(name: str) -> bool:
    return bool(FAST.search(name)) and not SLOW.search(name)


@pytest.mark.parametrize(
    "name",
    [
        *filter(is_fast, RUNNABLE),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in itertools.filterfalse(is_fast, RUNNABLE)
        ),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_trains_a_step_in_which_every_parameter_gets_a_gradient(name):
    skip_without_operators(name)
    cfg = tiny(load(name))
    torch.manual_seed(0)
    model = build_model(cfg).train()
    optimizer = build_optimizer(cfg, model)
    is_retinanet = cfg.MODEL.META_ARCHITECTURE.endswith("RetinaNet")
    node = cfg.MODEL.RETINANET if is_retinanet else cfg.MODEL.ROI_HEADS
    batch = tiny_batch(node.NUM_CLASSES, cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES)

    with EventStorage():
        losses = model(batch)
    sum(losses.values()).backward()

    assert ("loss_mask" in losses) == cfg.MODEL.MASK_ON
    assert ("loss_keypoint" in losses) == cfg.MODEL.KEYPOINT_ON
    trainable = {
        key: value for key, value in model.named_parameters() if value.requires_grad
    }
    for key, value in trainable.items():
        assert value.grad is not None, key
        assert value.grad.any(), key
        assert value.grad.isfinite().all(), key

    optimizer.step()
    for key, value in trainable.items():
        assert value.isfinite().all(), key


KINDS = {FrozenBatchNorm2d: F, nn.BatchNorm2d: B, nn.GroupNorm: G, GroupWhitening2d: W}


# each config has a row, and each row a config
@pytest.mark.parametrize("name", sorted({*COCO, *LAYOUTS}))
def test_norms_are_at_the_positions_of_the_table_row(name):
    blocks, (stem, conv1, conv2, conv3, shortcut), fpn, box, mask = LAYOUTS[name]
    expected = {
        ("stem", stem): 1,
        ("conv1", conv1): blocks,
        ("conv2", conv2): blocks,
        ("conv3", conv3): blocks,
        ("shortcut", shortcut): 4,
        ("fpn", fpn): 8,
        ("box_head", box): 4,
        ("mask_head", mask): 4,
    }

    places: Counter = Counter()
    for key, module in skeleton(name).named_modules():
        kind = KINDS.get(type(module))
        if kind:
            place = re.search(r"stem|shortcut|fpn|box_head|mask_head|conv\d", key)[0]
            places[place, kind] += 1

    assert places == {key: count for key, count in expected.items() if key[1]}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_has_gw_at_its_places(name):
    model = skeleton(name)

    assert gw_places(model) == ARCHITECTURES[name]
    for module in model.modules():
        assert not isinstance(module, nn.BatchNorm2d | nn.GroupNorm)


@pytest.mark.parametrize("name", [*COCO, *ARCHITECTURES])
def test_norms_have_the_papers_settings_and_the_released_ones_no_eps(name):
    eps = 0.0 if name.endswith("_released") else 1e-5
    solver = Solver("newton", num_iters=5, eps=eps)

    for module in skeleton(name).modules():
        if isinstance(module, GroupWhitening2d):
            assert module.num_groups == 64
            assert module.solver == solver
        elif isinstance(module, nn.GroupNorm):
            assert module.num_groups == 32


@pytest.mark.parametrize("name", COCO)
def test_box_head_has_a_relu_after_every_conv_and_the_released_one_a_single_relu(name):
    head = skeleton(name).roi_heads.box_head

    kinds = [type(module) for module in head.modules()]
    activated = [isinstance(conv.activation, nn.ReLU) for conv in head.conv_norm_relus]

    if name.endswith("_released"):
        assert activated == [False, False, False, True]
    elif "4conv1fc" in name:
        assert activated == [True, True, True, True]
    else:
        assert activated == []
    assert kinds.count(nn.Linear) == (1 if activated else 2)


@pytest.mark.parametrize("name", COCO)
def test_optimizer_treats_all_norms_by_the_recipe(name):
    cfg = load(name)
    model = skeleton(name)
    lr = {2: 0.0025, 8: 0.01, 16: 0.02}[cfg.SOLVER.IMS_PER_BATCH]
    is_frozen = cfg.MODEL.BACKBONE.FREEZE_AT == 2
    frozen = (
        ("backbone.bottom_up.stem.", "backbone.bottom_up.res2.") if is_frozen else ()
    )

    settings = {}
    for group in build_optimizer(cfg, model).param_groups:
        for value in group["params"]:
            settings[value] = (group["lr"], group["weight_decay"])

    for key, value in model.named_parameters():
        if key.startswith(frozen):
            assert value not in settings, key
        elif key.endswith("bias"):
            assert settings.pop(value) == (2 * lr, 0.0), key
        else:
            assert settings.pop(value) == (lr, 1e-4), key
    assert not settings


@pytest.mark.parametrize("name", COCO)
def test_recipe_is_that_of_maskrcnn_benchmark(name):
    cfg = load(name)
    values = dict(flat_items(cfg))
    schedules = {
        16: ((60000, 80000), 90000),
        8: ((120000, 160000), 180000),
        2: ((480000, 640000), 720000),
    }

    assert values.items() >= RECIPE.items()
    assert schedules[cfg.SOLVER.IMS_PER_BATCH] == (
        cfg.SOLVER.STEPS,
        cfg.SOLVER.MAX_ITER,
    )


@pytest.mark.parametrize("name", COCO)
def test_the_warmup_is_linear_from_a_third(name):
    cfg = load(name)
    warmup = 4000 if name.endswith("_1gpu") else 500
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=cfg.SOLVER.BASE_LR)
    scheduler = build_lr_scheduler(cfg, optimizer)

    for iteration in range(warmup + 1):
        expected = cfg.SOLVER.BASE_LR * (1 / 3 + 2 / 3 * iteration / warmup)
        (group,) = optimizer.param_groups
        assert group["lr"] == pytest.approx(expected, rel=1e-6)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("name", [*COCO, *ARCHITECTURES])
def test_weights_and_preprocessing_belong_together(name):
    cfg = load(name)
    weights = cfg.MODEL.WEIGHTS
    prefixes = [prefix for prefix in PREPROCESSING if weights.startswith(prefix)]

    preprocessing = (cfg.INPUT.FORMAT, cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD)

    assert preprocessing == PREPROCESSING[prefixes[0]]
    assert (weights == "") == (name in FROM_SCRATCH)
    assert (0 if name in FROM_SCRATCH else 2) == cfg.MODEL.BACKBONE.FREEZE_AT


@pytest.mark.parametrize(
    "family",
    [
        R50 + "1x_",
        R50 + "4conv1fc_1x_",
        SEG + "mask_rcnn_R_50_FPN_4conv1fc_1x_",
        X101,
        SCRATCH + "faster_rcnn_R_50_",
    ],
)
def test_rows_of_one_table_differ_in_norms_and_weights_only(family):
    allowed = re.compile(
        r"MODEL\.(WEIGHTS|PIXEL_MEAN|PIXEL_STD|RESNETS\.WHITEN_(NORM|POSITIONS)|.*\.NORM|ROI_BOX_HEAD\.SINGLE_RELU)"
        r"|INPUT\.FORMAT"
    )
    rows = [
        name for name in COCO if name.startswith(family) and not name.endswith("_1gpu")
    ]
    first, *others = (dict(flat_items(load(name))) for name in rows)

    assert others
    for other in others:
        different = [key for key, value in first.items() if value != other[key]]
        for key in different:
            assert allowed.fullmatch(key)


@pytest.mark.parametrize(
    "name", [name for name in FROM_SCRATCH if not name.endswith("_1gpu")]
)
def test_one_gpu_config_is_the_eight_gpu_config_scaled_linearly(name):
    cfg = load(name)
    cfg.SOLVER.REFERENCE_WORLD_SIZE = 8

    scaled = DefaultTrainer.auto_scale_workers(cfg, num_workers=1)

    scaled.defrost()
    scaled.SOLVER.REFERENCE_WORLD_SIZE = 0
    assert load(f"{name}_1gpu") == scaled


def test_model_zoo_links_every_coco_config_and_no_other_file():
    text = (ROOT / "MODEL_ZOO.md").read_text()
    links = set(re.findall(r"\]\(configs/([^)]+)\.yaml\)", text))
    elsewhere = ("quick_schedules/", "Own-Data/")
    wanted = {name for name in RUNNABLE if not name.startswith(elsewhere)}

    assert wanted <= links <= {*ALL, "quick_schedules/datasets"}


@pytest.mark.parametrize("name", COCO)
def test_header_and_model_zoo_state_the_same_paper_numbers(name):
    text = (CONFIGS / f"{name}.yaml").read_text()
    comment = re.match(r"(#.*\n)+", text)[0].replace("\n# ", " ")
    paper = re.search(r"Paper: .*", comment)[0]
    numbers = set(re.findall(r"(?:AP|AP50|AP75|top-1) (\d\d\.\d\d)", paper))
    assert numbers or "no result" in paper

    lines = (ROOT / "MODEL_ZOO.md").read_text().splitlines()
    rows = [line for line in lines if f"(configs/{name}.yaml)" in line]
    assert any(numbers == set(re.findall(r"\d\d\.\d\d", row)) for row in rows), rows
