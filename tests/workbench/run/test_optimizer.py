"""The optimizer treats every norm of the package as Detectron2's norms."""

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.solver import build_optimizer
from torch import nn

from gw_detectron.layers import BatchRenorm2d, BatchWhitening2d, GroupWhitening2d
from gw_detectron.workbench.run import Trainer


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)
        self.bn = nn.BatchNorm2d(8)
        self.gw = GroupWhitening2d(8)
        self.bw = BatchWhitening2d(8, rotation="cayley")
        self.brn = BatchRenorm2d(8)
        self.frozen = GroupWhitening2d(8).requires_grad_(False)


def settings(optimizer, model, keys=("lr", "weight_decay", "momentum")):
    """Return the optimizer's settings for each parameter name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert all(group["params"] for group in optimizer.param_groups)
    found = [
        (names[p], tuple(group[k] for k in keys))
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.mark.parametrize("norm_decay", [0.0, 0.25, None])
@pytest.mark.parametrize("bias_decay", [0.0, 0.5, None])
@pytest.mark.parametrize("clip", [False, True])
def test_scale_and_shift_of_whitening_layers_are_treated_as_those_of_bn(
    norm_decay, bias_decay, clip
):
    cfg, model = get_cfg(), Model()
    cfg.SOLVER.merge_from_list(["WEIGHT_DECAY", 0.125, "BIAS_LR_FACTOR", 2.0])
    cfg.SOLVER.WEIGHT_DECAY_NORM, cfg.SOLVER.WEIGHT_DECAY_BIAS = norm_decay, bias_decay
    cfg.SOLVER.CLIP_GRADIENTS.ENABLED = clip
    optimizer = Trainer.build_optimizer(cfg, model)
    found = settings(optimizer, model)
    rotation = next(name for name in found if name.count(".") > 1)
    assert set(found) == {
        f"{m}.{p}" for m in ("conv", "bn", "gw", "bw", "brn") for p in ("weight", "bias")
    } | {rotation}
    for name in ("weight", "bias"):
        assert (
            found[f"gw.{name}"]
            == found[f"bw.{name}"]
            == found[f"brn.{name}"]
            == found[f"bn.{name}"]
        )
    assert found["bn.weight"][1] == (0.125 if norm_decay is None else norm_decay)
    assert found["bn.bias"][1] == (found["bn.weight"][1] if bias_decay is None else bias_decay)
    assert found["conv.weight"][1] == found[rotation][1] == 0.125


def test_groups_of_several_parameters_are_split(monkeypatch):
    """Newer versions of Detectron2 make such groups."""
    cfg, model = get_cfg(), Model()
    everything = [p for p in model.parameters() if p.requires_grad]
    one_group = torch.optim.SGD(
        [{"params": everything, "lr": 0.5}], lr=1.0, momentum=0.75, weight_decay=0.125
    )
    monkeypatch.setattr(
        "detectron2.engine.defaults.build_optimizer", lambda cfg, model: one_group
    )
    cfg.SOLVER.WEIGHT_DECAY_NORM, cfg.SOLVER.WEIGHT_DECAY_BIAS = 0.25, None
    found = settings(Trainer.build_optimizer(cfg, model), model)
    affine = {
        f"{norm}.{name}" for norm in ("bn", "gw", "bw", "brn") for name in ("weight", "bias")
    }
    assert {name for name, values in found.items() if values == (0.5, 0.25, 0.75)} == affine
    assert {values for name, values in found.items() if name not in affine} == {
        (0.5, 0.125, 0.75)
    }


def test_groups_are_kept_where_nothing_changes():
    """Then a checkpoint of Detectron2's own trainer can be resumed."""
    cfg, model = get_cfg(), Model()
    cfg.SOLVER.WEIGHT_DECAY_NORM = cfg.SOLVER.WEIGHT_DECAY
    ours, theirs = (
        build(cfg, model).state_dict() for build in (Trainer.build_optimizer, build_optimizer)
    )
    assert ours == theirs
