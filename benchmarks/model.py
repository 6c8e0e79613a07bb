"""Training iterations of whole networks: what whitening costs beside batch normalisation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from gw_detectron.modeling import resolve_norm

from .layer_settings import check_names
from .machine import describe
from .memory import MIB, peak_bytes, saved_bytes
from .networks import LEAST_PIXELS, Iteration, Sizes, classifier, detector
from .providers import PRECISIONS
from .table import Row, Table, time_cells
from .timing import alternate, runs


class Variant(NamedTuple):
    """Norm names of a classifier: everywhere, and at the positions; or the name of a detector's config."""

    norm: str = ""
    whiten_norm: str = ""
    positions: str = ""
    config: str = ""


_BN = {"BN": Variant("BN")}
_GN = {"GN": Variant("GN")}
_BW = {"BW-S1-B2": Variant("BN", "BW:running=covariance", "S1-B2")}
_GW = {
    f"GW-{positions}": Variant("BN", "GW", positions)
    for positions in ("S1", "S1-B1", "S1-B2", "S1-B3", "S1-B12", "ALL")
}
_OTHERS = _BN | _GN | _BW | {"GW-S1-B2": _GW["GW-S1-B2"]}
_MASK_RCNN = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_4conv1fc_1x_{}.yaml"
#: the variants of every model; the others are divided by the first
MODELS: dict[str, dict[str, Variant]] = {
    "R-50": _BN | _GN | _BW | _GW,
    "R-101": _OTHERS,
    "X-50-32x4d": _OTHERS,
    "X-101-32x8d": _OTHERS,
    "mask_rcnn_R-50": {norm: Variant(config=_MASK_RCNN.format(norm)) for norm in ("FrozenBN", "GN", "GW")},
}
#: milliseconds of the paper, on V100 GPUs; BW is its BW_Sigma. Source: supplement, section 6.2, Tables 2 and 3
PAPER: dict[str, dict[str, int]] = {
    "R-50": dict(zip(["BN", *_BW, *_GW], (419, 550, 437, 518, 514, 634, 589, 796), strict=True)),
    "R-101": {"BN": 672, "BW-S1-B2": 882, "GW-S1-B2": 810},
    "X-50-32x4d": {"BN": 574, "BW-S1-B2": 798, "GW-S1-B2": 738},
    "X-101-32x8d": {"BN": 912, "BW-S1-B2": 1587, "GW-S1-B2": 1180},
}


def variants() -> list[str]:
    """The names of all variants."""
    return list(dict.fromkeys(name for of_model in MODELS.values() for name in of_model))


def models_with(wanted: Sequence[str] | None) -> list[str]:
    """The names of the models that have one of the variants; None stands for all variants."""
    return [model for model, of_model in MODELS.items() if wanted is None or not of_model.keys().isdisjoint(wanted)]


@dataclass(frozen=True)
class ModelSettings:
    """What is measured.

    Args:
        device: where.
        models: names in :data:`MODELS`.
        variants: names of :func:`variants`, None for all; what a model is divided by is always measured.
        precision: a name in :data:`.providers.PRECISIONS`, without ``-pure``.
        sizes: of the batches.
        repeats: rounds of timed iterations.

    Raises:
        ValueError: a name is unknown, a model and the variants do not belong together, or a number is too small.
    """

    device: torch.device
    models: Sequence[str] = tuple(MODELS)
    variants: Sequence[str] | None = None
    precision: str = "fp32"
    sizes: Sizes = field(default_factory=Sizes)
    repeats: int = 20

    def __post_init__(self) -> None:
        if self.variants is not None:
            check_names("variant", self.variants, variants())
        check_names("model", self.models, MODELS)
        self._check_pairs()
        check_names("dtype", [self.precision], [name for name in PRECISIONS if not name.endswith("-pure")])
        for name, number in {"repeats": self.repeats, **vars(self.sizes)}.items():
            least = LEAST_PIXELS.get(name, 1)
            if number < least:
                raise ValueError(f"{name} {number}: give at least {least}")
        if self.sizes.batch == 1 and self.sizes.image == LEAST_PIXELS["image"]:
            raise ValueError(
                f"batch 1 with image {self.sizes.image}: the last map is a single value, which BN cannot be trained "
                f"with; give at least batch 2 or image {self.sizes.image + 1}"
            )

    def _check_pairs(self) -> None:
        """Every model needs a variant, and every variant a model; else less is measured than is asked for."""
        if self.variants is None:
            return
        offered = "; ".join(f"{model} has {', '.join(MODELS[model])}" for model in self.models)
        for model in self.models:
            if model not in models_with(self.variants):
                wanted = ", ".join(self.variants)
                raise ValueError(f"model {model} has none of the variants {wanted}: leave it out or add one; {offered}")
        for variant in self.variants:
            if not any(variant in MODELS[model] for model in self.models):
                raise ValueError(f"variant {variant} is one of no model that is measured: {offered}")

    @property
    def header(self) -> dict[str, str]:
        """What two runs must have in common, beside the keys of the rows, for their ratios to be comparable."""
        return {"device": self.device.type}


