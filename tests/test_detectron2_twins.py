"""Configs that repeat one of Detectron2's with other norms, and LazyConfigs: what differs, and nothing else."""

import math
from pathlib import Path
from typing import Any

import detectron2.model_zoo
import pytest
import torch
from detectron2.config import LazyConfig, instantiate
from detectron2.engine import SimpleTrainer, hooks
from detectron2.modeling import build_model
from detectron2.utils.events import EventStorage
from omegaconf import OmegaConf
from torch import nn

from gw_detectron.config import flat_items
from gw_detectron.layers import GroupWhitening2d
from gw_detectron.norms import norm_rows, norm_summary
from gw_detectron.weights import GWDetectionCheckpointer
from gw_detectron.workbench.run import Trainer

from .test_configs import load, tiny_batch

CONFIGS = Path(__file__).parents[1] / "configs"
LAZY = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.py"))
TABLE_4 = "COCO-Detection/faster_rcnn_R_50_FPN_4conv1fc_1x_GW"

_NORMS = {
    "MODEL.BACKBONE.NAME",
    "MODEL.RESNETS.NORM",
    "MODEL.RESNETS.WHITEN_POSITIONS",
    "MODEL.FPN.NORM",
    "MODEL.ROI_BOX_HEAD.NAME",
    "MODEL.ROI_BOX_HEAD.NORM",
    "MODEL.ROI_MASK_HEAD.NAME",
    "MODEL.ROI_MASK_HEAD.NORM",
    "TEST.PRECISE_BN.ENABLED",
}
_WEIGHTS = {"MODEL.WEIGHTS", "MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD", "INPUT.FORMAT"}


@pytest.mark.parametrize(
    ("ours", "theirs", "allowed"),
    [
        ("mask_rcnn_R_50_FPN_3x_GW", "mask_rcnn_R_50_FPN_3x_gn", _NORMS | _WEIGHTS),
        ("mask_rcnn_R_50_FPN_3x_BN_GW", "mask_rcnn_R_50_FPN_3x_gn", _NORMS | _WEIGHTS),
        (
            "scratch_mask_rcnn_R_50_FPN_3x_GW",
            "scratch_mask_rcnn_R_50_FPN_3x_gn",
            _NORMS,
        ),
        (
            "scratch_mask_rcnn_R_50_FPN_3x_BN_GW",
            "scratch_mask_rcnn_R_50_FPN_3x_gn",
            _NORMS,
        ),
    ],
)
def test_the_3x_rows_differ_from_detectron2s_in_norms_and_their_weights(
    ours, theirs, allowed
):
    expected = dict(flat_items(detectron2.model_zoo.get_config(f"Misc/{theirs}.yaml")))
    values = dict(flat_items(load(f"Misc/{ours}")))

    different = {key for key in expected if plain(values[key]) != plain(expected[key])}

    assert different <= allowed


def plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def load_lazy(name: str) -> Any:
    return LazyConfig.load(str(CONFIGS / name))


def lazy_model(config: Any) -> nn.Module:
    with torch.device("meta"):
        return instantiate(config.model)


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_config_is_saved_and_reloaded_intact(name, tmp_path):
    cfg = load_lazy(name)
    saved = str(tmp_path / "config.yaml")

    LazyConfig.save(cfg, saved)
    again = LazyConfig.load(saved)

    model = lazy_model(cfg)
    assert str(model) == str(lazy_model(again))
    assert "GW" in norm_summary(model)
    if "lr_multiplier" in cfg:
        multiplier = instantiate(again.lr_multiplier)
        assert again.lr_multiplier.scheduler.num_updates == again.train.max_iter
        assert multiplier(0) == instantiate(cfg.lr_multiplier)(0)


@pytest.mark.parametrize("epochs", [50, 100, 200, 400])
def test_the_lsj_twins_differ_from_detectron2s_in_norms(epochs):
    name = f"new_baselines/mask_rcnn_R_50_FPN_{epochs}ep_LSJ"
    theirs = detectron2.model_zoo.get_config(f"{name}.py")
    ours = load_lazy(f"{name}_GW.py")

    for part in ("dataloader", "lr_multiplier", "train"):
        expected = OmegaConf.to_container(theirs[part])
        assert str(OmegaConf.to_container(ours[part])) == str(expected)

    model = lazy_model(ours)
    assert weight_shapes(model) == weight_shapes(lazy_model(theirs))
    layers = [
        module for module in model.modules() if isinstance(module, GroupWhitening2d)
    ]
    assert len(layers) == 53 + 8 + 4 + 4


