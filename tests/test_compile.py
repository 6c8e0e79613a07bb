"""``MODEL.COMPILE``: one graph, and the losses of eager mode."""

import pytest
import torch

from gw_detectron.config import read_config
from gw_detectron.workbench.run import Trainer

from .tiny_run import arguments, config_of


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "norm", ["GW", pytest.param("FrozenBN", marks=pytest.mark.slow)]
)
def test_backbone_and_fpn_are_one_graph(norm, train):
    cfg = read_config(
        f"COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_4conv1fc_1x_{norm}.yaml"
    )
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.COMPILE = True
    backbone = Trainer.build_model(cfg).backbone.train(train)
    image = torch.randn(1, 3, 64, 96)

    explained = torch._dynamo.explain(backbone.forward)(image)

    assert explained.graph_count == 1, explained.break_reasons
    assert explained.graph_break_count == 0, explained.break_reasons


def losses_of_a_run(folder, compiled):
    args = arguments(
        folder,
        MODEL__COMPILE=compiled,
        SOLVER__MAX_ITER=4,
        DATASETS__TEST="()",
        INPUT__MAX_SIZE_TRAIN=64,  # one size of all batches: another one would be compiled again
    )
    trainer = Trainer(config_of(args))
    trainer.train()
    history = trainer.storage.history("total_loss").values()
    return [loss for loss, _ in history]


@pytest.mark.slow
@pytest.mark.usefixtures("small_dataset")
def test_a_compiled_training_has_the_losses_of_eager_mode(tmp_path):
    eager = losses_of_a_run(tmp_path / "eager", compiled=False)
    compiled = losses_of_a_run(tmp_path / "compiled", compiled=True)

    assert compiled == pytest.approx(eager, rel=1e-3)