def benchmark_model(settings: ModelSettings, command: str = "") -> Table:
    """Measures training iterations of each model's variants side by side.

    A variant whose norm this version does not know has the reason in its row instead of numbers.

    Args:
        settings: what is measured.
        command: the command line, for the header.

    Returns:
        A table of the kind ``model``. ``to_bn`` is the median time divided by that of the model's first variant, which
        has BN (a detector: frozen BN) everywhere, in the same rounds; ``paper_to_bn`` is the paper's ratio.
    """
    chosen = _chosen(settings)
    rows: list[Row] = []
    with tqdm(total=runs(settings.repeats) * sum(map(len, chosen.values())), unit="iteration", mininterval=0.5) as bar:
        for model, of_model in chosen.items():
            bar.set_description(f"{settings.precision} {model}")
            rows += _measured(model, of_model, settings, bar)
    return Table("model", describe(settings.device, [settings.precision], command) | settings.header, rows)


def planned_model(settings: ModelSettings) -> Table:
    """What :func:`benchmark_model` is going to measure: its rows, with 1 for every ratio."""
    rows: list[Row] = []
    for model, of_model in _chosen(settings).items():
        for name, variant in of_model.items():
            ratios = {} if _unknown_norm(variant) else {"to_bn": 1.0, "saved_to_bn": 1.0}
            rows.append(_key(model, name, variant, settings) | ratios)
    return Table("model", settings.header, rows)


def _chosen(settings: ModelSettings) -> dict[str, dict[str, Variant]]:
    wanted = variants() if settings.variants is None else settings.variants
    return {
        model: {
            name: variant
            for index, (name, variant) in enumerate(MODELS[model].items())
            if index == 0 or name in wanted  # the others are divided by the first
        }
        for model in settings.models
    }


def _key(model: str, name: str, variant: Variant, settings: ModelSettings) -> dict[str, Any]:
    batch, image = _batch_and_image(variant, settings.sizes)
    return {"model": model, "variant": name, "dtype": settings.precision, "batch": batch, "image": image}


def _measured(model: str, of_model: dict[str, Variant], settings: ModelSettings, bar: tqdm) -> list[Row]:
    reasons = {name: reason for name, variant in of_model.items() if (reason := _unknown_norm(variant))}
    built = {name: _build(model, variant, settings) for name, variant in of_model.items() if name not in reasons}
    times = alternate({name: it.step for name, it in built.items()}, settings.repeats, settings.device, bar.update)
    bar.update(runs(settings.repeats) * len(reasons))
    saved = {name: saved_bytes(it.forward, it.model) for name, it in built.items()}
    peaks = {name: peak_bytes(it.step.run, settings.device) for name, it in built.items()}
    base, paper = next(iter(built)), PAPER.get(model, {})
    rows: list[Row] = []
    for name in of_model:
        row = _key(model, name, of_model[name], settings) | {"note": reasons.get(name, "")}
        row["paper_to_bn"] = paper[name] / paper["BN"] if name in paper else None
        if name in built:
            peak = peaks[name]
            row |= time_cells(times[name], settings.repeats)
            row |= {"to_bn": times[name].median / times[base].median, "saved_mib": saved[name] / MIB}
            row |= {"saved_to_bn": saved[name] / saved[base], "peak_mib": None if peak is None else peak / MIB}
        rows.append(row)
    return rows


def _unknown_norm(variant: Variant) -> str:
    """Why this version cannot build a variant, or nothing."""
    try:
        resolve_norm(variant.whiten_norm)
    except ValueError as error:
        return str(error)
    return ""


def _build(model: str, variant: Variant, settings: ModelSettings) -> Iteration:
    precision, device = PRECISIONS[settings.precision], settings.device
    torch.manual_seed(0)
    if variant.config:
        return detector(variant.config, settings.sizes, precision, device)
    return classifier(model, variant.norm, variant.whiten_norm, variant.positions, settings.sizes, precision, device)


def _batch_and_image(variant: Variant, sizes: Sizes) -> tuple[str, str]:
    if variant.config:
        return str(sizes.detector_batch), "x".join(map(str, sizes.detector_sides))
    return str(sizes.batch), f"{sizes.image}x{sizes.image}"
