"""A killed and resumed run equals an uninterrupted one bit for bit."""

import hashlib
import json
import logging
import os
import re
import signal

import pytest
import torch
from detectron2.engine import AMPTrainer
from detectron2.modeling.meta_arch import retinanet
from fvcore.nn import sigmoid_focal_loss
from torch.utils._pytree import tree_map_only

from gw_detectron.errors import ConfigError
from gw_detectron.workbench.commands.train import run_here as main
from gw_detectron.workbench.run import Trainer, train

from ...tiny_run import RETINANET, arguments, config_of
from ..reliability.forked_run import child, report_phases

SCHEDULE = {
    "SOLVER__MAX_ITER": 12,
    "SOLVER__STEPS": "(8,)",
    "SOLVER__CHECKPOINT_PERIOD": 5,  # does not divide MAX_ITER
    "DATASETS__TEST": "()",
}

pytestmark = pytest.mark.usefixtures("small_dataset")


def run(output, *flags, kill_after=None, **overrides):
    """Run main() in a forked process; return its exit code."""

    class Recorded(Trainer):
        def after_step(self):
            super().after_step()
            losses = {
                name: float(value.latest()).hex()
                for name, value in self.storage.histories().items()
                if "loss" in name
            }
            with open(output / "losses.txt", "a") as file:
                file.write(json.dumps([self.iter, losses]) + "\n")
            if self.iter == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)

    def work(report):
        report_phases(report)
        train.Trainer = Recorded
        # TorchScript rounds differently after its first calls
        retinanet.sigmoid_focal_loss_jit = sigmoid_focal_loss
        main(arguments(output, *flags, **{**SCHEDULE, **overrides}))

    with child(work, output.with_suffix(".log")) as process:
        code = process.wait()
        if code > 0:
            print(process.output())  # pytest shows it if the test fails
        return code


def digest(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def state(output):
    """Return the bits of the last checkpoint, the losses of every iteration, and the best weights."""
    kept = {}
    for name in ("final", "best"):
        path = output / f"model_{name}.pth"
        if path.is_file():
            content = torch.load(path, weights_only=True)
            kept[name] = [content.get(key) for key in ("model", "trainer", "iteration")]
    lines = [
        json.loads(line) for line in (output / "losses.txt").read_text().splitlines()
    ]
    return tree_map_only(torch.Tensor, digest, {**kept, "losses": dict(lines)})


VALIDATION = {"DATASETS__TEST": "('gw_synthetic_val',)"}
EVALUATED = {**VALIDATION, "TEST__EVAL_PERIOD": 5}  # where checkpoints are written, too
SHORT = {"SOLVER__MAX_ITER": 6, "SOLVER__STEPS": "(5,)"}
BEST_LOSS = {"TEST__BEST": "validation/total_loss", "SOLVER__EMA": 0.9}
PATIENCE = {"TEST__BEST": "segm/AP", "TEST__PATIENCE": 2, "SOLVER__MAX_ITER": 40}
BW = "BW:channels=8"
#: changes of the config, iterations after which the run is killed
CASES = {
    "plain": ({**SHORT, "SOLVER__CHECKPOINT_PERIOD": 4}, [4]),
    "evaluation": ({**VALIDATION, "TEST__EVAL_PERIOD": 3}, [7]),
    "two workers, killed twice": ({"DATALOADER__NUM_WORKERS": 2}, [6, 11]),
    "RetinaNet": ({**RETINANET, **SHORT}, [4]),
    "average, best weights, a cut evaluation": (
        {**EVALUATED, **BEST_LOSS, "MODEL__RESNETS__NORM": "BN"},
        [4, 7],
    ),
    "patience": ({**EVALUATED, **PATIENCE}, [4, 12]),
    "batch whitening": (
        {"MODEL__FPN__NORM": BW, "MODEL__ROI_MASK_HEAD__NORM": BW},
        [5],
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "plain" else pytest.mark.slow, id=name)
        for name in CASES
    ],
)
def test_a_killed_run_ends_with_the_bits_of_an_uninterrupted_one(tmp_path, name):
    overrides, kills = CASES[name]
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    assert run(whole, **overrides) == 0
    for kill in kills:
        assert run(parts, "--resume", kill_after=kill, **overrides) == -signal.SIGKILL
    assert run(parts, "--resume", **overrides) == 0

    assert state(parts) == state(whole)


