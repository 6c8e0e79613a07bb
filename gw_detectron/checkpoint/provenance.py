"""What goes with converted weights: where they come from, and the images they were trained on."""

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from ..version import __version__
from .architecture import Architecture
from .convert import Conversion

_NEEDED_BY_CONFIG = (
    "{tool} wrote this for {weights}, converted from {source}\n(sha256 {sha256}).\n"
    "These keys have to stand in every config that uses these weights."
)


@dataclass(frozen=True)
class Preprocessing:
    """How images have to be given to weights, in the words of Detectron2's config.

    Args:
        input_format: ``RGB`` or ``BGR``, the order of the three numbers below too.
        pixel_mean: subtracted from values of 0 to 255.
        pixel_std: then divided by.
        stride_in_1x1: whether the first 1x1 convolution of a stage has the stride, instead of the 3x3.
    """

    input_format: str
    pixel_mean: tuple[float, float, float]
    pixel_std: tuple[float, float, float]
    stride_in_1x1: bool


# ImageNet weights of the authors, of torchvision and of timm; the released loader divides by 255, then normalises.
TORCHVISION = Preprocessing("RGB", (123.675, 116.28, 103.53), (58.395, 57.12, 57.375), False)


@dataclass(frozen=True)
class Provenance:
    """Where converted weights come from and what they need.

    Args:
        tool: the name and version of the program that converted them.
        source: the name of the file they were converted from.
        source_sha256: of that file.
        architecture: such as ``R-50``.
        positions: where whitening stands, such as ``S1-B2``.
        norm: every other norm, ``BN`` or ``GN``.
        preprocessing: how images have to be given.
        pool_norm: what the user said stands before the classifier, such as ``BW:channels=32,solver=zca``; None if
            nothing was said.
    """

    tool: str
    source: str
    source_sha256: str
    architecture: str
    positions: str
    norm: str
    preprocessing: Preprocessing = TORCHVISION
    pool_norm: str | None = None

    @classmethod
    def of(cls, conversion: Conversion, source: str | os.PathLike[str]) -> "Provenance":
        """Describes the conversion of a file."""
        return cls(
            tool=tool(),
            source=os.path.basename(source),
            source_sha256=sha256_of(source),
            architecture=conversion.architecture.name,
            positions=conversion.positions,
            norm=conversion.norm,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Provenance":
        """Reads what :meth:`to_dict` wrote.

        Raises:
            ValueError: a value is missing or unknown.
        """
        try:
            images = dict(values["preprocessing"])
            for key in ("pixel_mean", "pixel_std"):
                images[key] = tuple(images[key])
            return cls(**{**values, "preprocessing": Preprocessing(**images)})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the note of where the weights come from is damaged: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for pickle and json."""
        return dataclasses.asdict(self)

    def config(self) -> dict[str, Any]:
        """The config keys that have to go with the weights; batch norm is frozen, as fine-tuning has it."""
        network, images = Architecture.parse(self.architecture), self.preprocessing
        return {
            "MODEL": {
                "PIXEL_MEAN": list(images.pixel_mean),
                "PIXEL_STD": list(images.pixel_std),
                "RESNETS": {
                    "DEPTH": network.depth,
                    "NUM_GROUPS": network.groups,
                    "WIDTH_PER_GROUP": network.width,
                    "RES2_OUT_CHANNELS": network.res2_channels,
                    "STRIDE_IN_1X1": images.stride_in_1x1,
                    "NORM": "FrozenBN" if self.norm == "BN" else self.norm,
                    "WHITEN_NORM": "GW",
                    "WHITEN_POSITIONS": self.positions,
                },
            },
            "INPUT": {"FORMAT": images.input_format},
        }

    def fragment(self, weights: str) -> str:
        """The yaml text that has to go with the weights.

        Args:
            weights: the value of ``MODEL.WEIGHTS``.
        """
        head = _NEEDED_BY_CONFIG.format(tool=self.tool, weights=weights, source=self.source, sha256=self.source_sha256)
        config = self.config()
        config["MODEL"] = {
            "WEIGHTS": weights,
            "BACKBONE": {"NAME": "build_gw_resnet_fpn_backbone"},
            **config["MODEL"],
        }
        comment = "".join(f"# {line}\n" for line in head.splitlines())
        return comment + yaml.safe_dump({**config, "VERSION": 2}, sort_keys=False, default_flow_style=None)


def tool() -> str:
    """The name and version of this package."""
    return f"gw_detectron {__version__}"


def sha256_of(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
