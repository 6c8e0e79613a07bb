"""k batches in one optimizer step: the gradient of the joint batch, mixed precision, clipping, resuming."""

import copy
import json
import signal

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.engine import AMPTrainer, SimpleTrainer
from detectron2.modeling import build_model
from detectron2.solver.build import maybe_add_gradient_clipping
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage

from gw_detectron.workbench.run import Trainer
from gw_detectron.workbench.run.optimizer import accumulated_step
from gw_detectron.workbench.run.train import run_config
from gw_detectron.workbench.signals import Interrupted

from ...tiny_run import arguments
from .distributed_cases import gradients, norm_config, record, relative, relative_norm

IMAGES = [record(index) for index in range(4)]
BOXES = torch.cat([image["instances"].gt_boxes.tensor for image in IMAGES])


def detector(norm: str, *, masks: bool) -> torch.nn.Module:
    """Build a detector in float64 that samples the same regions in every batch.

    All anchors are sampled, and all images have the same proposals: NMS would compare boxes in float32.
    """
    sampled = {f"MODEL__{part}__BATCH_SIZE_PER_IMAGE": 100_000 for part in ("RPN", "ROI_HEADS")}
    torch.manual_seed(0)
    model = build_model(
        norm_config(
            norm, **sampled, MODEL__ROI_HEADS__PROPOSAL_APPEND_GT=False, MODEL__MASK_ON=masks
        )
    ).double()
    model.proposal_generator.predict_proposals = lambda anchors, logits, deltas, sizes: [
        Instances(size, proposal_boxes=Boxes(BOXES.clone()), objectness_logits=BOXES[:, 0])
        for size in sizes
    ]
    return model


def step(model: torch.nn.Module, batches: list) -> tuple[dict, dict]:
    """Return the gradients and the logged losses of one step."""
    trainer = SimpleTrainer(model, batches, torch.optim.SGD(model.parameters(), lr=0.0))
    with EventStorage() as storage:
        accumulated_step(trainer, len(batches))
        logged = {
            name: value.latest()
            for name, value in storage.histories().items()
            if "loss" in name
        }
    return gradients(model), logged


def split(batches: int) -> list:
    size = len(IMAGES) // batches
    return [IMAGES[index : index + size] for index in range(0, len(IMAGES), size)]


@pytest.mark.parametrize("norm", ["GW:groups=16", "GN:groups=16", "FrozenBN", "BN"])
def test_equals_the_joint_batch_for_norms_of_single_images(norm):
    model = detector(norm, masks=False)
    joint, losses = step(model, [IMAGES])
    if norm == "BN":
        assert relative_norm(step(model, split(2))[0], joint) > 0.1
        return
    for batches in (2, 4):
        found, logged = step(model, split(batches))
        assert relative(found, joint) < 1e-11
        assert logged == pytest.approx(losses, rel=1e-6)  # some losses are float32
    assert losses["total_loss"] == pytest.approx(sum(losses.values()) / 2)


def test_is_the_mean_over_the_batches_where_losses_are_divided_by_counts_of_the_batch():
    """The mask loss is divided by the number of foreground regions, which differs between these batches."""
    model = detector("GW:groups=16", masks=True)
    joint = step(model, [IMAGES])[0]
    found = step(model, split(4))[0]
    each = []
    for image in IMAGES:
        model.zero_grad()
        with EventStorage():
            sum(model([image]).values()).backward()
        each.append(gradients(model))
    assert (
        relative(found, {name: sum(part[name] for part in each) / 4 for name in found}) < 1e-11
    )
    differing = [
        name for name in found if relative({name: found[name]}, {name: joint[name]}) > 1e-9
    ]
    assert "roi_heads.mask_head.predictor.weight" in differing
    assert not [name for name in differing if "box" in name or "rpn" in name]


class Losses(torch.nn.Module):
    """Two losses of a network."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.network(batch).float()
        return {"loss_a": y.mean(), "loss_b": y.square().mean()}


NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="Detectron2's mixed precision needs a GPU"
    ),
]


@pytest.mark.parametrize("kind", [SimpleTrainer, pytest.param(AMPTrainer, marks=NEEDS_GPU)])
def test_one_batch_is_the_step_of_detectron2(kind):
    torch.manual_seed(0)
    states = []
    start = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    device = "cuda" if kind is AMPTrainer else "cpu"
    batches = torch.randn(3, 4, 8, device=device)
    for run_step in (kind.run_step, lambda trainer: accumulated_step(trainer, 1)):
        model = Losses(copy.deepcopy(start).to(device))
        trainer = kind(
            model, batches, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        )
        with EventStorage() as storage:
            for _ in batches:
                run_step(trainer)
        logged = {
            name: value.values()
            for name, value in storage.histories().items()
            if "loss" in name
        }
        states.append((logged, model.state_dict()))
    (logged, expected), (also_logged, found) = states
    assert logged == also_logged and len(logged) == 3
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


class Product(torch.nn.Module):
    """The loss w * x, whose gradient is the batch x; a tensor, as Detectron2 accepts it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, batch: float) -> torch.Tensor:
        return self.weight * batch


