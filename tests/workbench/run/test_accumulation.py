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
from gw_detectron.workbench.signals import Interrupted

from ...tiny_run import arguments, config_of
from .distributed_cases import gradients, norm_config, record, relative, relative_norm

IMAGES = [record(index) for index in range(4)]
BOXES = torch.cat([image["instances"].gt_boxes.tensor for image in IMAGES])


def detector(norm: str, *, masks: bool) -> torch.nn.Module:
    """Build a detector in float64 that samples the same regions in every batch.

    All anchors are sampled, and all images have the same proposals: NMS would compare boxes in float32.
    """
    sampled = {
        f"MODEL__{part}__BATCH_SIZE_PER_IMAGE": 100_000 for part in ("RPN", "ROI_HEADS")
    }
    torch.manual_seed(0)
    model = build_model(
        norm_config(
            norm,
            **sampled,
            MODEL__ROI_HEADS__PROPOSAL_APPEND_GT=False,
            MODEL__MASK_ON=masks,
        )
    ).double()
    model.proposal_generator.predict_proposals = lambda anchors, logits, deltas, sizes: [
        Instances(
            size, proposal_boxes=Boxes(BOXES.clone()), objectness_logits=BOXES[:, 0]
        )
        for size in sizes
    ]
    return model


def losses_of(storage: EventStorage) -> dict[str, list[float]]:
    return {
        name: [value for value, _ in history.values()]
        for name, history in storage.histories().items()
        if "loss" in name
    }


def step(model: torch.nn.Module, batches: list) -> tuple[dict, dict]:
    """Return the gradients and the logged losses of one step."""
    trainer = SimpleTrainer(model, batches, torch.optim.SGD(model.parameters(), lr=0.0))
    with EventStorage() as storage:
        accumulated_step(trainer, len(batches))
        logged = {name: values[-1] for name, values in losses_of(storage).items()}
    return gradients(model), logged


def split(batches: int) -> list:
    size = len(IMAGES) // batches
    return [IMAGES[index : index + size] for index in range(0, len(IMAGES), size)]


@pytest.mark.parametrize("norm", ["GW:groups=16", "GN:groups=16", "FrozenBN"])
def test_equals_the_joint_batch_for_norms_of_single_images(norm):
    model = detector(norm, masks=False)
    joint, losses = step(model, [IMAGES])
    assert losses["total_loss"] == pytest.approx(sum(losses.values()) / 2)

    for batches in (2, 4):
        found, logged = step(model, split(batches))
        assert relative(found, joint) < 1e-11
        assert logged == pytest.approx(losses, rel=1e-6)  # some losses are float32


def test_differs_from_the_joint_batch_for_bn():
    model = detector("BN", masks=False)
    joint, _ = step(model, [IMAGES])

    found, _ = step(model, split(2))

    assert relative_norm(found, joint) > 0.1


def test_is_the_mean_over_the_batches_where_losses_are_divided_by_counts_of_the_batch():
    """The mask loss is divided by the number of foreground regions, which differs between these batches."""
    model = detector("GW:groups=16", masks=True)
    joint, _ = step(model, [IMAGES])
    alone = []
    for image in IMAGES:
        model.zero_grad()
        with EventStorage():
            sum(model([image]).values()).backward()
        alone.append(gradients(model))

    model.zero_grad()
    found, _ = step(model, split(4))

    means = {name: sum(part[name] for part in alone) / 4 for name in found}
    assert relative(found, means) < 1e-11
    differing = {
        name
        for name in found
        if relative({name: found[name]}, {name: joint[name]}) > 1e-9
    }
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


@pytest.mark.parametrize(
    "kind", [SimpleTrainer, pytest.param(AMPTrainer, marks=NEEDS_GPU)]
)
def test_one_batch_is_the_step_of_detectron2(kind):
    torch.manual_seed(0)
    device = "cuda" if kind is AMPTrainer else "cpu"
    network = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)
    )
    batches = torch.randn(3, 4, 8, device=device)

    def train(run_step):
        model = Losses(copy.deepcopy(network)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer = kind(model, batches, optimizer)
        with EventStorage() as storage:
            for _ in batches:
                run_step(trainer)
        return losses_of(storage), dict(model.state_dict())

    losses, weights = train(lambda trainer: accumulated_step(trainer, 1))
    expected_losses, expected_weights = train(kind.run_step)

    assert losses == expected_losses and len(losses) == 3
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=0)


