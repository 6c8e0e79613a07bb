"""The checkpointer for scripts without this package's Trainer."""

import logging

import pytest
import torch
from torch import nn

from gw_detectron.checkpoint import GWDetectionCheckpointer
from gw_detectron.errors import NormMismatchError, PartialLoadError, RefusedFileError
from gw_detectron.modeling import gw_resnet
from gw_detectron.norms import convert_convs


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


def test_other_norms_are_refused_where_names_fit_by_their_end(tmp_path):
    """Detectron2's heuristics load a bare backbone into a detector."""
    backbone = detector(whiten_norm="GW")["backbone"]
    GWDetectionCheckpointer(backbone, str(tmp_path)).save("model")
    path = f"{tmp_path}/model.pth?matching_heuristics=True"
    with pytest.raises(NormMismatchError, match="backbone.stem.conv1.norm GW.*, GN:groups=64.* here"):
        GWDetectionCheckpointer(detector(whiten_norm="GN:groups=64")).load(path)
    same = detector(whiten_norm="GW")
    GWDetectionCheckpointer(same).load(path)
    assert torch.equal(same["backbone"].stem.conv1.weight, backbone.stem.conv1.weight)


def test_standardized_heads_need_no_counterpart(tmp_path):
    """A box head of Faster R-CNN starts a Mask R-CNN, with Weight Standardization in both."""

    def with_heads(*heads: str, conv: str = "WS") -> nn.Module:
        model = nn.ModuleDict({**detector(), **{head: nn.Sequential(nn.Conv2d(2, 2, 3)) for head in heads}})
        for head in heads:
            convert_convs(model[head], conv)
        return model

    GWDetectionCheckpointer(with_heads("box", "mask"), str(tmp_path)).save("both")
    GWDetectionCheckpointer(with_heads("box"), str(tmp_path)).save("box")
    GWDetectionCheckpointer(with_heads("box")).load(f"{tmp_path}/both.pth")
    GWDetectionCheckpointer(with_heads("box", "mask")).load(f"{tmp_path}/box.pth")
    with pytest.raises(NormMismatchError, match=r"box.0 WS in the checkpoint only"):
        GWDetectionCheckpointer(with_heads("box", conv="")).load(f"{tmp_path}/both.pth")


def test_a_subclass_loads_tensors_by_its_own_method(tmp_path):
    loaded = []

    class Own(GWDetectionCheckpointer):
        def _load_model(self, checkpoint):
            loaded.append(sorted(checkpoint))
            return super()._load_model(checkpoint)

    GWDetectionCheckpointer(detector(), str(tmp_path)).save("model")
    Own(detector()).load(f"{tmp_path}/model.pth")
    assert loaded == [["model", "norms"]]


def test_no_weights_and_unsafe_files(tmp_path):
    assert GWDetectionCheckpointer(detector()).load("") == {}
    torch.save({"model": detector()}, tmp_path / "code.pth")
    with pytest.raises(RefusedFileError, match="checkpoint"):
        GWDetectionCheckpointer(detector()).load(str(tmp_path / "code.pth"))
