"""Benchmark of whole networks, in training and inference, as multiples of the network with BatchNorm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gw_detectron.errors import ConfigError, check_minimum

from .environment import describe
from .memory import memory_cells
from .networks import MINIMUM_PIXELS, Iteration, Sizes, Variant, backbone, classifier, detector
from .providers import PRECISIONS
from .table import Row, Table
from .timing import time_alternating
from .validation import check_names

_BN = {"BN": Variant("BN")}
_GN = {"GN": Variant("GN")}
_BW = {"BW-S1-B2": Variant("BN", "BW:running=covariance", "S1-B2")}
_GW = {
    f"GW-{positions}": Variant("BN", "GW", positions)
    for positions in ("S1", "S1-B1", "S1-B2", "S1-B3", "S1-B12", "ALL")
}
_RIVALS = {
    "GN+WS": Variant("GN", conv="WS"),
    "GW-S1-B2+WS": _GW["GW-S1-B2"]._replace(conv="WS"),
    "BRN": Variant("BRN"),
}
_OTHERS = _BN | _GN | _BW | {"GW-S1-B2": _GW["GW-S1-B2"]}
_MASK_RCNN = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_4conv1fc_1x_{}.yaml"
_DETECTORS = {norm: Variant(config=_MASK_RCNN.format(norm)) for norm in ("FrozenBN", "GN", "GW")}
_COMPILED = {f"{norm}-compiled": _DETECTORS[norm]._replace(runtime="compiled") for norm in ("FrozenBN", "GW")}
_ONNX = {f"{norm}-ONNX": _DETECTORS[norm]._replace(runtime="onnx") for norm in ("FrozenBN", "GW")}
#: the variants of every model; the others are divided by the first
MODELS: dict[str, dict[str, Variant]] = {
    "R-50": _BN | _GN | _BW | _GW | _RIVALS,
    "R-101": _OTHERS,
    "X-50-32x4d": _OTHERS,
    "X-101-32x8d": _OTHERS,
    "mask_rcnn_R-50": _DETECTORS | _COMPILED,
    "R-50-inference": _BN | _GN | {"GW-S1-B2": _GW["GW-S1-B2"]},
    "R-50-FPN-inference": _DETECTORS | _COMPILED | _ONNX,
}
#: what runs of the others is a training iteration
_INFERENCE: dict[str, Callable[..., Iteration]] = {
    "R-50-inference": partial(classifier, "R-50", training=False),
    "R-50-FPN-inference": backbone,
}
#: milliseconds of the paper, on V100 GPUs; BW is its BW_Sigma. Source: supplement, section 6.2, Tables 2 and 3
PAPER: dict[str, dict[str, int]] = {
    "R-50": dict(zip(["BN", *_BW, *_GW], (419, 550, 437, 518, 514, 634, 589, 796), strict=True)),
    "R-101": {"BN": 672, "BW-S1-B2": 882, "GW-S1-B2": 810},
    "X-50-32x4d": {"BN": 574, "BW-S1-B2": 798, "GW-S1-B2": 738},
    "X-101-32x8d": {"BN": 912, "BW-S1-B2": 1587, "GW-S1-B2": 1180},
}


def all_variants() -> list[str]:
    """Return the names of all variants."""
    return list(dict.fromkeys(name for variants in MODELS.values() for name in variants))


def models_with(wanted: Sequence[str] | None) -> list[str]:
    """Return the models that have one of the variants; None selects all."""
    return [model for model, variants in MODELS.items() if wanted is None or not variants.keys().isdisjoint(wanted)]


@dataclass(frozen=True)
class NetworkSettings:
    """Settings of the network benchmark.

    Args:
        device: where.
        models: names in :data:`MODELS`.
        variants: names of :func:`all_variants`, None for all. The baseline of a model is always measured.
        dtype: a name in :data:`.providers.PRECISIONS`, without ``-pure``.
        sizes: of the batches.
        repeats: rounds of timed iterations.

    Raises:
        ConfigError: a name is unknown, a model has none of the variants or a variant no model, or a number is too
            small.
    """

    device: torch.device
    models: Sequence[str] = tuple(MODELS)
    variants: Sequence[str] | None = None
    dtype: str = "fp32"
    sizes: Sizes = field(default_factory=Sizes)
    repeats: int = 20

    def __post_init__(self) -> None:
        if self.variants is not None:
            check_names("--variants", self.variants, all_variants())
        check_names("--models", self.models, MODELS)
        check_names("--dtype", [self.dtype], [name for name in PRECISIONS if not name.endswith("-pure")])
        offered = "; ".join(f"{model} has {', '.join(MODELS[model])}" for model in self.models)
        for model in self.models:
            if model not in models_with(self.variants):
                wanted = ", ".join(self.variants or ())
                raise ConfigError(f"--models ({model!r}): has none of {wanted}; {offered}. Fix: leave it out.")
        for variant in self.variants or ():
            if not any(variant in MODELS[model] for model in self.models):
                raise ConfigError(f"--variants ({variant!r}): no measured model has it; {offered}. Fix: leave it out.")
        for name, number in {"repeats": self.repeats, **vars(self.sizes)}.items():
            check_minimum(f"--{name.replace('_', '-')}", number, MINIMUM_PIXELS.get(name, 1))
        image_size = self.sizes.image_size
        if self.sizes.batch_size == 1 and image_size == MINIMUM_PIXELS["image_size"]:
            raise ConfigError(
                f"--batch-size (1) with --image-size ({image_size}): the last feature map has one value per channel, "
                f"which BN cannot train with. Fix: give --batch-size 2 or --image-size {image_size + 1}."
            )

    @property
    def header(self) -> dict[str, str]:
        """The settings, beside the keys of the rows, that two runs must share for comparable ratios."""
        return {"device": self.device.type}

    def chosen(self) -> dict[str, dict[str, Variant]]:
        """Return the variants to measure, by model. The first one of each model is its baseline."""
        wanted = all_variants() if self.variants is None else self.variants
        return {
            model: {n: variant for i, (n, variant) in enumerate(MODELS[model].items()) if i == 0 or n in wanted}
            for model in self.models
        }

    def key(self, model: str, name: str, variant: Variant) -> dict[str, Any]:
        """Return the key cells of a row."""
        batch, sides = self.sizes.batch_size, (self.sizes.image_size, self.sizes.image_size)
        if variant.config:
            batch, sides = self.sizes.detector_batch, self.sizes.detector_sides
        image = "x".join(map(str, sides))
        return {"model": model, "variant": name, "dtype": self.dtype, "batch": str(batch), "image": image, "note": ""}

    def build(self, model: str, variant: Variant) -> Iteration:
        """Build the iteration of a variant."""
        torch.manual_seed(0)
        build = _INFERENCE.get(model) or (detector if variant.config else partial(classifier, model))
        return build(variant, self.sizes, PRECISIONS[self.dtype], self.device)


def plan_networks(settings: NetworkSettings) -> Table:
    """Return the table that :func:`run_networks` will measure, with 1 for every ratio."""
    chosen = settings.chosen().items()
    keys = [settings.key(model, *named) for model, variants in chosen for named in variants.items()]
    saved = [{} if key["model"] in _INFERENCE else {"saved_to_bn": 1.0} for key in keys]
    return Table(
        "model", settings.header, [key | {"to_bn": 1.0} | ratio for key, ratio in zip(keys, saved, strict=True)]
    )


def run_networks(settings: NetworkSettings, command: str = "") -> Table:
    """Measure iterations of each model's variants side by side.

    Args:
        settings: what is measured.
        command: the command line, for the header.

    Returns:
        A table of the kind ``model``. ``to_bn`` is the median time divided by the time of the model's first variant,
        which has BN (a detector: FrozenBN) everywhere, in the same rounds. ``paper_to_bn`` is the paper's ratio.
    """
    rows: list[Row] = []
    for number, (model, variants) in enumerate(settings.chosen().items(), start=1):
        built = {name: settings.build(model, variant) for name, variant in variants.items()}
        steps = {name: iteration.step for name, iteration in built.items()}
        label = f"{number}/{len(settings.models)} {settings.dtype} {model}"
        times = time_alternating(steps, settings.repeats, settings.device, label)
        memory = {
            name: {} if it.forward is None else memory_cells(it.forward, it.step, it.model, settings.device)
            for name, it in built.items()
        }
        first, paper = next(iter(built)), PAPER.get(model, {})
        for name, variant in variants.items():
            ratios = {
                "to_bn": times[name]["median_ms"] / times[first]["median_ms"],
                "paper_to_bn": paper[name] / paper["BN"] if name in paper else None,
            }
            if memory[name]:
                ratios["saved_to_bn"] = memory[name]["saved_mib"] / memory[first]["saved_mib"]
            rows.append(settings.key(model, name, variant) | times[name] | memory[name] | ratios)
    return Table("model", describe(settings.device, [settings.dtype], command) | settings.header, rows)
