"""Origin of converted weights, and the config keys they need."""

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import yaml

from ..errors import WeightsError
from ..installation import __version__
from ..norms import build_norm, resolve_norm
from .architecture import Architecture, Norms

_log = logging.getLogger(__name__)

#: key of the provenance in a checkpoint
PROVENANCE = "provenance"


@dataclass(frozen=True)
class Preprocessing:
    """Image preprocessing that weights need, as Detectron2's config names it.

    Args:
        input_format: ``RGB`` or ``BGR``; the order of the channels below, too.
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
    """Origin and network of converted weights, stored in their file.

    Args:
        tool: name and version of the program that converted them.
        source: name of the file they were converted from.
        source_sha256: SHA-256 of that file.
        architecture: such as ``R-50``.
        positions: positions of ``whiten_norm``, one of ``"" S1 S1-B1 S1-B2 S1-B3 S1-B12 ALL``.
        norm: the norm of all other layers, such as ``BN`` or ``GN:groups=16,eps=1e-05``.
        preprocessing: of the images.
        pool_norm: the norm before the classifier, such as ``BW:channels=32,solver=zca``; None if unknown, "" for none.
        whiten_norm: the norm at ``positions``, with all options; None in weights that version 0.1.0 converted, which
            assumed ``GW``.
    """

    tool: str
    source: str
    source_sha256: str
    architecture: str
    positions: str
    norm: str
    preprocessing: Preprocessing = TORCHVISION
    pool_norm: str | None = None
    whiten_norm: str | None = None

    @property
    def norms(self) -> Norms:
        """The norms of the network."""
        return Norms(self.norm, ("GW" if self.whiten_norm is None else self.whiten_norm), self.positions)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Provenance":
        """Restore a provenance from the result of ``dataclasses.asdict``.

        Raises:
            WeightsError: a value is missing, of a wrong type or unknown.
        """
        optional = ("pool_norm", "whiten_norm")
        try:
            if not isinstance(values, Mapping):
                raise TypeError(f"a {type(values).__name__}")
            images = dict(values["preprocessing"])
            images |= {key: tuple(map(float, images[key])) for key in ("pixel_mean", "pixel_std")}
            texts = {key: value for key, value in values.items() if key != "preprocessing"}
            required = {key: value for key, value in texts.items() if value is not None or key not in optional}
            required["input_format"] = images["input_format"]
            if wrong := [key for key, value in required.items() if not isinstance(value, str)]:
                raise TypeError(f"{', '.join(map(str, wrong))}: no text")
            provenance = cls(**texts, preprocessing=Preprocessing(**images))
            layers = provenance.norms.by_layer(Architecture.parse(provenance.architecture))
            with torch.device("meta"):
                for spec, channels in {(spec, layer.channels) for layer, spec in layers.items()}:
                    build_norm(spec, channels)
            resolve_norm(provenance.norm)
            return provenance
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            reason = str(error).partition(" Fix: ")[0].rstrip(".")
            raise WeightsError(f"provenance: damaged ({reason}). Fix: convert the weights again.") from None

    def check_architecture(self, found: Architecture) -> None:
        """Raise WeightsError unless the tensors have the recorded architecture."""
        if Architecture.parse(self.architecture) != found:
            raise WeightsError(
                f"provenance (architecture {self.architecture!r}): the tensors are of {found.name}. Fix: convert the "
                "weights again."
            )

    def warn_of_assumed_norms(self) -> None:
        """Log a warning if version 0.1.0 assumed the norms instead of recording them."""
        if self.whiten_norm is None and (self.positions or self.norm != "BN"):
            _log.warning(
                "norms (%s): assumed by version 0.1.0, which converted these weights; with other options every feature "
                "is wrong. Fix: convert the source again, and state its norm by --norm.",
                self.norms,
            )

    def config(self, weights: str = "") -> dict[str, Any]:
        """Return the config keys that the weights need; BN is frozen, as in fine-tuning.

        Args:
            weights: the value of ``MODEL.WEIGHTS``.
        """
        network, images = Architecture.parse(self.architecture), self.preprocessing
        return {
            "MODEL": {
                "WEIGHTS": weights,
                "BACKBONE": {"NAME": "build_gw_resnet_fpn_backbone"},
                "PIXEL_MEAN": list(images.pixel_mean),
                "PIXEL_STD": list(images.pixel_std),
                "RESNETS": {
                    "DEPTH": network.depth,
                    "NUM_GROUPS": network.groups,
                    "WIDTH_PER_GROUP": network.width,
                    "RES2_OUT_CHANNELS": network.res2_channels,
                    "STRIDE_IN_1X1": images.stride_in_1x1,
                    "NORM": "FrozenBN" if self.norm == "BN" else self.norm,
                    "WHITEN_NORM": {"": "GW", "BN": "FrozenBN"}.get(self.norms.whiten_norm, self.norms.whiten_norm),
                    "WHITEN_POSITIONS": self.positions,
                },
            },
            "INPUT": {"FORMAT": images.input_format},
            "VERSION": 2,
        }

    def config_yaml(self, weights: str) -> str:
        """Return :meth:`config` as yaml text, with the origin in comments."""
        return (
            f"# Written by {self.tool} for {weights}, converted from {self.source}\n# (sha256 {self.source_sha256}).\n"
            "# Every config that uses these weights needs these keys.\n"
        ) + yaml.safe_dump(self.config(weights), sort_keys=False, default_flow_style=None)


def tool() -> str:
    """Return the name and version of this package."""
    return f"gw_detectron {__version__}"


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
