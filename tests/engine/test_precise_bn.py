"""PreciseBN: BN as fvcore does it, batch whitening as the average over the batches."""

import copy

import pytest
import torch
from detectron2.engine import hooks
from fvcore.nn.precise_bn import update_bn_stats
from torch import nn

from gw_detectron.engine import Trainer, setup
from gw_detectron.engine.precise_bn import PreciseStatistics, update_statistics
from gw_detectron.layers import BatchRenorm2d, BatchWhitening2d, FrozenBatchWhitening2d

from ..tiny_run import arguments


def batches(count: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2 + i, 8, 6, 5, generator=generator) * (1 + i) + i for i in range(count)]


def model(*norms: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for norm in norms for layer in (nn.Conv2d(8, 8, 1), norm))).train()


def buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.named_buffers() if "num_batches" not in name}


def test_bn_is_fvcores():
    made = model(nn.BatchNorm2d(8), nn.BatchNorm2d(8))
    expected = copy.deepcopy(made)
    update_bn_stats(expected, iter(batches()), 4)
    update_statistics(made, iter(batches()), 4)
    assert buffers(made).keys() == buffers(expected).keys()
    torch.testing.assert_close(buffers(made), buffers(expected), rtol=1e-5, atol=1e-5)
    assert made[1].momentum == 0.1


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(8), BatchWhitening2d(8, 4)], ids=["BN", "BW"])
def test_a_layer_of_several_levels_averages_over_its_calls(norm):
    """RetinaNet's heads use their layers for each level of the pyramid; a mask head may have no regions."""

    class Levels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.unused = norm, nn.BatchNorm2d(8)

        def forward(self, levels: list[torch.Tensor]) -> None:
            for level in levels:
                self.norm(level)

    made, empty, levels = Levels().train(), torch.zeros(0, 8, 3, 3), batches()
    expected, unused = copy.deepcopy(made.norm), buffers(made.unused)
    update_statistics(expected, iter(levels), 5)
    update_statistics(made, iter([[empty, *levels[:3]], [empty], [*levels[3:], empty]]), 3)
    torch.testing.assert_close(buffers(made.norm), buffers(expected))
    torch.testing.assert_close(buffers(made.unused), unused)


def test_compiled_modules_take_part():
    made = model(nn.BatchNorm2d(8), nn.BatchNorm2d(8))
    expected = copy.deepcopy(made)
    made.compile(backend="eager")
    made(batches()[0])
    expected.load_state_dict(made.state_dict())
    for _ in range(2):
        update_statistics(expected, iter(batches()), 4)
        update_statistics(made, iter(batches()), 4)
        torch.testing.assert_close(buffers(made), buffers(expected))


def test_batch_renormalization_is_bn_meanwhile():
    made = model(*(BatchRenorm2d(8, warmup=0, rmax_at=2, dmax_at=2) for _ in range(2)))
    for batch in batches():
        made(batch)
    expected = model(nn.BatchNorm2d(8), nn.BatchNorm2d(8))
    expected.load_state_dict(made.state_dict())
    update_statistics(expected, iter(batches()), 4)
    update_statistics(made, iter(batches()), 4)
    for name, value in buffers(expected).items():
        torch.testing.assert_close(buffers(made)[name], value, rtol=1e-4, atol=1e-5)
    assert (made[1].rmax, made[1].dmax, made[1].num_batches_tracked.item()) == (3.0, 5.0, 5)


@pytest.mark.parametrize("with_bn", [False, True])
@pytest.mark.parametrize("running", ["matrix", "covariance"])
def test_batch_whitening_averages_over_the_batches(running, with_bn):
    """The oracle has momentum 1: after a batch its buffers are those of the batch."""
    norm = BatchWhitening2d(8, 4, running=running, momentum=0.3)
    made = model(norm, nn.BatchNorm2d(8)) if with_bn else model(norm)
    single = copy.deepcopy(made[:2])
    single[1].momentum = 1.0
    seen = []
    for batch in batches()[:4]:
        single(batch)
        seen.append(buffers(single))
    update_statistics(made, iter(batches()), 4)
    assert {"1.running_mean", f"1.running_{running}"} == seen[0].keys()
    for name in seen[0]:
        mean = torch.stack([values[name] for values in seen]).mean(0)
        torch.testing.assert_close(buffers(made)[name], mean, rtol=1e-4, atol=1e-5)
    assert norm.momentum == 0.3


@pytest.mark.parametrize("norm", [FrozenBatchWhitening2d(8, 4), BatchWhitening2d(8, 4).eval()])
def test_frozen_layers_keep_their_statistics(norm):
    made = model()
    made.append(norm)
    before, training = buffers(made), norm.training
    update_statistics(made, iter(batches()), 2)
    assert norm.training is training is False
    assert all(torch.equal(value, buffers(made)[name]) for name, value in before.items())


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(8), BatchWhitening2d(8, 4)], ids=["BN", "BW"])
def test_an_error_changes_nothing(norm):
    made = model(norm)
    before = buffers(made)
    with pytest.raises(RuntimeError):
        update_statistics(made, iter([*batches(1), torch.zeros(1, 3, 2, 2)]), 2)
    assert made[1].momentum == 0.1 and not made[1]._forward_hooks
    torch.testing.assert_close(buffers(made), before, rtol=0, atol=0)


@pytest.mark.parametrize(("period", "iterations"), [(0, [5]), (2, [2, 4, 5]), (5, [5])])
def test_when_the_hook_runs(period, iterations):
    class Loop:
        max_iter = 5

    ran = []
    hook = PreciseStatistics(period, nn.Identity(), batches(), 1)
    hook.trainer = Loop()
    hook.before_train()
    for Loop.iter in range(5):
        made = model(BatchWhitening2d(8, 4))
        hook._model, before = made, buffers(made)
        hook.after_step()
        if not torch.equal(before["1.running_mean"], made[1].running_mean):
            ran.append(Loop.iter + 1)
    assert ran == iterations


@pytest.mark.parametrize(("norm", "whiten"), [("BN", "BN"), ("GN", "BW:channels=8"), ("GN", "GN")])
def test_the_trainer_recomputes_statistics_before_the_last_checkpoint(norm, whiten, small_dataset, tmp_path):
    options = {"MODEL__RESNETS__NORM": norm, "MODEL__RESNETS__WHITEN_NORM": whiten, "DATASETS__TEST": "()"}
    options |= {"TEST__PRECISE_BN__ENABLED": True, "TEST__PRECISE_BN__NUM_ITER": 2, "SOLVER__MAX_ITER": 1}
    trainer = Trainer(setup(arguments(tmp_path, **options)))
    kinds = [type(hook) for hook in trainer._hooks]
    assert hooks.PreciseBN not in kinds and trainer.cfg.TEST.PRECISE_BN.ENABLED
    assert kinds.index(PreciseStatistics) < kinds.index(hooks.PeriodicCheckpointer)
    momenta = [m.momentum for m in trainer.model.modules() if hasattr(m, "momentum")]
    trainer.train()
    assert momenta == [m.momentum for m in trainer.model.modules() if hasattr(m, "momentum")]
    means = {name: value for name, value in buffers(trainer.model).items() if name.endswith("running_mean")}
    saved = torch.load(tmp_path / "model_final.pth", weights_only=True)["model"]
    assert bool(means) == (norm == "BN" or whiten != "GN")
    assert all(torch.equal(saved[name], value) for name, value in means.items())
