"""A difference between an exported detector and its model stops the export."""

import pytest
import torch
from detectron2.structures import Boxes, Instances
from torch import nn

from gw_detectron.errors import ExportError, ParityError
from gw_detectron.export import DETECTOR_FORMATS, export_detector
from gw_detectron.export.detection import check_detections
from gw_detectron.export.detection.matching import _compare
from gw_detectron.export.detector import detector_program
from gw_detectron.export.exported_file import ExportedFile

from .tiny_networks import build_detector, noise


def shifted_if_large(boxes):
    """Shift by 0.06 pixels what stays the same detection by its IoU."""
    return boxes + 0.06 * ((boxes[..., 2:] - boxes[..., :2]).amin(-1, keepdim=True) > 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda outputs: outputs | {"boxes": shifted_if_large(outputs["boxes"])},
            r"boxes differ .* by 6.0e-02, allowed is 0.05",
        ),
        (lambda outputs: outputs | {"boxes": outputs["boxes"] + 50}, "detections differ .* in number, class or place"),
        (lambda outputs: outputs | {"scores": outputs["scores"] * 1.01}, "scores differ .* allowed is 0.001"),
        (lambda outputs: outputs | {"masks": outputs["masks"] * 0.9}, "masks differ .* allowed is 0.01"),
        (lambda outputs: outputs | {"masks": outputs["masks"] * float("nan")}, "masks differ .* by nan"),
        (lambda outputs: outputs | {"classes": outputs["classes"] + 1}, "detections differ"),
        (lambda outputs: outputs | {"count": outputs["count"] - 1}, "detections differ"),
    ],
)
def test_a_difference_stops_the_export(tmp_path, monkeypatch, change, message):
    def write(program, path):
        path.write_text("wrong")

        def run(*inputs):
            return list(change(dict(zip(program.names, program(*inputs), strict=True))).values())

        return ExportedFile(run, program.describe()), {}

    monkeypatch.setitem(DETECTOR_FORMATS, "pt2", ("model.pt2", write))
    with pytest.raises(ParityError, match=message):
        export_detector(build_detector("mask"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_detections_that_change_places_are_the_same():
    program = detector_program(build_detector("mask"))

    def reversed_rows(*inputs):
        *outputs, count = program(*inputs)
        order = [torch.cat((torch.arange(n).flip(0), torch.arange(n, 12))) for n in count.tolist()]
        return [torch.stack([row[each] for row, each in zip(values, order, strict=True)]) for values in outputs] + [
            count
        ]

    assert (
        check_detections(program, ExportedFile(reversed_rows, program.describe()), noise((140, 160))[0])["unmatched"]
        == 0
    )


@pytest.mark.parametrize("counts", [(1, 2), (2, 1)])
def test_a_detection_has_one_counterpart(counts):
    pair = (
        Instances(
            (9, 9),
            pred_boxes=Boxes(torch.tensor([[0.0, 0.0, 9.0, 9.0]]).expand(count, 4)),
            scores=torch.ones(count),
            pred_classes=torch.zeros(count),
        )
        for count in counts
    )
    assert _compare(*pair)["unmatched"] == 1


def test_weights_that_are_nan_are_not_exported(tmp_path):
    model = build_detector("mask")
    nn.init.constant_(model.backbone.fpn_output3.bias, float("nan"))
    with pytest.raises(
        ExportError, match=r"^model: backbone.fpn_output3.bias holds NaN or infinity. Fix: give the weights"
    ):
        export_detector(model, tmp_path / "out", file_format="torchscript")
    assert list(tmp_path.iterdir()) == []
