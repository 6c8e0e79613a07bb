"""Every yaml file under configs/ loads, builds, trains a step and agrees with its table row."""

import functools
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

from .architectures import ARCHITECTURES, gw_places, skip_without_operators
from .coco_rows import LAYOUTS, PREPROCESSING, R50, RECIPE, SCRATCH, SEG, X101, B, F, G, W
from .tiny_run import ROOT

CONFIGS = ROOT / "configs"
ALL = sorted(
    str(path.relative_to(CONFIGS).with_suffix(""))
    for path in CONFIGS.rglob("*.yaml")
    if path.name != "datasets.yaml"
)
RUNNABLE = [name for name in ALL if not Path(name).name.startswith("Base-")]
COCO = [name for name in RUNNABLE if name.startswith("COCO-") and name not in ARCHITECTURES]
FROM_SCRATCH = [name for name in COCO if name.startswith("COCO-FromScratch/")]


def load(name: str) -> CfgNode:
    return read_config(CONFIGS / f"{name}.yaml")


@functools.cache
def skeleton(name: str) -> nn.Module:
    """Build the whole model without storage, to look at its structure."""
    skip_without_operators(name)
    cfg = load(name)
    cfg.MODEL.DEVICE = "meta"
    with torch.device("meta"):
        return build_model(cfg)