class Product(torch.nn.Module):
    """The loss w * x, whose gradient is the batch x; a tensor, as Detectron2 accepts it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, batch: float) -> torch.Tensor:
        return self.weight * batch


def product_after(
    batches: list[float],
    clip: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> float:
    """Return the weight of a Product after SGD with learning rate 1 and two batches a step."""
    model = Product()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if clip:
        cfg = get_cfg()
        cfg.SOLVER.CLIP_GRADIENTS.update(
            ENABLED=True, CLIP_TYPE="norm", CLIP_VALUE=clip
        )
        optimizer = maybe_add_gradient_clipping(cfg, optimizer)
    trainer = SimpleTrainer(model, batches, optimizer)
    if scaler:
        trainer = AMPTrainer(model, batches, optimizer, grad_scaler=scaler)

    with EventStorage():
        for _ in range(len(batches) // 2):
            accumulated_step(trainer, 2)
    return model.weight.item()


def test_the_mean_gradient_is_clipped_not_that_of_a_batch():
    assert product_after([10.0, -9.5]) == product_after([10.0, -9.5], clip=1.0) == -0.25
    assert product_after([10.0, -2.0], clip=1.0) == pytest.approx(-1.0)


def test_the_true_gradient_is_clipped_not_the_scaled_one():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    assert product_after([10.0, -2.0], clip=3.0, scaler=scaler) == pytest.approx(-3.0)


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
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)

    assert product_after(batches, scaler=scaler) == weight
    assert scaler.get_scale() == scale


SCHEDULE = {
    "SOLVER__ACCUMULATE": 2,
    "SOLVER__MAX_ITER": 4,
    "SOLVER__STEPS": "(3,)",
    "SOLVER__CHECKPOINT_PERIOD": 2,
    "DATASETS__TEST": "()",
}


@pytest.mark.usefixtures("small_dataset")
class TestTrainer:
    def trainer(self, folder, **overrides) -> Trainer:
        return Trainer(config_of(arguments(folder, **SCHEDULE | overrides)))

    def test_an_iteration_is_a_step_and_resuming_is_exact(self, tmp_path):
        # hooks are called twice with it
        unclipped = {"SOLVER__CLIP_GRADIENTS__ENABLED": False}
        whole = self.trainer(tmp_path, **unclipped)
        rates = []
        whole.optimizer.register_step_pre_hook(
            lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
        )

        whole.train()

        assert whole.data_loader.batches == 8
        assert rates == pytest.approx([0.005 / 1000, 0.005, 0.005, 0.0005])
        lines = (tmp_path / "metrics.json").read_text().splitlines()
        trained = [
            record for record in map(json.loads, lines) if "total_loss" in record
        ]
        assert [record["iteration"] for record in trained] == [3]

        (tmp_path / "last_checkpoint").write_text("model_0000001.pth")
        resumed = self.trainer(tmp_path, **unclipped)
        resumed.resume_or_load(resume=True)
        assert (resumed.start_iter, resumed.data_loader.batches) == (2, 4)

        resumed.train()
        found, expected = (
            dict(resumed.model.state_dict()),
            dict(whole.model.state_dict()),
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    def test_a_signal_waits_for_the_last_batch(self, tmp_path):
        trainer = self.trainer(tmp_path)
        trainer.model.register_forward_pre_hook(
            lambda *_: signal.raise_signal(signal.SIGTERM)
        )

        with pytest.raises(Interrupted, match="143"):
            trainer.train()

        content = torch.load(tmp_path / "model_0000000.pth", weights_only=True)
        assert content["trainer"]["data"]["batches"] == 2
