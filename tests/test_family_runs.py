"""Every member of the whitening family trains a small detector, and a checkpoint restores it."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from gw_detectron.layers import BatchWhitening2d
from gw_detectron.norms import norm_spec, resolve_norm
from gw_detectron.norms.listing import norm_rows
from gw_detectron.weights import load_checkpoint, open_checkpoint
from gw_detectron.workbench.run import Trainer

from .tiny_run import OPTS, ROOT, arguments, config_of, key_words

CONFIG = (
    ROOT / "configs" / "quick_schedules" / "faster_rcnn_R_18_FPN_family_synthetic.yaml"
)
DOCUMENT = (ROOT / "docs" / "whitening.md").read_text()
#: the document's table of members: member -> norm name
MEMBERS = dict(
    re.findall(r"^\| (\w+) \| `([^`]+)` \| [^|]+ \|$", DOCUMENT, re.MULTILINE)
)
#: the one outside the long tail; runs with Group Whitening are in other tests
FAST = "BW_Sigma"
SMALL = {key: value for key, value in OPTS.items() if not key.startswith("SOLVER.")}
SMALL |= {
    "SOLVER.IMS_PER_BATCH": 4,
    "SOLVER.MAX_ITER": 25,
    "SOLVER.STEPS": "(20,)",
    "SOLVER.WARMUP_ITERS": 5,
    "DATASETS.TEST": "()",
}

pytestmark = pytest.mark.usefixtures("small_dataset", "one_thread")


def trainer_for(norm: str, output: Path) -> Trainer:
    places = ("MODEL.RESNETS.WHITEN_NORM", "MODEL.FPN.NORM", "MODEL.ROI_BOX_HEAD.NORM")
    opts = {**SMALL, **dict.fromkeys(places, norm), "OUTPUT_DIR": output}
    args = arguments(output)
    args.config_file = str(CONFIG)
    args.opts = key_words(opts)
    return Trainer(config_of(args))


def test_the_documentation_lists_sixteen_different_members():
    specs = {norm_spec(resolve_norm(norm)(64)) for norm in MEMBERS.values()}
    assert len(MEMBERS) == len(specs) == 16


@pytest.mark.parametrize(
    "member",
    [
        pytest.param(name, marks=() if name == FAST else pytest.mark.slow)
        for name in MEMBERS
    ],
)
def test_it_trains_evaluates_and_comes_back(member, tmp_path):
    trainer = trainer_for(MEMBERS[member], tmp_path)
    specs = [row.spec for row in norm_rows(trainer.model)]
    spec = norm_spec(resolve_norm(MEMBERS[member])(64))
    assert specs.count(spec) == 9 + 8 + 1  # backbone, FPN, box head

    trainer.train()

    history = trainer.storage.history("total_loss")
    losses = [value for value, _ in history.values()]
    assert np.isfinite(losses).all()
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    model = trainer.model.eval()
    for module in model.modules():
        if isinstance(module, BatchWhitening2d):
            assert module.running_mean.any(), "no running average"

    again = Trainer.build_model(trainer.cfg).eval()
    report = load_checkpoint(again, open_checkpoint(str(tmp_path / "model_final.pth")))
    assert not report.missing and not report.new
    assert norm_rows(again) == norm_rows(model)
    check_same_features(model, again)


@torch.no_grad()
def check_same_features(model: torch.nn.Module, again: torch.nn.Module) -> None:
    images = torch.randn(3, 3, 64, 64)
    features = model.backbone(images)
    single = model.backbone(images[:1])
    for level, expected in again.backbone(images).items():
        assert torch.equal(features[level], expected)
        # evaluation depends on the running averages, not on the other images
        largest = expected.abs().max().item()
        torch.testing.assert_close(
            single[level], expected[:1], rtol=0, atol=1e-3 * largest
        )