def weight_shapes(model: nn.Module) -> dict[str, torch.Size]:
    state = model.state_dict()
    return {key: value.shape for key, value in state.items() if ".norm." not in key}


@pytest.fixture(scope="module")
def table_4():
    """The row as yaml and as LazyConfig, and a model of each, with the same weights."""
    cfg = load(TABLE_4)
    cfg.MODEL.DEVICE = "cpu"
    lazy = load_lazy(f"{TABLE_4}.py")
    of_yaml = build_model(cfg)
    of_lazy = instantiate(lazy.model)
    of_lazy.load_state_dict(of_yaml.state_dict())
    return cfg, lazy, of_yaml, of_lazy


def test_the_lazy_row_of_table_4_has_the_losses_of_the_yaml(table_4):
    _, _, of_yaml, of_lazy = table_4
    batch = tiny_batch(80)

    losses = []
    for model in (of_yaml, of_lazy):
        torch.manual_seed(0)
        with EventStorage():
            losses.append(model(batch))

    assert norm_rows(of_yaml) == norm_rows(of_lazy)
    assert losses[0] == losses[1]


def test_the_lazy_row_of_table_4_has_the_optimizer_of_the_yaml(table_4):
    cfg, lazy, of_yaml, of_lazy = table_4
    expected = Trainer.build_optimizer(cfg, of_yaml)

    lazy.optimizer.params.model = of_lazy
    optimizer = instantiate(lazy.optimizer)
    schedule = instantiate(lazy.lr_multiplier)

    assert decays(optimizer, of_lazy) == decays(expected, of_yaml)
    for iteration, factor in (
        (0, 1 / 3),
        (500, 1),
        (59999, 1),
        (60000, 0.1),
        (80000, 0.01),
    ):
        assert schedule(iteration / 90000) == pytest.approx(factor)


@pytest.mark.slow
def test_a_lazy_config_trains_and_is_resumed_with_its_norms(small_dataset, tmp_path):
    """The steps of Detectron2's lazyconfig_train_net.py."""
    lazy = load_lazy(f"{TABLE_4}.py")
    resnet = lazy.model.backbone.bottom_up
    resnet.depth = 18
    resnet.freeze_at = 0
    lazy.model.proposal_generator.post_nms_topk = [20, 10]
    lazy.model.roi_heads.batch_size_per_image = 8

    data = lazy.dataloader.train
    data.dataset.names = "gw_synthetic_train"
    data.total_batch_size = 2
    data.num_workers = 0
    data.mapper.augmentations[0].short_edge_length = [64]

    first = lazy_trainer(lazy, tmp_path, resume=False)
    assert first.iter == 0
    first.train(0, 2)

    second = lazy_trainer(lazy, tmp_path, resume=True)
    assert second.iter == 1
    second.train(2, 4)

    for trainer in (first, second):
        loss, _ = trainer.storage.latest()["total_loss"]
        assert math.isfinite(loss)
    checkpoint = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert "GW" in str(checkpoint["norms"])


def lazy_trainer(lazy: Any, folder: Path, *, resume: bool) -> SimpleTrainer:
    model = instantiate(lazy.model).train()
    lazy.optimizer.params.model = model
    trainer = SimpleTrainer(
        model, instantiate(lazy.dataloader.train), instantiate(lazy.optimizer)
    )
    checkpointer = GWDetectionCheckpointer(model, str(folder), trainer=trainer)
    checkpointer.resume_or_load("", resume=resume)
    trainer.register_hooks([hooks.PeriodicCheckpointer(checkpointer, 10)])
    return trainer


def decays(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> dict[str, tuple[float, float]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    settings = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            settings[names[parameter]] = (group["lr"], group["weight_decay"])
    return settings
