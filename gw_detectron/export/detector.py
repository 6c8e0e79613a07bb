"""Export of a whole Faster or Mask R-CNN. Of the formats, only a trace of TorchScript can hold one.

Proposals and detections vary in number with the image, which torch.export and the ONNX exporter refuse.
"""

import copy
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.data import transforms as T
from detectron2.modeling import GeneralizedRCNN
from detectron2.structures import Instances
from torch import Tensor, nn

from ..checkpoint.provenance import sha256_of, tool
from ..data.images import read_image
from ..layers import use_path
from .backbone import versions
from .folder import whole_folder
from .parity import TOLERANCE, compare, worst_relative
from .readme import detector_readme

_FILE = "model.ts"


def export_detector(
    model: nn.Module,
    output: str | os.PathLike[str],
    image: Tensor,
    *,
    sides: tuple[int, int] | None = None,
    source: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Traces a detector with Detectron2's ``TracingAdapter`` and proves the trace right.

    The folder ``output`` appears with ``model.ts``, ``parity.json`` and ``README.md`` once everything has succeeded, or
    not at all. The traced function takes one image of any size; boxes are in its pixels, masks are those of the boxes,
    not pasted into the image.

    Args:
        model: a ``GeneralizedRCNN`` with its weights; it is copied and stays as it is.
        output: the folder to make. It may exist if it is empty or holds an earlier export of a detector.
        image: pixels of 0 to 255 in the channel order of the model, (3, H, W), on which the detector finds something:
            the parts of the model that see no boxes would be missing in the trace.
        sides: to which evaluation resizes images, the shorter side and at most the longer one, to be noted in
            ``parity.json`` and ``README.md``; the file resizes nothing.
        source: where the weights are from, to be noted in ``parity.json``.

    Returns:
        The names of the outputs and their differences from the model for this image, a smaller one and a black one.

    Raises:
        ImportError: the installed Detectron2 has no usable ``TracingAdapter``.
        ParityError: the trace gives other numbers than the model.
        ValueError: the model is of a kind that the installed Detectron2 cannot trace, or finds nothing in the image.
        FileExistsError: ``output`` holds something else.
    """
    adapter_class = _tracing_adapter()
    if not isinstance(model, GeneralizedRCNN):
        raise ValueError(f"only a GeneralizedRCNN can be exported, not a {type(model).__name__}; its backbone can")
    model = copy.deepcopy(model).cpu().eval().requires_grad_(False)
    image = image.detach().cpu().float()
    if not len(_detect(model, image)):
        raise ValueError(
            "the detector finds nothing in the image, so a trace would miss what it does with boxes; give another "
            "image, or a lower MODEL.ROI_HEADS.SCORE_THRESH_TEST"
        )
    with whole_folder(Path(output), (_FILE, "parity.json", "README.md")) as folder:
        path = folder / _FILE
        adapter = adapter_class(model, image, _detect).eval()
        with warnings.catch_warnings():
            # deprecation, and branches that a trace does not record: the images below go through both sides of them
            warnings.simplefilter("ignore")
            traced = _trace(adapter, image, path)
            names = [*adapter.outputs_schema.keys, "image_size"]
            with use_path("reference"):  # the one that is exported: its rounding decides on boxes of equal score
                cases = [_case(names, traced(tried), adapter(tried)) for tried in _images(image)]
        report = {
            "tool": tool(),
            "file": _FILE,
            "format": "torchscript",
            "sha256": sha256_of(path),
            "bytes": path.stat().st_size,
            "source": dict(source or {}),
            "channels": model.input_format,
            "resized_in_evaluation": None if sides is None else {"shorter": sides[0], "longer_at_most": sides[1]},
            "outputs": names,
            "tolerance": TOLERANCE,
            "worst_relative": worst_relative(cases),
            "cases": cases,
            "versions": versions(),
        }
        (folder / "parity.json").write_text(json.dumps(report, indent=2) + "\n")
        (folder / "README.md").write_text(detector_readme(report))
    return report


def read_image_for(cfg: CfgNode, path: str | os.PathLike[str]) -> Tensor:
    """Reads an image as Detectron2 gives it to the model in evaluation.

    Returns:
        Pixels of 0 to 255, (3, H, W), resized by ``INPUT.MIN_SIZE_TEST`` and ``MAX_SIZE_TEST``.

    Raises:
        FileNotFoundError, ValueError: it cannot be read.
    """
    pixels = read_image(path, cfg.INPUT.FORMAT)
    sides = [cfg.INPUT.MIN_SIZE_TEST] * 2
    resize = T.ResizeShortestEdge(sides, cfg.INPUT.MAX_SIZE_TEST).get_transform(pixels)
    return torch.from_numpy(np.ascontiguousarray(resize.apply_image(pixels).transpose(2, 0, 1))).float()


def _tracing_adapter() -> Any:
    try:
        from detectron2.export import TracingAdapter
    except ImportError as error:
        raise ImportError(
            f"this Detectron2 cannot export detectors: {error}. The releases 0.5 and 0.6 import Caffe2 there, which "
            "PyTorch no longer has. Use Detectron2's main branch, or the 0.5 that tools/install_detectron2.py installs"
        ) from error
    return TracingAdapter


def _trace(adapter: nn.Module, image: Tensor, path: Path) -> Any:
    try:
        torch.jit.save(torch.jit.trace(adapter, (image,), check_trace=False), path)
    except RuntimeError as error:  # such as the scaled gradient of cascade heads, up to Detectron2 0.6
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"this Detectron2 cannot trace this detector: {reason}. Its backbone can be exported"
        ) from error
    return torch.jit.load(path)


def _detect(model: GeneralizedRCNN, image: Tensor) -> Instances:
    return model.inference([{"image": image}], do_postprocess=False)[0]


def _images(image: Tensor) -> list[Tensor]:
    """The image, a smaller one of other proportions, and one in which there is nothing."""
    smaller = F.interpolate(image[None], scale_factor=(0.6, 0.8), mode="bilinear", recompute_scale_factor=True)[0]
    return [image, smaller, torch.zeros_like(image)]


def _case(names: Sequence[str], found: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, Any]:
    levels = {name: compare(name, a, b) for name, a, b in zip(names, found, expected, strict=True)}
    height, width = expected[-1].tolist()
    return {"height": height, "width": width, "detections": len(expected[0]), "levels": levels}