class NoDuplicates(yaml.SafeLoader):
    """Refuse duplicate keys. PyYAML silently keeps the last one."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        assert len(keys) == len(set(keys)), (
            f"a key is given twice among {keys}, {node.start_mark}"
        )
        return super().construct_mapping(node, deep=deep)


@pytest.mark.parametrize("name", ALL)
def test_loads_and_its_dump_reloads_equal(name, tmp_path):
    cfg = load(name)
    assert cfg.VERSION == 2 and yaml.load(
        (CONFIGS / f"{name}.yaml").read_text(), Loader=NoDuplicates
    )
    (tmp_path / "config.yaml").write_text(cfg.dump())
    # as yaml, where tuple and list are the same: a nested tuple of Detectron2's defaults comes back as a list
    assert yaml.safe_load(read_config(tmp_path / "config.yaml").dump()) == yaml.safe_load(
        cfg.dump()
    )


def tiny(cfg: CfgNode) -> CfgNode:
    """Scale a config to 64-pixel images with two objects each; keep depth and structure."""
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.WEIGHTS = ""
    sizes = cfg.MODEL.ANCHOR_GENERATOR.SIZES
    shrink = (
        max(max(level) for level in sizes) / 64
    )  # so that anchors of every level lie inside the image
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[size / shrink for size in level] for level in sizes]
    cfg.MODEL.RPN.BATCH_SIZE_PER_IMAGE = 2048  # all anchors, so that every level is in the loss
    cfg.MODEL.RPN.PRE_NMS_TOPK_TRAIN = 32
    cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 8
    cfg.MODEL.ROI_BOX_HEAD.FC_DIM = 64  # the largest layer of an R-50 detector by far
    return cfg


def tiny_batch(num_classes: int, semantic_classes: int = 2) -> list[dict]:
    batch = []
    for offset in (0.0, 7.0):
        corners = torch.tensor([[4.0, 4.0, 30.0, 40.0], [10.0, 20.0, 50.0, 56.0]]) + offset
        objects = Instances((64, 64))
        objects.gt_boxes = Boxes(corners)
        objects.gt_classes = torch.tensor([0, num_classes - 1])
        triangles = [[[x0, y0, x1, y0, x1, y1]] for x0, y0, x1, y1 in corners.tolist()]
        objects.gt_masks = PolygonMasks(triangles)
        middles = (corners[:, :2] + corners[:, 2:]) / 2
        objects.gt_keypoints = Keypoints(
            nn.functional.pad(middles, (0, 1), value=2.0)[:, None].repeat(1, 17, 1)
        )
        semantic = torch.randint(0, semantic_classes, (64, 64))
        batch.append(
            {
                "image": torch.randint(0, 256, (3, 64, 64)),
                "instances": objects,
                "sem_seg": semantic,
            }
        )
    return batch


#: the others are variants of these, larger, or also in a test of runs
FAST = re.compile(
    r"quick_schedules|own_mask_rcnn_R_18|R_50_FPN_(4conv1fc_)?1x_GW$|1x_GW_released$|_WS$|scratch_faster.*_1x_BN_GW$"
)
SLOW = re.compile("_101_|" + "|".join(ARCHITECTURES))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if FAST.search(name) and not SLOW.search(name) else pytest.mark.slow
        )
        for name in RUNNABLE
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_trains_a_step_in_which_every_parameter_gets_a_gradient(name):
    skip_without_operators(name)
    cfg = tiny(load(name))
    torch.manual_seed(0)
    model = build_model(cfg).train()
    optimizer = build_optimizer(cfg, model)
    node = (
        cfg.MODEL.RETINANET
        if cfg.MODEL.META_ARCHITECTURE.endswith("RetinaNet")
        else cfg.MODEL.ROI_HEADS
    )
    with EventStorage():
        losses = model(tiny_batch(node.NUM_CLASSES, cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES))
    assert ("loss_mask" in losses) == cfg.MODEL.MASK_ON
    assert ("loss_keypoint" in losses) == cfg.MODEL.KEYPOINT_ON
    sum(losses.values()).backward()

    trainable = {key: value for key, value in model.named_parameters() if value.requires_grad}
    faults = {
        key for key, value in trainable.items() if value.grad is None or not value.grad.any()
    }
    faults |= {
        key
        for key, value in trainable.items()
        if key not in faults and not value.grad.isfinite().all()
    }
    assert not faults
    optimizer.step()
    assert all(value.isfinite().all() for value in trainable.values())


@pytest.mark.parametrize(
    "name", sorted({*COCO, *LAYOUTS})
)  # each config has a row, and each row a config
def test_norms_are_at_the_positions_of_the_table_row(name):
    blocks, (stem, *convs, shortcut), fpn, box, mask = LAYOUTS[name]
    expected = Counter({("stem", stem): 1, ("shortcut", shortcut): 4})
    expected += Counter({(f"conv{i}", norm): blocks for i, norm in enumerate(convs, 1)})
    for place, norm, count in (("fpn", fpn, 8), ("box_head", box, 4), ("mask_head", mask, 4)):
        expected += Counter({(place, norm): count} if norm else {})

    found: Counter = Counter()
    for key, module in skeleton(name).named_modules():
        for label, kind in (
            (F, FrozenBatchNorm2d),
            (B, nn.BatchNorm2d),
            (G, nn.GroupNorm),
            (W, GroupWhitening2d),
        ):
            if isinstance(module, kind):
                found[
                    re.search(r"stem|shortcut|fpn|box_head|mask_head|conv\d", key)[0], label
                ] += 1
    assert found == expected


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_has_gw_at_its_places(name):
    assert gw_places(skeleton(name)) == ARCHITECTURES[name]
    assert not any(
        isinstance(module, nn.BatchNorm2d | nn.GroupNorm) for module in skeleton(name).modules()
    )


@pytest.mark.parametrize("name", [*COCO, *ARCHITECTURES])
def test_norms_have_the_papers_settings_and_the_released_ones_no_eps(name):
    eps = 0.0 if name.endswith("_released") else 1e-5
    for module in skeleton(name).modules():
        if isinstance(module, GroupWhitening2d):
            assert (module.num_groups, module.solver) == (
                64,
                Solver("newton", num_iters=5, eps=eps),
            )
        if isinstance(module, nn.GroupNorm):
            assert module.num_groups == 32


@pytest.mark.parametrize("name", COCO)
def test_box_head_has_a_relu_after_every_conv_and_the_released_one_a_single_relu(name):
    head = skeleton(name).roi_heads.box_head
    convs = [module for module in head.modules() if isinstance(module, nn.Conv2d)]
    assert len(convs) == (4 if "4conv1fc" in name else 0)
    assert sum(isinstance(module, nn.Linear) for module in head.modules()) == (
        1 if convs else 2
    )
    activations = [isinstance(conv.activation, nn.ReLU) for conv in convs]
    assert activations == (
        [False] * 3 + [True] if name.endswith("_released") else [True] * len(convs)
    )


@pytest.mark.parametrize("name", COCO)
def test_optimizer_treats_all_norms_by_the_recipe(name):
    cfg, model = load(name), skeleton(name)
    groups = build_optimizer(cfg, model).param_groups
    found = {
        id(value): (group["lr"], group["weight_decay"])
        for group in groups
        for value in group["params"]
    }
    lr = {2: 0.0025, 8: 0.01, 16: 0.02}[cfg.SOLVER.IMS_PER_BATCH]
    frozen = (
        () if name in FROM_SCRATCH else ("backbone.bottom_up.stem.", "backbone.bottom_up.res2.")
    )
    for key, value in model.named_parameters():
        expected = (2 * lr, 0.0) if key.endswith("bias") else (lr, 1e-4)
        assert found.pop(id(value), None) == (None if key.startswith(frozen) else expected), key
    assert not found


@pytest.mark.parametrize("name", COCO)
def test_recipe_is_that_of_maskrcnn_benchmark(name):
    cfg = load(name)
    values = dict(flat_items(cfg))
    assert {key: values[key] for key in RECIPE} == RECIPE
    schedules = {
        16: ((60000, 80000), 90000),
        8: ((120000, 160000), 180000),
        2: ((480000, 640000), 720000),
    }
    assert schedules[cfg.SOLVER.IMS_PER_BATCH] == (cfg.SOLVER.STEPS, cfg.SOLVER.MAX_ITER)

    warmup = 4000 if name.endswith("_1gpu") else 500
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=cfg.SOLVER.BASE_LR)
    scheduler = build_lr_scheduler(cfg, optimizer)
    for iteration in range(warmup + 1):
        expected = cfg.SOLVER.BASE_LR * (1 / 3 + 2 / 3 * iteration / warmup)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-6)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("name", [*COCO, *ARCHITECTURES])
def test_weights_and_preprocessing_belong_together(name):
    cfg = load(name)
    expected = next(
        value for prefix, value in PREPROCESSING.items() if cfg.MODEL.WEIGHTS.startswith(prefix)
    )
    assert expected == (cfg.INPUT.FORMAT, cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD)
    assert (cfg.MODEL.WEIGHTS == "") == (name in FROM_SCRATCH)
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
    rows = [name for name in COCO if name.startswith(family) and not name.endswith("_1gpu")]
    first, *others = (dict(flat_items(load(name))) for name in rows)
    assert others
    for other in others:
        assert [
            key for key in first if first[key] != other[key] and not allowed.fullmatch(key)
        ] == []


@pytest.mark.parametrize("name", [name for name in FROM_SCRATCH if not name.endswith("_1gpu")])
def test_one_gpu_config_is_the_eight_gpu_config_scaled_linearly(name):
    cfg = load(name)
    cfg.SOLVER.REFERENCE_WORLD_SIZE = 8
    expected = dict(flat_items(DefaultTrainer.auto_scale_workers(cfg, num_workers=1)))
    assert dict(flat_items(load(f"{name}_1gpu"))) == expected | {
        "SOLVER.REFERENCE_WORLD_SIZE": 0
    }


def test_model_zoo_links_every_coco_config_and_no_other_file():
    links = set(re.findall(r"\]\(configs/([^)]+)\.yaml\)", (ROOT / "MODEL_ZOO.md").read_text()))
    elsewhere = ("quick_schedules/", "Own-Data/")
    assert {name for name in RUNNABLE if not name.startswith(elsewhere)} <= links <= set(ALL)


@pytest.mark.parametrize("name", COCO)
def test_header_and_model_zoo_state_the_same_paper_numbers(name):
    comment = re.match(r"(#.*\n)+", (CONFIGS / f"{name}.yaml").read_text())[0].replace(
        "\n# ", " "
    )
    paper = re.search(r"Paper: .*", comment)[0]
    numbers = set(re.findall(r"(?:AP|AP50|AP75|top-1) (\d\d\.\d\d)", paper))
    assert numbers or "no result" in paper
    rows = [
        row
        for row in (ROOT / "MODEL_ZOO.md").read_text().splitlines()
        if f"(configs/{name}.yaml)" in row
    ]
    assert any(numbers == set(re.findall(r"\d\d\.\d\d", row)) for row in rows), (numbers, rows)
