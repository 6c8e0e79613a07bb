"""Benchmark of whole networks in training and inference, and of trained detectors."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from examples.shapes import draw_images
from gw_detectron.errors import ConfigError
from gw_detectron.workbench.images import read_image
from gw_detectron.workbench.predict import open_predictor

from .memory import memory_cells
from .networks import EXECUTIONS, Iteration, Sizes, Variant, classifier, detector
from .providers import PRECISIONS
from .table import Row
from .timing import Step, time_alternating

_BN = {"BN": Variant("BN")}
_GN = {"GN": Variant("GN")}
_BW = {"BW-S1-B2": Variant("BN", "BW:running=covariance", "S1-B2")}
_GW = {
    f"GW-{positions}": Variant("BN", "GW", positions)
    for positions in ("S1", "S1-B1", "S1-B2", "S1-B3", "S1-B12", "ALL")
}
#: two Newton steps take 2 products of matrices, five take 10
_TWO_STEPS = {"GW2-ALL": Variant("BN", "GW:iters=2", "ALL")}
_BASELINES = {
    "GN+WS": Variant("GN", conv="WS"),
    "GW-S1-B2+WS": _GW["GW-S1-B2"]._replace(conv="WS"),
}
#: norms with fixed statistics; the shares of the image's do not change the cost, but alpha=0 needs no iteration
_MIXED = {
    "FrozenBN": Variant("FrozenBN"),
    "MixGW-S1-B2": Variant("FrozenBN", "MixGW", "S1-B2"),
    "MixGW-mean-S1-B2": Variant("FrozenBN", "MixGW:alpha=0,mean=0.3", "S1-B2"),
    "MixBN-S1-B2": Variant("FrozenBN", "MixBN", "S1-B2"),
}
_OTHERS = _BN | _GN | _BW | {"GW-S1-B2": _GW["GW-S1-B2"]}
_LAUNCHED = _BN | _GN | {name: _GW[name] for name in ("GW-S1-B2", "GW-ALL")}
_MASK_RCNN = {
    norm: Variant(
        config=f"COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_4conv1fc_1x_{norm}.yaml"
    )
    for norm in ("FrozenBN", "GN", "GW")
}
#: the variants of every model; the others are divided by the first. Each row is a training iteration, or inference
MODELS: dict[str, dict[str, Variant]] = {
    "R-50": _BN | _GN | _BW | _GW | _TWO_STEPS | _BASELINES | _MIXED,
    "R-101": _OTHERS,
    "X-50-32x4d": _OTHERS,
    "X-101-32x8d": _OTHERS,
    "mask_rcnn_R-50": _MASK_RCNN,
    "R-50-inference": _BN | _GN | {"GW-S1-B2": _GW["GW-S1-B2"]},
    "R-50-compiled": _LAUNCHED,
    "R-50-graph": _LAUNCHED,
    "mask_rcnn_R-50-graph": _MASK_RCNN,
}
#: measured if they are named: compilation takes minutes, and CUDA graphs need a GPU
OPTIONAL_MODELS = ("R-50-compiled", "R-50-graph", "mask_rcnn_R-50-graph")
#: milliseconds of the paper, on V100 GPUs; BW is its BW_Sigma. Source: supplement, section 6.2, Tables 2 and 3
PAPER: dict[str, dict[str, int]] = {
    "R-50": dict(
        zip(["BN", *_BW, *_GW], (419, 550, 437, 518, 514, 634, 589, 796), strict=True)
    ),
    "R-101": {"BN": 672, "BW-S1-B2": 882, "GW-S1-B2": 810},
    "X-50-32x4d": {"BN": 574, "BW-S1-B2": 798, "GW-S1-B2": 738},
    "X-101-32x8d": {"BN": 912, "BW-S1-B2": 1587, "GW-S1-B2": 1180},
}


def measure_networks(
    models: Sequence[str],
    variants: Sequence[str] | None,
    dtype: str,
    sizes: Sizes,
    repeats: int,
    device: torch.device,
) -> Iterator[Row]:
    """Measure iterations of each model's variants side by side.

    Args:
        models: names in :data:`MODELS`.
        variants: names of their variants, None for all. The first one of a model is always measured.
        dtype: a name in :data:`.providers.PRECISIONS`.
        sizes: of the batches.
        repeats: rounds of timed iterations.
        device: where.

    Yields:
        A row for each variant. ``to_bn`` is the median time divided by the time of the model's first variant, which has
        BN (a detector: FrozenBN) everywhere, in the same rounds. ``paper_to_bn`` is the paper's ratio.
    """
    for model in models:
        first = next(iter(MODELS[model]))
        chosen = {
            name: variant
            for name, variant in MODELS[model].items()
            if variants is None or name in (first, *variants)
        }
        built = {
            name: _build(model, variant, dtype, sizes, device)
            for name, variant in chosen.items()
        }
        times = time_alternating(
            {name: each.step for name, each in built.items()}, repeats, device, model
        )
        paper, saved = PAPER.get(model, {}), {}
        for name, iteration in built.items():
            batch, sides = sizes.batch_size, (sizes.image_size, sizes.image_size)
            if chosen[name].config:
                batch, sides = sizes.detector_batch, sizes.detector_sides
            row: dict[str, Any] = {"model": model, "variant": name, "dtype": dtype}
            row |= {"batch": str(batch), "image": "x".join(map(str, sides))} | times[
                name
            ]
            row["to_bn"] = times[name]["median_ms"] / times[first]["median_ms"]
            if name in paper:
                row["paper_to_bn"] = paper[name] / paper["BN"]
            if iteration.forward:
                row |= memory_cells(
                    iteration.forward, iteration.step, iteration.model, device
                )
                saved[name] = row["saved_mib"]
                row["saved_to_bn"] = saved[name] / saved[first]
            yield row


def _build(
    model: str, variant: Variant, dtype: str, sizes: Sizes, device: torch.device
) -> Iteration:
    architecture, _, execution = model.rpartition("-")
    if execution not in EXECUTIONS:
        architecture, execution = model, ""
    if execution == "graph" and device.type != "cuda":
        raise ConfigError(
            f"--models ('{model}'): a CUDA graph needs a GPU. Fix: name others."
        )
    torch.manual_seed(0)
    precision = PRECISIONS[dtype]
    if variant.config:
        return detector(variant, sizes, precision, device, execution)
    return classifier(architecture, variant, sizes, precision, device, execution)


def measure_detectors(
    models: Sequence[str], image: str, repeats: int, device: torch.device
) -> Iterator[Row]:
    """Time what a user waits for: resizing, the network, masks pasted into the image.

    Args:
        models: run folders and checkpoints. Times are also divided by that of the first one.
        image: file of the image; "" for a drawn scene.
        repeats: rounds of timed predictions.
        device: where they run.
    """
    pixels = read_image(image, "RGB") if image else np.array(draw_images(1)[0])
    steps = {
        model: Step(partial(open_predictor(model, device=str(device)), pixels))
        for model in models
    }
    # the results are there
    times = time_alternating(steps, repeats, torch.device("cpu"), "predictions")
    for model, cells in times.items():
        ratio = cells["median_ms"] / times[models[0]]["median_ms"]
        yield {
            "detector": model,
            "image": "x".join(map(str, pixels.shape[:2])),
            **cells,
            "to_first": ratio,
        }
