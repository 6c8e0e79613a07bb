"""Batch Renormalization in the whole detector: it trains, is saved, loaded and evaluated."""

import pytest
import torch

from gw_detectron.engine import main
from gw_detectron.norms.norm_listing import evaluation_spec

from ..tiny_run import arguments


@pytest.mark.usefixtures("small_dataset")
def test_batch_renormalization_everywhere(tmp_path):
    norm = "BRN:warmup=0,rmax_at=1,dmax_at=1"
    keys = ("RESNETS__NORM", "RESNETS__WHITEN_NORM", "FPN__NORM", "ROI_BOX_HEAD__NORM", "ROI_MASK_HEAD__NORM")
    results = main(arguments(tmp_path, **{f"MODEL__{key}": norm for key in keys}))
    assert {"bbox", "segm"} <= results.keys()
    checkpoint = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert {spec.partition(":")[0] for spec in checkpoint["norms"].values()} == {norm.partition(":")[0]}
    assert all(value.isfinite().all() for value in checkpoint["model"].values())
    weights = {"MODEL__WEIGHTS": tmp_path / "model_final.pth"}
    again = main(arguments(tmp_path / "eval", "--eval-only", **{f"MODEL__{key}": norm for key in keys}, **weights))
    assert again["bbox"].keys() == results["bbox"].keys()
    for task, values in results.items():
        assert again[task] == pytest.approx(values, nan_ok=True)


def test_brn_and_bn_are_the_same_norm_in_evaluation():
    assert evaluation_spec("BRN:momentum=0.01,rmax=3,dmax=5") == evaluation_spec("BN") == evaluation_spec("SyncBN")
