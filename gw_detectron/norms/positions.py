"""The paper's names for positions of norms in a ResNet.

``S1`` is the stem; ``B1``, ``B2`` and ``B3`` are the first, second and third norm of every block; ``B12`` is the first
two. Source: Group Whitening, section 5.1.1.
"""

import re
from collections.abc import Iterable, Sequence

from ..errors import ConfigError

#: positions -> the stem, and the convolutions of a block, whose norms they name
_PLACES: dict[str, tuple[str, ...]] = {
    "": (),
    "S1": ("stem",),
    "S1-B1": ("stem", "conv1"),
    "S1-B2": ("stem", "conv2"),
    "S1-B3": ("stem", "conv3"),
    "S1-B12": ("stem", "conv1", "conv2"),
    "ALL": ("stem", "conv1", "conv2", "conv3", "shortcut"),
}
POSITIONS = tuple(_PLACES)
#: norms by their module names in ResNets of Detectron2, torchvision, timm and transformers; stages that are children of
#: a Sequential have numbers instead of names
_BLOCK = re.compile(
    r"(?P<root>|.*\.)(?:res[2-5]|layer[1-4]|encoder\.stages\.\d\.layers|\d+)\.\d+\."
    r"(?P<part>conv\d|shortcut|bn\d|downsample|layer\.\d)(?:\.norm|\.\d+)?(?:\.normalization)?"
)
#: a deep stem has several: timm's are bn1, conv1.1 and conv1.4, and perhaps maxpool.1
_STEM = re.compile(
    r"stem\.conv\d\.norm|bn1|conv1\.\d|maxpool\.\d|embedder\.embedder(?:\.\d)?\.normalization"
    r"|(?:(?:layer0|stem|\d)\.){0,2}\d"
)
#: parts of a block in torchvision, timm and transformers, and the convolutions before these norms
_CONV_BEFORE = {
    "bn1": "conv1",
    "bn2": "conv2",
    "bn3": "conv3",
    "layer.0": "conv1",
    "layer.1": "conv2",
    "layer.2": "conv3",
    "downsample": "shortcut",
}


def check_positions(
    positions: str, *, bottleneck: bool = True, where: str = "positions"
) -> None:
    """Raise ConfigError unless a network has these positions; arguments as for :func:`whitened_convs`."""
    if positions not in POSITIONS:
        raise ConfigError(
            f"{where} ({positions!r}): unknown positions. Fix: use one of {list(POSITIONS)}."
        )
    if positions == "S1-B3" and not bottleneck:
        raise ConfigError(
            f"{where} ({positions!r}): blocks of ResNet-18 and -34 have only two norms. Fix: use e.g. 'S1-B2'."
        )


def whitened_convs(
    positions: str, *, bottleneck: bool = True, where: str = "positions"
) -> tuple[str, ...]:
    """Return the convolutions of a residual block that get the whitening norm.

    Args:
        positions: one of ``"" S1 S1-B1 S1-B2 S1-B3 S1-B12 ALL``; others are a ConfigError.
        bottleneck: False for the two-convolution blocks of ResNet-18 and -34, which have no third norm.
        where: the place that an error message names.
    """
    check_positions(positions, bottleneck=bottleneck, where=where)
    outside = {"stem"} if bottleneck else {"stem", "conv3"}
    return tuple(place for place in _PLACES[positions] if place not in outside)


def norms_at(
    positions: str, names: Iterable[str], *, where: str = "positions"
) -> list[str]:
    """Return the norm layers among ``names`` at the positions (see :func:`whitened_convs`).

    Names of ResNets of Detectron2, torchvision, timm and transformers are known, also with numbers as in
    ``nn.Sequential(*resnet.children())``; others are a ConfigError.
    """
    roles = _roles(list(names))
    if not {"stem", "conv2"} <= set(roles.values()):
        raise ConfigError(
            f"{where} ({positions!r}): the model has no norms named as in a ResNet of Detectron2, torchvision, timm or "
            "transformers, such as stem.conv1.norm and res2.0.conv2.norm. Fix: give patterns of module names."
        )
    check_positions(positions, bottleneck="conv3" in roles.values(), where=where)
    return [name for name, role in roles.items() if role in _PLACES[positions]]


def _roles(names: Sequence[str]) -> dict[str, str]:
    """Return the role of each norm of a ResNet: the stem, or the convolution of a block before it."""
    roles = {}
    first_block: dict[str, int] = {}  # of each ResNet, by the beginning of its names
    for place, name in enumerate(names):
        block = _BLOCK.fullmatch(name)
        if block:
            part = block["part"]
            roles[name] = _CONV_BEFORE.get(part, part)
            first_block.setdefault(block["root"], place)

    # the stem comes before the blocks: a head may also have a bn1
    for place, name in enumerate(names):
        for root, first in first_block.items():
            is_before = name.startswith(root) and place < first
            if is_before and _STEM.fullmatch(name, len(root)):
                roles[name] = "stem"
    return roles
