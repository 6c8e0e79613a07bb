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
from gw_detectron.norms import norm_rows
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
        ("scratch_mask_rcnn_R_50_FPN_3x_GW", "scratch_mask_rcnn_R_50_FPN_3x_gn", _NORMS),
        ("scratch_mask_rcnn_R_50_FPN_3x_BN_GW", "scratch_mask_rcnn_R_50_FPN_3x_gn", _NORMS),
    ],
)
def test_the_3x_rows_differ_from_detectron2s_in_norms_and_their_weights(ours, theirs, allowed):
    expected = dict(flat_items(detectron2.model_zoo.get_config(f"Misc/{theirs}.yaml")))
    found = dict(flat_items(load(f"Misc/{ours}")))
    assert {
        key for key, value in expected.items() if plain(found[key]) != plain(value)
    } <= allowed


def plain(value: Any) -> Any:
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def load_lazy(name: str) -> Any:
    return LazyConfig.load(str(CONFIGS / name))


@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_config_is_saved_and_reloaded_intact(name, tmp_path):
    cfg = load_lazy(name)
    LazyConfig.save(cfg, str(tmp_path / "config.yaml"))
    again = LazyConfig.load(str(tmp_path / "config.yaml"))
    with torch.device("meta"):
        models = [instantiate(config.model) for config in (cfg, again)]
    rows = [norm_rows(model) for model in models]
    assert rows[0] == rows[1] and any("GW" in row.spec for row in rows[0])
    assert str(models[0]) == str(models[1])
    if "lr_multiplier" in cfg:
        assert again.lr_multiplier.scheduler.num_updates == again.train.max_iter
        assert instantiate(again.lr_multiplier)(0) == instantiate(cfg.lr_multiplier)(0)


@pytest.mark.parametrize("epochs", [50, 100, 200, 400])
def test_the_lsj_twins_differ_from_detectron2s_in_norms(epochs):
    name = f"new_baselines/mask_rcnn_R_50_FPN_{epochs}ep_LSJ"
    theirs, ours = (
        detectron2.model_zoo.get_config(f"{name}.py"),
        load_lazy(f"{name}_GW.py"),
    )
    for part in ("dataloader", "lr_multiplier", "train"):
        assert str(OmegaConf.to_container(ours[part])) == str(
            OmegaConf.to_container(theirs[part])
        )
    with torch.device("meta"):
        models = [instantiate(config.model) for config in (theirs, ours)]
    shapes = [
        {key: value.shape for key, value in m.state_dict().items() if ".norm." not in key}
        for m in models
    ]
    assert shapes[0] == shapes[1]
    assert (
        sum(isinstance(module, GroupWhitening2d) for module in models[1].modules())
        == 53 + 8 + 4 + 4
    )


def test_the_lazy_row_of_table_4_is_that_of_the_yaml():
    cfg, lazy = load(TABLE_4), load_lazy(f"{TABLE_4}.py")
    cfg.MODEL.DEVICE = "cpu"
    models, losses = [build_model(cfg), instantiate(lazy.model)], []
    assert norm_rows(models[0]) == norm_rows(models[1])
    models[1].load_state_dict(models[0].state_dict())
    batch = tiny_batch(80)
    for model in models:
        torch.manual_seed(0)
        with EventStorage():
            losses.append({name: loss.item() for name, loss in model(batch).items()})
    assert losses[0] == losses[1]

    lazy.optimizer.params.model = models[1]
    optimizers = Trainer.build_optimizer(cfg, models[0]), instantiate(lazy.optimizer)
    groups = [
        decays(optimizer, model) for optimizer, model in zip(optimizers, models, strict=True)
    ]
    assert groups[0] == groups[1]
    schedule = instantiate(lazy.lr_multiplier)
    for iteration, factor in ((0, 1 / 3), (500, 1), (59999, 1), (60000, 0.1), (80000, 0.01)):
        assert schedule(iteration / 90000) == pytest.approx(factor)


@pytest.mark.slow
def test_a_lazy_config_trains_and_is_resumed_with_its_norms(small_dataset, tmp_path):
    """The steps of Detectron2's lazyconfig_train_net.py."""
    lazy = load_lazy(f"{TABLE_4}.py")
    lazy.model.backbone.bottom_up.depth, lazy.model.backbone.bottom_up.freeze_at = 18, 0
    lazy.model.proposal_generator.post_nms_topk = [20, 10]
    lazy.model.roi_heads.batch_size_per_image = 8
    data = lazy.dataloader.train
    data.dataset.names, data.total_batch_size, data.num_workers = "gw_synthetic_train", 2, 0
    data.mapper.augmentations[0].short_edge_length = [64]
    losses = []
    for resume in (False, True):
        model = instantiate(lazy.model).train()
        lazy.optimizer.params.model = model
        trainer = SimpleTrainer(model, instantiate(data), instantiate(lazy.optimizer))
        checkpointer = GWDetectionCheckpointer(model, str(tmp_path), trainer=trainer)
        checkpointer.resume_or_load("", resume=resume)
        assert trainer.iter == int(resume)
        trainer.register_hooks([hooks.PeriodicCheckpointer(checkpointer, 10)])
        trainer.train(trainer.iter + resume, 2 + 2 * resume)
        losses.append(trainer.storage.latest()["total_loss"][0])
    assert all(map(math.isfinite, losses))
    assert "GW" in str(torch.load(tmp_path / "model_final.pth", weights_only=True)["norms"])


def decays(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> dict[str, tuple[float, float]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[p]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
