"""The checkpointer for scripts without this package's Trainer."""

import logging

import pytest
import torch
from torch import nn

from gw_detectron.checkpoint import GWDetectionCheckpointer, NormMismatchError, PartialLoadError, RefusedFileError
from gw_detectron.modeling import gw_resnet


def detector(depth: int = 18, **options) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"backbone": gw_resnet(depth, freeze_at=0, norm="BN", **options), "head": nn.Linear(2, 2)})


def test_norms_are_recorded_and_training_goes_on(tmp_path, caplog):
    model = detector()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    GWDetectionCheckpointer(model, str(tmp_path), optimizer=optimizer).save("model", iteration=7)
    other = detector()
    restored = torch.optim.SGD(other.parameters(), 0.2)
    checkpointer = GWDetectionCheckpointer(other, str(tmp_path), optimizer=restored)
    with caplog.at_level(logging.INFO, logger="gw_detectron"):
        rest = checkpointer.resume_or_load("", resume=True)
    assert rest["iteration"] == 7 and restored.param_groups[0]["lr"] == 0.1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert "backbone: " in caplog.text
    fresh = torch.optim.SGD(other.parameters(), 0.2)
    GWDetectionCheckpointer(other, optimizer=fresh).resume_or_load(str(tmp_path / "model.pth"), resume=False)
    assert fresh.param_groups[0]["lr"] == 0.2


def test_other_norms_and_missing_layers_are_refused(tmp_path):
    GWDetectionCheckpointer(detector(), str(tmp_path)).save("model")
    path = str(tmp_path / "model.pth")
    other = detector(whiten_norm="GW:groups=32")
    before = other.state_dict()["backbone.stem.conv1.weight"].clone()
    with pytest.raises(NormMismatchError, match="GW:groups=32"):
        GWDetectionCheckpointer(other).load(path)
    assert torch.equal(other.state_dict()["backbone.stem.conv1.weight"], before)
    with pytest.raises(PartialLoadError, match="Missing: backbone.res2.2"):
        GWDetectionCheckpointer(detector(34)).load(path)
    GWDetectionCheckpointer(detector(34), allow_partial=True).load(path)


def test_no_weights_and_unsafe_files(tmp_path):
    assert GWDetectionCheckpointer(detector()).load("") == {}
    torch.save({"model": detector()}, tmp_path / "code.pth")
    with pytest.raises(RefusedFileError, match="checkpoint"):
        GWDetectionCheckpointer(detector()).load(str(tmp_path / "code.pth"))
