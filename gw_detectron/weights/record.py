"""What a weight file records about its network: norms, preprocessing, origin.

The norms are one dict, ``{layer name: norm name}``, in checkpoints, converted weights and exports alike: the tensors
alone do not tell GN from GW, or 64 groups from 32.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ..errors import WeightsError
from ..installation import __version__
from ..norms import conv_names, norm_rows
from .reading import Contents

#: keys in a checkpoint and in the header of a safetensors file
NORMS, PREPROCESSING_KEY, PROVENANCE = "norms", "preprocessing", "provenance"
#: key of the description of an exported network in that header
DESCRIPTION = "gw_detectron.json"
_STRIDES = {"stem": 4, "res2": 4, "res3": 8, "res4": 16, "res5": 32}


@dataclass(frozen=True)
class Preprocessing:
    """Image preprocessing that weights need, as Detectron2's config names it.

    Args:
        input_format: ``RGB`` or ``BGR``; also the order of the channels below.
        pixel_mean: subtracted from values of 0 to 255.
        pixel_std: then divided by.
        stride_in_1x1: the first 1x1 convolution of a stage has the stride, not the 3x3.
    """

    input_format: str
    pixel_mean: tuple[float, float, float]
    pixel_std: tuple[float, float, float]
    stride_in_1x1: bool


# ImageNet weights of the authors, torchvision and timm: the released loader divides by 255, then normalizes.
TORCHVISION = Preprocessing("RGB", (123.675, 116.28, 103.53), (58.395, 57.12, 57.375), False)
_BGR_MEAN = (103.53, 116.28, 123.675)
#: preprocessing of ImageNet weights by their origin
PREPROCESSING = {
    "torchvision": TORCHVISION,
    "detectron2-msra": Preprocessing("BGR", _BGR_MEAN, (1.0, 1.0, 1.0), True),
    "detectron2-fair": Preprocessing("BGR", _BGR_MEAN, (1.0, 1.0, 1.0), False),
    # FAIR's ResNeXts under detectron2://; the copies under catalog:// were trained with a standard deviation of 1
    "detectron2-fair-resnext": Preprocessing("BGR", _BGR_MEAN, (57.375, 57.12, 58.395), False),
}


@dataclass(frozen=True)
class Provenance:
    """Origin of converted weights: version of this package, name and SHA-256 of the source file."""

    tool: str
    source: str
    source_sha256: str


@dataclass(frozen=True)
class Record:
    """What a weight file records: norm names by layer, and ``"WS"`` of standardized convolutions, and origins."""

    norms: Mapping[str, str] | None = None
    preprocessing: Preprocessing | None = None
    provenance: Provenance | None = None

    def entries(self) -> dict[str, Any]:
        """Return the entries of a file that :func:`read_record` reads."""
        return {
            NORMS: dict(self.norms or {}),
            PREPROCESSING_KEY: asdict(self.preprocessing) if self.preprocessing else None,
            PROVENANCE: asdict(self.provenance) if self.provenance else None,
        }


def norm_record(model: nn.Module) -> dict[str, str]:
    """Return the norms of a model as files record them: ``{layer: norm name}`` and ``{convolution: "WS"}``."""
    return {row.layer: row.spec for row in norm_rows(model)} | conv_names(model)


def read_record(contents: Contents) -> Record:
    """Read what a weight file records about its network."""
    values = contents.value if isinstance(contents.value, Mapping) else {}
    try:
        if contents.format == "safetensors":
            keys = (NORMS, PREPROCESSING_KEY, PROVENANCE, DESCRIPTION)
            values = {key: json.loads(text) for key, text in contents.metadata.items() if key in keys}
        norms, images, origin = (values.get(key) for key in (NORMS, PREPROCESSING_KEY, PROVENANCE))
        if NORMS in values and not (
            isinstance(norms, Mapping) and all(isinstance(text, str) for pair in norms.items() for text in pair)
        ):
            raise TypeError(f"{NORMS}: a {type(norms).__name__} that is not norm names by layer")
        if images is not None:
            rows = {key: tuple(map(float, images[key])) for key in ("pixel_mean", "pixel_std")}
            images = Preprocessing(**(dict(images) | rows))
        elif values.get("__author__") == "torchvision":  # by Detectron2's tool
            images = TORCHVISION
        provenance = None if origin is None else Provenance(**{key: str(text) for key, text in origin.items()})
        outputs = values.get(DESCRIPTION, {}).get("outputs", {}) if contents.format == "safetensors" else {}
        dilated = [name for name, output in outputs.items() if output["stride"] != _STRIDES.get(name, output["stride"])]
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"record of the file: damaged ({error}). Fix: write the file again.") from None
    if dilated:
        raise WeightsError(
            f"{dilated[0]}: the network is dilated, which conversion does not support. Fix: load the weights with the "
            "config of the exported model."
        )
    return Record(norms, images, provenance)


def tool() -> str:
    """Return the name and version of this package."""
    return f"gw_detectron {__version__}"