def product_after(
    batches: list[float], per_step: int, trainer_of=SimpleTrainer, **options
) -> tuple[float, dict]:
    """Return the weight of a Product after SGD with learning rate 1, and the trainer's state."""
    model = Product()
    cfg = get_cfg()
    cfg.SOLVER.CLIP_GRADIENTS.update(
        ENABLED="clip" in options, CLIP_TYPE="norm", CLIP_VALUE=options.pop("clip", 1.0)
    )
    optimizer = maybe_add_gradient_clipping(cfg, torch.optim.SGD(model.parameters(), lr=1.0))
    trainer = trainer_of(model, batches, optimizer, **options)
    with EventStorage():
        for _ in range(len(batches) // per_step):
            accumulated_step(trainer, per_step)
    return model.weight.item(), trainer.state_dict()


def scaler(**options) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **options)


def test_the_mean_gradient_is_clipped_not_that_of_a_batch():
    assert (
        product_after([10.0, -9.5], 2)[0]
        == product_after([10.0, -9.5], 2, clip=1.0)[0]
        == -0.25
    )
    assert product_after([10.0, -2.0], 2, clip=1.0)[0] == pytest.approx(-1.0)
    clipped = product_after(
        [10.0, -2.0], 2, AMPTrainer, grad_scaler=scaler(init_scale=1024.0), clip=3.0
    )[0]
    assert clipped == pytest.approx(-3.0), "the true gradient 4 is clipped, not the scaled one"


@pytest.mark.parametrize(
    ("batches", "weight", "scale"),
    [
        ([1.0, 3.0, 5.0, 7.0], -8.0, 32.0),
        ([3e38, 1.0, 3.0, 3.0], -3.0, 8.0),
        ([1.0, 3e38, 3.0, 3.0], -3.0, 8.0),
    ],
)
def test_mixed_precision_scales_once_per_step_and_skips_one_that_overflows(
    batches, weight, scale
):
    """The scale doubles after each step, and halves where a scaled gradient overflows."""
    options = {"grad_scaler": scaler(init_scale=8.0, growth_interval=1)}
    found, state = product_after(batches, 2, AMPTrainer, **options)
    assert (found, state["grad_scaler"]["scale"]) == (weight, scale)


SCHEDULE = {
    "SOLVER__ACCUMULATE": 2,
    "SOLVER__MAX_ITER": 4,
    "SOLVER__STEPS": "(3,)",
    "SOLVER__CHECKPOINT_PERIOD": 2,
    "DATASETS__TEST": "()",
}


@pytest.mark.usefixtures("small_dataset")
class TestTrainer:
    def trainer(self, folder, kind=Trainer, **overrides) -> Trainer:
        return kind(run_config(arguments(folder, **SCHEDULE | overrides)))

    def test_an_iteration_is_a_step_and_resuming_is_exact(self, tmp_path):
        whole = self.trainer(
            tmp_path, SOLVER__CLIP_GRADIENTS__ENABLED=False
        )  # hooks are called twice with clipping
        rates = []
        whole.optimizer.register_step_pre_hook(
            lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
        )
        whole.train()
        assert whole.data_loader.batches == 8
        assert rates == pytest.approx([0.005 / 1000, 0.005, 0.005, 0.0005])
        lines = [
            json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()
        ]
        assert [line["iteration"] for line in lines if "total_loss" in line] == [3]

        (tmp_path / "last_checkpoint").write_text("model_0000001.pth")
        resumed = self.trainer(tmp_path, SOLVER__CLIP_GRADIENTS__ENABLED=False)
        resumed.resume_or_load(resume=True)
        assert resumed.start_iter == 2 and resumed.data_loader.batches == 4
        resumed.train()
        expected, found = whole.model.state_dict(), resumed.model.state_dict()
        assert all(torch.equal(value, found[name]) for name, value in expected.items())

    def test_a_signal_waits_for_the_last_batch(self, tmp_path):
        trainer = self.trainer(tmp_path)
        trainer.model.register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Interrupted) as stopped:
            trainer.train()
        assert "Iteration 0 is finished; checkpoint" in stopped.value.message
        content = torch.load(tmp_path / "model_0000000.pth", weights_only=True)
        assert content["trainer"]["data"]["batches"] == 2