@pytest.mark.slow
def test_without_a_seed_the_drawn_one_is_restored_and_repeats_the_run(tmp_path):
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    assert run(parts, SEED=-1, kill_after=7) == -signal.SIGKILL
    assert run(parts, "--resume", SEED=-1) == 0
    content = torch.load(parts / "model_final.pth", weights_only=True)
    assert run(whole, SEED=content["record"]["seed"], DATALOADER__NUM_WORKERS=1) == 0
    assert state(parts) == state(whole)


@pytest.fixture
def trainer_for(tmp_path):
    def build(**overrides):
        schedule = {
            **SCHEDULE,
            "SOLVER__MAX_ITER": 2,
            "SOLVER__STEPS": "()",
            **overrides,
        }
        return Trainer(config_of(arguments(tmp_path, **schedule)))

    return build


def save_after(trainer, batches):
    iterator = iter(trainer.data_loader)
    for _ in range(batches):
        next(iterator)
    trainer.iter = batches - 1
    trainer.checkpointer.save("model_0000001", iteration=trainer.iter)


def test_loss_scaling_of_mixed_precision_is_restored(trainer_for):
    def with_scaler(**options):
        trainer = trainer_for()
        loop = trainer._trainer
        scaler = torch.amp.GradScaler("cpu", **options)
        trainer._trainer = AMPTrainer(
            loop.model, loop.data_loader, loop.optimizer, grad_scaler=scaler
        )
        return trainer

    first = with_scaler(init_scale=4096.0, growth_interval=7)
    first.checkpointer.save("model_0000001", iteration=0)
    second = with_scaler()
    second.resume_or_load(resume=True)

    restored = second._trainer.grad_scaler
    assert restored.state_dict() == first._trainer.grad_scaler.state_dict()
    assert restored.get_scale() == 4096


def warnings_of_resuming(trainer, caplog):
    """Resume; return the warnings. Detectron2's set-up stops the package's logger from propagating."""
    logging.getLogger("gw_detectron").propagate = True
    trainer.resume_or_load(resume=True)
    return " | ".join(
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING" and record.name.startswith("gw_detectron")
    )


@pytest.mark.parametrize(
    ("overrides", "message", "batches"),
    [
        ({}, "", 6),
        ({"SOLVER__IMS_PER_BATCH": 4}, "images_per_batch 2 -> 4", 3),
        ({"SEED": 8}, "SEED 8 .* 7", 6),
        (
            {"SOLVER__BASE_LR": 0.01},
            "SOLVER.BASE_LR 0.005 in the checkpoint, 0.01 here",
            6,
        ),
    ],
)
def test_what_differs_from_the_checkpoint_is_a_warning(
    trainer_for, caplog, overrides, message, batches
):
    save_after(trainer_for(), 6)
    trainer = trainer_for(**overrides)

    warnings = warnings_of_resuming(trainer, caplog)

    assert re.search(message, warnings) if message else not warnings
    assert trainer.data_loader.batches == batches


def test_an_overridden_loader_works_and_says_that_it_has_no_position(tmp_path, caplog):
    class WithGenerator(Trainer):
        @classmethod
        def build_train_loader(cls, cfg):
            yield from super().build_train_loader(cfg)

    args = arguments(
        tmp_path, **{**SCHEDULE, "SOLVER__MAX_ITER": 1, "SOLVER__STEPS": "()"}
    )
    WithGenerator(config_of(args)).train()

    warnings = warnings_of_resuming(WithGenerator(config_of(args)), caplog)
    assert "build_train_loader stores no position" in warnings


@pytest.mark.parametrize(
    "changes", [{"seed": "x"}, {"data": {}}, {"hooks": [1]}, {"_trainer": "x"}], ids=str
)
def test_damaged_training_state_is_explained(trainer_for, changes):
    trainer = trainer_for(SEED=-1)
    with pytest.raises(ConfigError, match="--resume"):
        trainer.load_state_dict({**trainer.state_dict(), **changes})
