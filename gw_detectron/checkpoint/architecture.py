"""ResNets and ResNeXts as lists of modules: the one table between torchvision's names and Detectron2's.

The authors' checkpoints and timm's ResNets carry torchvision's names.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..errors import summarize_names
from ..modeling.resnet import NUM_BLOCKS_PER_STAGE, POSITIONS, whitened_convs

_STAGES = {"torchvision": ("layer1", "layer2", "layer3", "layer4"), "detectron2": ("res2", "res3", "res4", "res5")}
#: a norm between the last average pooling and the classifier, under both of its names
POOL_NORM = ("last_bn", "avgpool.norm")
_NAME = re.compile(r"R-(?P<r>\d+)|X-(?P<x>\d+)-(?P<groups>\d+)x(?P<width>\d+)d")


class Module(NamedTuple):
    """A module with weights, under both of its names.

    Args:
        torchvision: such as ``layer1.0.bn2``.
        detectron2: such as ``res2.0.conv2.norm``.
        kind: ``conv``, ``norm`` or ``linear``.
        shape: of its ``weight``; of the classifier only the second dimension, the number of classes being free.
        position: of a norm, the convolution it follows: ``stem``, ``conv1``, ``conv2``, ``conv3`` or ``shortcut``.
    """

    torchvision: str
    detectron2: str
    kind: str
    shape: tuple[int, ...]
    position: str = ""


@dataclass(frozen=True)
class Architecture:
    """A ResNet or ResNeXt.

    Args:
        depth: 18, 34, 50, 101 or 152.
        groups: of the 3x3 convolutions, 1 for a ResNet.
        width: channels of each group in the first stage, 64 for a ResNet.

    Raises:
        ValueError: there is no such network.
    """

    depth: int
    groups: int = 1
    width: int = 64

    def __post_init__(self) -> None:
        if self.depth not in NUM_BLOCKS_PER_STAGE:
            raise ValueError(f"depth {self.depth}: allowed are {sorted(NUM_BLOCKS_PER_STAGE)}")
        if not self.bottleneck and (self.groups, self.width) != (1, 64):
            raise ValueError(f"a ResNet-{self.depth} has no groups, so {self.groups}x{self.width}d is impossible")

    @classmethod
    def parse(cls, name: str) -> "Architecture":
        """Reads ``R-50`` or ``X-101-32x8d``.

        Raises:
            ValueError: the name is not of this kind, or there is no such network.
        """
        match = _NAME.fullmatch(name)
        if not match:
            raise ValueError(f"architecture {name!r}: write it as R-50 or X-101-32x8d")
        if match["r"]:
            return cls(int(match["r"]))
        return cls(int(match["x"]), int(match["groups"]), int(match["width"]))

    @property
    def name(self) -> str:
        if (self.groups, self.width) == (1, 64):
            return f"R-{self.depth}"
        return f"X-{self.depth}-{self.groups}x{self.width}d"

    @property
    def bottleneck(self) -> bool:
        return self.depth >= 50

    @property
    def blocks(self) -> tuple[int, ...]:
        """The number of blocks of each stage."""
        return NUM_BLOCKS_PER_STAGE[self.depth]

    @property
    def res2_channels(self) -> int:
        """Output channels of the first stage."""
        return 256 if self.bottleneck else 64

    def modules(self) -> Iterator[Module]:
        """Lists all modules with weights in the order of the data."""
        yield Module("conv1", "stem.conv1", "conv", (64, 3, 7, 7))
        yield Module("bn1", "stem.conv1.norm", "norm", (64,), "stem")
        inputs = 64
        for stage, count in enumerate(self.blocks):
            outputs = self.res2_channels * 2**stage
            for block in range(count):
                yield from self._block(stage, block, inputs, outputs)
                inputs = outputs
        yield Module("fc", "linear", "linear", (inputs,))

    def _block(self, stage: int, block: int, inputs: int, outputs: int) -> Iterator[Module]:
        theirs = f"{_STAGES['torchvision'][stage]}.{block}"
        ours = f"{_STAGES['detectron2'][stage]}.{block}"
        for number, shape in enumerate(self._conv_shapes(stage, inputs, outputs), start=1):
            conv = f"conv{number}"
            yield Module(f"{theirs}.{conv}", f"{ours}.{conv}", "conv", shape)
            yield Module(f"{theirs}.bn{number}", f"{ours}.{conv}.norm", "norm", shape[:1], conv)
        if inputs != outputs:
            yield Module(f"{theirs}.downsample.0", f"{ours}.shortcut", "conv", (outputs, inputs, 1, 1))
            yield Module(f"{theirs}.downsample.1", f"{ours}.shortcut.norm", "norm", (outputs,), "shortcut")

    def _conv_shapes(self, stage: int, inputs: int, outputs: int) -> list[tuple[int, int, int, int]]:
        if not self.bottleneck:
            return [(outputs, inputs, 3, 3), (outputs, outputs, 3, 3)]
        width = self.width * 2**stage
        inner = self.groups * width
        return [(inner, inputs, 1, 1), (inner, width, 3, 3), (outputs, inner, 1, 1)]


def infer_architecture(tensors: Mapping[str, Tensor], layout: str = "torchvision") -> Architecture:
    """Recognises the network from the names of its blocks and the shape of a grouped convolution.

    Args:
        tensors: a state dict.
        layout: whose names these are, ``torchvision`` or ``detectron2``.

    Raises:
        ValueError: these are not the weights of a ResNet or ResNeXt.
    """
    stages = _STAGES[layout]
    blocks: Counter[str] = Counter(stage for stage, _ in {_block_of(name) for name in tensors} if stage in stages)
    counts = tuple(blocks[stage] for stage in stages)
    if not all(counts):
        raise ValueError(
            f"these are not the weights of a ResNet: {layout}'s has the stages {', '.join(stages)}, and the first "
            f"names here are {summarize_names(tensors)}"
        )
    bottleneck = f"{stages[0]}.0.conv3.weight" in tensors
    depths = [d for d, known in NUM_BLOCKS_PER_STAGE.items() if known == counts and (d >= 50) == bottleneck]
    if not depths:
        raise ValueError(
            f"no known ResNet has {counts} blocks {'with' if bottleneck else 'without'} bottlenecks; known depths are "
            f"{sorted(NUM_BLOCKS_PER_STAGE)}"
        )
    if not bottleneck:
        return Architecture(depths[0])
    name = f"{stages[0]}.0.conv2.weight"
    shape = tuple(tensors[name].shape) if name in tensors else ()
    if len(shape) != 4 or 0 in shape or shape[0] % shape[1]:
        raise ValueError(f"{name} is {'of shape ' + str(shape) if shape else 'missing'}, so the groups are unknown")
    return Architecture(depths[0], groups=shape[0] // shape[1], width=shape[1])


def infer_positions(architecture: Architecture, whitened: Iterable[Module]) -> str:
    """Names the positions that exactly these norms stand at.

    Args:
        architecture: the network.
        whitened: the norms that are not batch normalisation.

    Raises:
        ValueError: they stand at none of the named sets of positions.
    """
    found = set(whitened)
    for positions in POSITIONS:
        if positions == "S1-B3" and not architecture.bottleneck:
            continue
        if found == set(norms_at(architecture, positions)):
            return positions
    norms = [module for module in architecture.modules() if module.kind == "norm"]
    without = [module.torchvision for module in norms if module in found]
    raise ValueError(
        f"{len(without)} of {len(norms)} norms have no running statistics ({summarize_names(without)}), and together they are "
        f"none of the positions {', '.join(POSITIONS[1:])}"
    )


def norms_at(architecture: Architecture, positions: str) -> list[Module]:
    """The norms that stand at the named positions.

    Raises:
        ValueError: unknown positions, or positions that the network does not have.
    """
    wanted = {"stem", *whitened_convs(positions, bottleneck=architecture.bottleneck)} if positions else set()
    return [module for module in architecture.modules() if module.kind == "norm" and module.position in wanted]


def _block_of(name: str) -> tuple[str, str]:
    stage, _, rest = name.partition(".")
    return stage, rest.partition(".")[0]
