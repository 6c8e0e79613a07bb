"""Programs of whitening layers that coremltools can convert; running them needs a Mac."""

import pytest
import torch

from gw_detectron.layers import use_backend
from gw_detectron.norms import resolve_norm
from gw_detectron.weights.network_record import TORCHVISION
from gw_detectron.workbench.export import FeatureExtractor

from .tiny_networks import tiny_backbone


@pytest.mark.parametrize(
    "norm",
    [
        "GW:groups=4",
        "GW:groups=4,corr=true",
        "GW:groups=4,solver=standardize",
        "MixGW:groups=4",
        "FrozenBW:channels=4",
    ],
)
def test_a_program_has_no_diagonals_of_a_batch(norm):
    layer = resolve_norm(norm)(8).eval()

    with torch.no_grad(), use_backend("reference"):
        program = torch.export.export(layer, (torch.randn(2, 8, 6, 6),))

    operators = {str(node.target) for node in program.graph.nodes}
    assert not any("diagonal" in operator for operator in operators)


def test_coremltools_converts_a_backbone():
    """Tried with coremltools 9.0 on Linux."""
    coremltools = pytest.importorskip(
        "coremltools", reason="coremltools is not installed"
    )
    extractor = FeatureExtractor(tiny_backbone(num_stages=2), TORCHVISION)
    images = extractor.sample(1, 0, 0)

    with torch.no_grad(), use_backend("reference"):
        program = torch.export.export(extractor, (images,))
    converted = coremltools.convert(program.run_decompositions())

    outputs = converted.get_spec().description.output
    assert len(outputs) == len(extractor.names)
