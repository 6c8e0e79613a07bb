"""What the benchmark of one layer measures."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from .providers import GROUP_NORM_GROUPS, MODES, OPTIONAL, PRECISIONS, PROVIDERS, Case

Shape = tuple[int, int, int, int]

#: (N, C, H, W) of maps in a detector at 800 x 1344 pixels with two images, and of 256 regions of interest
SHAPES: tuple[Shape, ...] = (
    (2, 64, 200, 336),
    (2, 64, 100, 168),
    (2, 128, 50, 84),
    (2, 256, 50, 84),
    (2, 512, 25, 42),
    (2, 256, 100, 168),
    (256, 256, 7, 7),
)
#: shapes whose memory alone is measured: the regions of interest of one image in training
MEMORY_SHAPES: tuple[Shape, ...] = ((512, 256, 7, 7),)
#: beside the times of :data:`.providers.MODES`, what the forward pass keeps and the peak of both passes
MEMORY = "memory"


def parse_shape(text: str) -> Shape:
    """Reads ``2x64x200x336`` or ``2,64,200,336``.

    Raises:
        ValueError: these are not four positive integers.
    """
    parts = text.replace(",", "x").split("x")
    if len(parts) != 4 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"shape {text!r}: write four positive integers N, C, H, W as in 2x64x200x336")
    n, c, h, w = map(int, parts)
    return n, c, h, w


def scaled(shapes: Sequence[Shape], factor: int) -> tuple[Shape, ...]:
    """The shapes with ``factor`` times as many samples.

    Raises:
        ValueError: the factor is not positive.
    """
    if factor < 1:
        raise ValueError(f"batch scale {factor}: give at least 1")
    return tuple((n * factor, c, h, w) for n, c, h, w in shapes)


def check_names(kind: str, names: Collection[str], allowed: Collection[str]) -> None:
    """Raises ValueError for the first name that is not allowed, or if there is none at all."""
    for name in names:
        if name not in allowed:
            raise ValueError(f"unknown {kind} {name!r}; allowed are {', '.join(allowed)}")
    if not names:
        raise ValueError(f"no {kind} is given; allowed are {', '.join(allowed)}")


@dataclass(frozen=True)
class LayerSettings:
    """What is measured.

    Args:
        device: where.
        shapes: (N, C, H, W), whose time and memory are measured.
        memory_shapes: whose memory alone is measured.
        precisions: names in :data:`.providers.PRECISIONS`.
        providers: names in :data:`.providers.PROVIDERS`.
        modes: of :data:`.providers.MODES`, and ``memory``.
        repeats: rounds of timed runs.
        groups: g of the whitening layers, capped at C.
        iters: T of the whitening layers.

    Raises:
        ValueError: a name is unknown, a number is not positive, a shape does not fit a provider, or nothing is left.
    """

    device: torch.device
    shapes: Sequence[Shape] = SHAPES
    memory_shapes: Sequence[Shape] = MEMORY_SHAPES
    precisions: Sequence[str] = ("fp32",)
    providers: Sequence[str] = tuple(name for name in PROVIDERS if name not in OPTIONAL)
    modes: Sequence[str] = (*MODES, MEMORY)
    repeats: int = 20
    groups: int = 64
    iters: int = 5

    def __post_init__(self) -> None:
        check_names("provider", self.providers, PROVIDERS)
        check_names("dtype", self.precisions, PRECISIONS)
        check_names("mode", self.modes, (*MODES, MEMORY))
        for name in ("repeats", "groups", "iters"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: give at least 1")
        if set(self.providers) == {"floor"} and set(self.modes) == {MEMORY}:
            raise ValueError(
                "provider floor with mode memory: the floor keeps nothing, so there is nothing to measure; give "
                f"another provider as well, or one of the modes {', '.join(MODES)}"
            )
        for shape in (*self.shapes, *self.memory_shapes):
            case = self.case(shape, self.precisions[0], MODES[0])
            whiten = ("ours", "ours_relu", "relu_apart", "figure1", "figure1_compiled", "floor")
            needs = dict.fromkeys(whiten, case.side)
            for name, side in (needs | {"group_norm": GROUP_NORM_GROUPS}).items():
                if name in self.providers and case.channels % side:
                    raise ValueError(
                        f"shape {case.shape_text}: {name} needs a number of channels that {side} divides, not "
                        f"{case.channels}; give another shape, or leave {name} out of the providers"
                    )

    @property
    def header(self) -> dict[str, str]:
        """What two runs must have in common for their ratios to be comparable."""
        text = f"groups={self.groups} iters={self.iters} group_norm={GROUP_NORM_GROUPS}"
        return {"device": self.device.type, "settings": text}

    @property
    def timed_modes(self) -> list[str]:
        """The modes without ``memory``."""
        return [mode for mode in self.modes if mode != MEMORY]

    @property
    def counted_shapes(self) -> tuple[Shape, ...]:
        """The shapes whose memory is measured."""
        return (*self.shapes, *self.memory_shapes) if MEMORY in self.modes else ()

    def case(self, shape: Shape, precision: str, mode: str) -> Case:
        """One input of these settings."""
        return Case(shape, precision, mode, self.device, self.groups, self.iters)
