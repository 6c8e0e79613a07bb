"""``MODEL.COMPILE``: one graph, and the losses of eager mode."""

import pytest
import torch

from gw_detectron.config import read_config
from gw_detectron.workbench.run import Trainer

from .tiny_run import arguments, config_of


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("norm", ["GW", pytest.param("FrozenBN", marks=pytest.mark.slow)])
def test_backbone_and_fpn_are_one_graph(norm, train):
    cfg = read_config(f"COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_4conv1fc_1x_{norm}.yaml")
    cfg.MODEL.DEVICE, cfg.MODEL.COMPILE = "cpu", True
    backbone = Trainer.build_model(cfg).backbone.train(train)
    found = torch._dynamo.explain(backbone.forward)(torch.randn(1, 3, 64, 96))
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


@pytest.mark.slow
@pytest.mark.usefixtures("small_dataset")
def test_a_compiled_training_has_the_losses_of_eager_mode(tmp_path):
    losses = {}
    for compiled in (False, True):
        options = {"MODEL__COMPILE": compiled, "SOLVER__MAX_ITER": 4, "DATASETS__TEST": "()"}
        options["INPUT__MAX_SIZE_TRAIN"] = (
            64  # one size of all batches: another one would be compiled again
        )
        trainer = Trainer(config_of(arguments(tmp_path / str(compiled), **options)))
        trainer.train()
        losses[compiled] = [
            value for value, _ in trainer.storage.history("total_loss").values()
        ]
    assert losses[True] == pytest.approx(losses[False], rel=1e-3)
