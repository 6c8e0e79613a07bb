"""The optimizer treats every norm of the package as Detectron2's norms."""

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.solver import build_optimizer
from torch import nn

from gw_detectron.errors import ConfigError
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


AFFINE = ("bn", "gw", "bw", "brn")


def settings(optimizer, model, keys=("lr", "weight_decay", "momentum")):
    """Return the optimizer's settings for each parameter name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        assert group["params"]
        for parameter in group["params"]:
            assert names[parameter] not in found
            found[names[parameter]] = tuple(group[key] for key in keys)
    return found


@pytest.mark.parametrize("norm_decay", [0.0, 0.25, None])
@pytest.mark.parametrize("bias_decay", [0.0, 0.5, None])
@pytest.mark.parametrize("clip", [False, True])
def test_scale_and_shift_of_whitening_layers_are_treated_as_those_of_bn(
    norm_decay, bias_decay, clip
):
    cfg, model = get_cfg(), Model()
    cfg.SOLVER.merge_from_list(["WEIGHT_DECAY", 0.125, "BIAS_LR_FACTOR", 2.0])
    cfg.SOLVER.WEIGHT_DECAY_NORM = norm_decay
    cfg.SOLVER.WEIGHT_DECAY_BIAS = bias_decay
    cfg.SOLVER.CLIP_GRADIENTS.ENABLED = clip

    found = settings(Trainer.build_optimizer(cfg, model), model)

    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert found.keys() == trained
    for name in ("weight", "bias"):
        assert len({found[f"{norm}.{name}"] for norm in AFFINE}) == 1
    decay = found["bn.weight"][1]
    assert decay == (0.125 if norm_decay is None else norm_decay)
    assert found["bn.bias"][1] == (decay if bias_decay is None else bias_decay)
    (rotation,) = (name for name in found if name.count(".") > 1)
    assert found["conv.weight"][1] == found[rotation][1] == 0.125


def test_groups_of_several_parameters_are_split(monkeypatch):
    """Newer versions of Detectron2 make such groups."""
    cfg, model = get_cfg(), Model()
    cfg.SOLVER.WEIGHT_DECAY_NORM, cfg.SOLVER.WEIGHT_DECAY_BIAS = 0.25, None
    everything = [value for value in model.parameters() if value.requires_grad]
    group = {"params": everything, "lr": 0.5}
    optimizer = torch.optim.SGD([group], momentum=0.75, weight_decay=0.125)
    build = "detectron2.engine.defaults.build_optimizer"
    monkeypatch.setattr(build, lambda cfg, model: optimizer)

    found = settings(Trainer.build_optimizer(cfg, model), model)

    for name, values in found.items():
        is_affine = name.count(".") == 1 and name.partition(".")[0] in AFFINE
        assert values == (0.5, 0.25 if is_affine else 0.125, 0.75), name


def test_groups_are_kept_where_nothing_changes():
    """Then a checkpoint of Detectron2's own trainer can be resumed."""
    cfg, model = get_cfg(), Model()
    cfg.SOLVER.WEIGHT_DECAY_NORM = cfg.SOLVER.WEIGHT_DECAY

    ours, theirs = Trainer.build_optimizer(cfg, model), build_optimizer(cfg, model)

    assert ours.state_dict() == theirs.state_dict()


def test_a_step_at_the_end_is_left_out():
    cfg = get_cfg()
    cfg.SOLVER.MAX_ITER = 30
    cfg.SOLVER.STEPS = (20, 30, 40)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    scheduler = Trainer.build_lr_scheduler(cfg, optimizer)
    assert scheduler.get_last_lr()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("LR_SCHEDULER_NAME", "Cosine"),
        ("WARMUP_METHOD", "none"),
        ("STEPS", (20, 10)),
    ],
)
def test_a_schedule_that_detectron2_refuses_is_told_by_its_keys(key, value):
    cfg = get_cfg()
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.WARMUP_ITERS = 30, 5
    cfg.SOLVER[key] = value
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    with pytest.raises(ConfigError, match=f"^SOLVER: .*Fix: .*{key}"):
        Trainer.build_lr_scheduler(cfg, optimizer)
