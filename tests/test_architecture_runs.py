"""Every architecture of Detectron2 trains and evaluates with GW and with GN, through its shipped config."""

import json

import pytest
import torch

from gw_detectron.norms.listing import norm_rows
from gw_detectron.workbench.commands.train import run_here as main
from gw_detectron.workbench.run import Trainer

from .architectures import (
    ARCHITECTURES,
    gw_places,
    skip_without_operators,
    small_arguments,
)
from .tiny_run import config_of

#: what the evaluation of each reports
TASKS = {
    "keypoint": {"bbox", "keypoints"},
    "panoptic": {"bbox", "segm", "sem_seg"},
    "mask": {"bbox", "segm"},
    "semantic": {"sem_seg"},
}
pytestmark = pytest.mark.usefixtures("small_dataset", "one_thread")


@pytest.mark.parametrize("norm", ["GW", pytest.param("GN", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_trains_evaluates_and_comes_back(name, norm, tmp_path):
    skip_without_operators(name)
    args = small_arguments(name, norm, tmp_path)
    trainer = Trainer(config_of(args))
    model = trainer.model

    results = trainer.train()

    if norm == "GW":
        assert gw_places(model) == ARCHITECTURES[name]
    else:
        assert {row.spec for row in norm_rows(model)} == {"GN:groups=8,eps=1e-05"}
    history = trainer.storage.history("total_loss").values()
    losses = torch.tensor([loss for loss, _ in history])
    assert len(losses) == 3
    assert losses.isfinite().all()
    for key, value in model.named_parameters():
        assert value.grad.any(), key
    expected = [tasks for kind, tasks in TASKS.items() if kind in name] or [{"bbox"}]
    assert results.keys() - {"panoptic_seg"} == expected[0]

    args.eval_only = True
    args.opts += ["MODEL.WEIGHTS", str(tmp_path / "model_final.pth")]
    again = main(args)
    assert json.dumps(again) == json.dumps(results)  # which also compares NaN
