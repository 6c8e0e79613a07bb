"""The diagnosis of a non-finite loss does not wait for other processes."""

import pytest
import torch

from gw_detectron.engine.nonfinite import LossGuard
from gw_detectron.layers import BatchWhitening2d


@pytest.mark.parametrize(
    "norm", [torch.nn.SyncBatchNorm(4), BatchWhitening2d(4, sync=True)], ids=lambda n: type(n).__name__
)
def test_the_diagnosis_waits_for_no_other_process(norm):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm

        def forward(self, batch):
            return {"loss": self.norm.weight.sum()}

    model = Model()
    guard = LossGuard(model)
    model([{"image": torch.zeros(3, 8, 8), "file_name": "a.jpg"}])
    assert norm.training
    assert "a.jpg" in guard.explain()
    assert not norm.training, "in training its statistics would be those of all processes"
