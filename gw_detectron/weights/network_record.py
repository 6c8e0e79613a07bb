"""What a weight file records about its network: norms, preprocessing and provenance.

A record of norms is one dict, ``{layer name: norm name}``, in checkpoints and converted weights
alike.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from detectron2.config import CfgNode
from torch import nn

from ..errors import WeightsError
from ..norms import conv_names, norm_rows
from .reading import FileContent

#: keys of a :class:`NetworkRecord` in a file
NORMS_KEY, PREPROCESSING_KEY, PROVENANCE_KEY = "norms", "preprocessing", "provenance"


@dataclass(frozen=True)
class Preprocessing:
    """Image preprocessing that weights need, as Detectron2's config names it."""

    input_format: str  # RGB or BGR, also the order of the channels below
    pixel_mean: tuple[float, ...]  # subtracted from values of 0 to 255
    pixel_std: tuple[float, ...]  # then divided by
    #: the first 1x1 convolution of a stage has the stride, not the 3x3
    stride_in_1x1: bool

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "Preprocessing":
        """Read the keys of a config that say how images become a detector's input."""
        return cls(
            cfg.INPUT.FORMAT,
            tuple(map(float, cfg.MODEL.PIXEL_MEAN)),
            tuple(map(float, cfg.MODEL.PIXEL_STD)),
            cfg.MODEL.RESNETS.STRIDE_IN_1X1,
        )


# The authors, torchvision and timm: the released loader divides by 255, then normalizes.
TORCHVISION = Preprocessing(
    "RGB", (123.675, 116.28, 103.53), (58.395, 57.12, 57.375), False
)
_BGR_MEAN = (103.53, 116.28, 123.675)
#: pattern of the addresses of detectors in Detectron2's model zoo
ZOO_DETECTOR = r"(^detectron2:/|/detectron2)/(COCO|LVIS|Cityscapes|PascalVOC)[^/]*/"
#: preprocessing of ImageNet weights by their origin
PREPROCESSING = {
    "torchvision": TORCHVISION,
    "detectron2-msra": Preprocessing("BGR", _BGR_MEAN, (1.0, 1.0, 1.0), True),
    "detectron2-fair": Preprocessing("BGR", _BGR_MEAN, (1.0, 1.0, 1.0), False),
    # FAIR's ResNeXts under detectron2://; the copies under catalog:// have a deviation of 1
    "detectron2-fair-resnext": Preprocessing(
        "BGR", _BGR_MEAN, (57.375, 57.12, 58.395), False
    ),
}


def preprocessing_errors(
    cfg: CfgNode, expected: Preprocessing | None, what: str
) -> list[str]:
    """Return an error if a config has other preprocessing than weights need; None is unknown.

    The error begins with ``what`` and says how to set the keys.
    """
    if expected is None:
        return []

    changes = []
    if expected.input_format != cfg.INPUT.FORMAT:
        changes.append(f"INPUT.FORMAT {expected.input_format}")
    for key, wanted in (
        ("PIXEL_MEAN", expected.pixel_mean),
        ("PIXEL_STD", expected.pixel_std),
    ):
        # another number of values is a fault of its own; 57.38 and 57.375 are one value, 0.25 and 0.229 are two
        pairs = zip(cfg.MODEL[key], wanted, strict=False)
        if not all(math.isclose(*pair, rel_tol=1e-3) for pair in pairs):
            changes.append(f'MODEL.{key} "{list(wanted)}"')
    # the blocks of shallower ones have no 1x1 convolutions
    is_bottleneck = cfg.MODEL.RESNETS.DEPTH >= 50
    if is_bottleneck and expected.stride_in_1x1 != cfg.MODEL.RESNETS.STRIDE_IN_1X1:
        changes.append(f"MODEL.RESNETS.STRIDE_IN_1X1 {expected.stride_in_1x1}")
    if not changes:
        return []
    return [
        f"{what}: these weights expect different preprocessing (channel order, mean, std or stride). Fix: set "
        f"{', '.join(changes)}."
    ]


@dataclass(frozen=True)
class Provenance:
    """Origin of converted weights: this package's version, name and SHA-256 of the source."""

    tool: str
    source: str
    source_sha256: str


@dataclass(frozen=True)
class NetworkRecord:
    """What a weight file records about its network; it is written by ``asdict``.

    ``norms`` has norm names by layer, and ``"WS"`` for standardized convolutions.
    """

    norms: Mapping[str, str] | None = None
    preprocessing: Preprocessing | None = None
    provenance: Provenance | None = None


def norm_record(model: nn.Module) -> dict[str, str]:
    """Return the norms of a model as files record them.

    These are ``{layer: norm name}`` and ``{convolution: "WS"}``.
    """
    return {row.layer: row.spec for row in norm_rows(model)} | conv_names(model)


def read_network_record(content: FileContent) -> NetworkRecord:
    """Read what a weight file records about its network."""
    values = content.value if isinstance(content.value, Mapping) else {}
    try:
        record = {
            key: read(values[key])
            for key, read in _READERS.items()
            if values.get(key) is not None
        }
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise WeightsError(
            f"record of the file: damaged ({error}). Fix: write the file again."
        ) from None
    if values.get("__author__") == "torchvision":  # by Detectron2's tool
        record.setdefault(PREPROCESSING_KEY, TORCHVISION)
    return NetworkRecord(**record)


def _read_preprocessing(values: Any) -> Preprocessing:
    if values["input_format"] not in ("RGB", "BGR"):
        raise ValueError("input_format is neither RGB nor BGR")
    return Preprocessing(
        values["input_format"],
        tuple(map(float, values["pixel_mean"])),
        tuple(map(float, values["pixel_std"])),
        bool(values["stride_in_1x1"]),
    )


def _read_texts(values: Any) -> dict[str, str]:
    values = dict(values)
    for text in (*values, *values.values()):
        if not isinstance(text, str):
            raise TypeError(f"a {type(text).__name__} instead of text")
    return values


def _read_norms(values: Any) -> dict[str, str]:
    """Read norms by layer, without what torch.compile adds to names; names of tensors are read alike."""
    norms = _read_texts(values)
    return {name.replace("_orig_mod.", ""): spec for name, spec in norms.items()}


_READERS: dict[str, Callable[[Any], Any]] = {
    NORMS_KEY: _read_norms,
    PREPROCESSING_KEY: _read_preprocessing,
    PROVENANCE_KEY: lambda values: Provenance(**_read_texts(values)),
}
