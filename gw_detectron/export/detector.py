"""Export a whole Faster or Mask R-CNN as a TorchScript trace.

The numbers of proposals and detections depend on the image, which torch.export and the ONNX exporter refuse.
"""

import copy
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.modeling import GeneralizedRCNN
from detectron2.structures import Instances
from torch import Tensor, nn

from ..data.images import evaluation_input, read_image
from ..errors import MissingPackageError
from ..layers import use_backend
from .atomic_folder import atomic_folder
from .feature_extractor import Normalization
from .formats import save_trace
from .parity import ExportError, compare
from .report import REPORT_FILES, write_report

_FILE = "model.ts"


def export_detector(
    model: nn.Module,
    output: str | os.PathLike[str],
    image: Tensor,
    *,
    sides: tuple[int, int] | None = None,
    source: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Trace a detector with Detectron2's ``TracingAdapter`` and check its numbers.

    The folder ``output`` gets ``model.ts``, ``parity.json`` and ``README.md``, all or none. The trace takes one image
    of any size. Boxes are in its pixels; masks are those of the boxes and are not pasted into the image.

    Args:
        model: a ``GeneralizedRCNN`` with its weights; it is copied and not changed.
        output: the folder to create. It may exist if it is empty or holds an earlier export of a detector.
        image: pixels of 0 to 255 in the model's channel order, (3, H, W). The detector must find something in it;
            otherwise the trace would lack the layers that run on boxes.
        sides: shorter and longest side to which evaluation resizes images, for ``parity.json`` and ``README.md``. The
            exported file does not resize.
        source: origin of the weights, copied to ``parity.json``.

    Returns:
        Names of the outputs and differences from the model for this image, a smaller one and a black one.

    Raises:
        MissingPackageError: the installed Detectron2 has no usable ``TracingAdapter``.
        ParityError: the trace gives other numbers than the model.
        ExportError: the installed Detectron2 cannot trace this model, or the model finds nothing in the image.
        OutputFolderError: ``output`` holds other files.
    """
    try:
        from detectron2.export import TracingAdapter
    except ImportError as error:
        raise MissingPackageError(
            f"detectron2.export: cannot be imported: {error}. Releases 0.5 and 0.6 import Caffe2, which PyTorch no "
            "longer has. Fix: use Detectron2's main branch, or the 0.5 that tools/install_detectron2.py installs."
        ) from error
    if not isinstance(model, GeneralizedRCNN):
        raise ExportError(
            f"model ('{type(model).__name__}'): only a GeneralizedRCNN can be exported as a whole. "
            "Fix: export its backbone with tools/export_backbone.py."
        )
    model = copy.deepcopy(model).cpu().eval().requires_grad_(False)
    image = image.detach().cpu().float()
    if not len(_detect(model, image)):
        raise ExportError(
            "image: the detector finds nothing in it, so the trace would lack the layers that run on boxes. "
            "Fix: give another image or a lower MODEL.ROI_HEADS.SCORE_THRESH_TEST."
        )
    with atomic_folder(output, (_FILE, *REPORT_FILES)) as folder:
        path = folder / _FILE
        adapter = TracingAdapter(model, image, _detect).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecation, and branches of a trace; the parity check takes both sides
            traced = _trace(adapter, image, path)
            names = [*adapter.outputs_schema.keys, "image_size"]
            with use_backend("reference"):  # the exported backend; another one rounds boxes of equal score differently
                cases = [_case(names, traced(tried), adapter(tried)) for tried in _images(image)]
        entries = {
            "input": _normalization(model).describe("image", [3, "H", "W"]),
            "resized_in_evaluation": None if sides is None else {"shorter": sides[0], "longer_at_most": sides[1]},
            "outputs": names,
        }
        return write_report(path, "torchscript", "detector", entries, cases, source)


def read_image_for(cfg: CfgNode, path: str | os.PathLike[str]) -> Tensor:
    """Read an image as Detectron2 gives it to the model in evaluation.

    Returns:
        Pixels of 0 to 255, (3, H, W), resized by ``INPUT.MIN_SIZE_TEST`` and ``MAX_SIZE_TEST``.

    Raises:
        MissingFileError, DataError: the image cannot be read.
    """
    return evaluation_input(read_image(path, cfg.INPUT.FORMAT), cfg)


def _normalization(model: Any) -> Normalization:
    mean, std = (tuple(values.flatten().tolist()) for values in (model.pixel_mean, model.pixel_std))
    return Normalization(model.input_format, mean, std, inside=True)


def _trace(adapter: nn.Module, image: Tensor, path: Path) -> Any:
    try:
        save_trace(torch.jit.trace(adapter, (image,), check_trace=False), path)
    except RuntimeError as error:  # such as the scaled gradient of cascade heads, up to Detectron2 0.6
        reason = str(error).strip().partition("\n")[0]
        raise ExportError(
            f"model: the installed Detectron2 cannot trace this detector: {reason}. "
            "Fix: export its backbone with tools/export_backbone.py."
        ) from error
    return torch.jit.load(path)


def _detect(model: GeneralizedRCNN, image: Tensor) -> Instances:
    return model.inference([{"image": image}], do_postprocess=False)[0]


def _images(image: Tensor) -> list[Tensor]:
    """Return the image, a smaller distorted one, and a black one."""
    smaller = F.interpolate(image[None], scale_factor=(0.6, 0.8), mode="bilinear", recompute_scale_factor=True)[0]
    return [image, smaller, torch.zeros_like(image)]


def _case(names: Sequence[str], found: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, Any]:
    levels = {name: compare(name, a, b) for name, a, b in zip(names, found, expected, strict=True)}
    height, width = expected[-1].tolist()
    return {"height": height, "width": width, "detections": len(expected[0]), "levels": levels}
