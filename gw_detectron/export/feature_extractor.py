"""Wrap a backbone as a function from images to feature maps."""

import copy
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import Backbone
from torch import Tensor, nn
from torch.export import Dim

from ..errors import ConfigError


@dataclass(frozen=True)
class Normalization:
    """Image normalization of a model: ``(pixels - mean) / std``.

    Args:
        channels: color order, ``RGB`` or ``BGR``.
        pixel_mean: one mean per channel, for pixels of 0 to 255.
        pixel_std: one divisor per channel.
        inside: True if the exported function normalizes pixels itself; False if it takes normalized images.

    Raises:
        ConfigError: the values are not those of a color image.
    """

    channels: str
    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]
    inside: bool = False

    def __post_init__(self) -> None:
        if self.channels not in ("RGB", "BGR"):
            raise ConfigError(f"INPUT.FORMAT ({self.channels!r}): cannot be exported. Fix: use RGB or BGR.")
        for key, values in (("MODEL.PIXEL_MEAN", self.pixel_mean), ("MODEL.PIXEL_STD", self.pixel_std)):
            if len(values) != 3 or not all(map(math.isfinite, values)) or (key.endswith("STD") and 0 in values):
                raise ConfigError(
                    f"{key} ({values}): expected three finite numbers, not 0 for a std. Fix: use those of the training."
                )

    @classmethod
    def from_config(cls, cfg: CfgNode, *, inside: bool = False) -> "Normalization":
        """Read ``INPUT.FORMAT``, ``MODEL.PIXEL_MEAN`` and ``MODEL.PIXEL_STD``."""
        return cls(cfg.INPUT.FORMAT, tuple(cfg.MODEL.PIXEL_MEAN), tuple(cfg.MODEL.PIXEL_STD), inside)

    def describe(self, name: str, shape: list, multiple_of: int = 1, smallest_side: int = 1) -> dict[str, Any]:
        """Describe an input tensor as plain values, for metadata and reports."""
        sizes = {"multiple_of": multiple_of, "smallest_side": smallest_side}
        return {"name": name, "type": "float32", "shape": shape, **asdict(self), **sizes}


class FeatureExtractor(nn.Module):
    r"""Copy of a backbone in evaluation mode, on the CPU, in float32.

    .. math:: (p_2, p_3, \dots) = f(x) \quad \text{or} \quad f((\mathrm{pixels} - \mathrm{mean}) / \mathrm{std})

    Args:
        backbone: a Detectron2 backbone; it is copied and not changed.
        normalization: how images become its input.

    Shape: (N, 3, H, W) -> a tuple of (N, C_i, H / stride_i, W / stride_i) in the order of :attr:`names`.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, backbone: Backbone, normalization: Normalization) -> None:
        super().__init__()
        self.normalization = normalization
        self.backbone: Backbone = copy.deepcopy(backbone).cpu().float().eval().requires_grad_(False)
        self._outputs = {name: (shape.channels, shape.stride) for name, shape in backbone.output_shape().items()}
        for name in ("pixel_mean", "pixel_std"):
            values = torch.tensor(getattr(normalization, name), dtype=torch.float32)
            self.register_buffer(name, values.reshape(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        if self.normalization.inside:
            images = (images - self.pixel_mean) / self.pixel_std
        features = self.backbone(images)
        return tuple(features[name] for name in self._outputs)

    @property
    def names(self) -> list[str]:
        """Names of the feature maps, in output order."""
        return list(self._outputs)

    @property
    def multiple(self) -> int:
        """Number of pixels that height and width must be a multiple of."""
        return max(1, self.backbone.size_divisibility)

    @property
    def smallest_side(self) -> int:
        """Smallest height and width that can be exported.

        Every feature map is larger than 1x1 there.
        torch.export specializes dimensions of size one, so its programs start at this size.
        """
        largest_stride = max(stride for _, stride in self._outputs.values())
        return (largest_stride // self.multiple + 1) * self.multiple

    def side(self, steps: int) -> int:
        """Return a height or width for tests.

        It is the smallest side plus ``steps`` times :attr:`multiple`, or times 32 if that is more.
        """
        return self.smallest_side + steps * max(32, self.multiple)

    def sample(self, batch: int, height: int, width: int, seed: int = 0) -> Tensor:
        """Draw random input images, (N, 3, H, W)."""
        pixels = 255 * torch.rand(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))
        return pixels if self.normalization.inside else (pixels - self.pixel_mean) / self.pixel_std

    def sample_inputs(self) -> dict[str, Tensor]:
        """Draw the input for the export."""
        return {"images": self.sample(2, self.side(1), self.side(2))}

    def dynamic_shapes(self) -> dict[str, Any]:
        """Return the free dimensions of the input, for torch.export."""
        # dimensions as multiples tell torch.export that the levels of an FPN fit each other
        height, width = (Dim(name, min=self.smallest_side // self.multiple) for name in ("height", "width"))
        return {"images": {0: Dim("batch", min=1), 2: self.multiple * height, 3: self.multiple * width}}

    def describe(self) -> dict[str, Any]:
        """Describe input and outputs as plain values, for metadata and reports."""
        return {
            "input": self.normalization.describe("images", ["N", 3, "H", "W"], self.multiple, self.smallest_side),
            "outputs": {name: {"channels": c, "stride": s} for name, (c, s) in self._outputs.items()},
        }
