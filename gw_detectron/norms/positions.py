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
#: norms by their module names in ResNets of Detectron2, torchvision and timm
_BLOCK = re.compile(
    r"(?P<root>|.*\.)(?:res[2-5]|layer[1-4])\.\d+\."
    r"(?P<part>conv\d|shortcut|bn\d|downsample)(?:\.norm|\.\d+)?"
)
#: a deep stem has several: timm's are bn1, conv1.1 and conv1.4, and perhaps maxpool.1
_STEM = re.compile(r"(?P<root>|.*\.)(?:stem\.conv\d\.norm|bn1|conv1\.\d|maxpool\.\d)")
#: parts of a block in torchvision and timm, and the convolutions before these norms
_CONV_BEFORE = {
    "bn1": "conv1",
    "bn2": "conv2",
    "bn3": "conv3",
    "downsample": "shortcut",
}


def whitened_convs(
    positions: str, *, bottleneck: bool = True, where: str = "positions"
) -> tuple[str, ...]:
    """Return the convolutions of a residual block that get the whitening norm.

    Args:
        positions: one of ``"" S1 S1-B1 S1-B2 S1-B3 S1-B12 ALL``; others are a ConfigError.
        bottleneck: False for the two-convolution blocks of ResNet-18 and -34, which have no third norm.
        where: the place that an error message names.
    """
    if positions not in POSITIONS:
        raise ConfigError(
            f"{where} ({positions!r}): unknown positions. Fix: use one of {list(POSITIONS)}."
        )
    if positions == "S1-B3" and not bottleneck:
        raise ConfigError(
            f"{where} ({positions!r}): blocks of ResNet-18 and -34 have only two norms. Fix: use e.g. 'S1-B2'."
        )
    outside = {"stem"} if bottleneck else {"stem", "conv3"}
    return tuple(place for place in _PLACES[positions] if place not in outside)


def norms_at(
    positions: str, names: Iterable[str], *, where: str = "positions"
) -> list[str]:
    """Return the norm layers among ``names`` at the positions (see :func:`whitened_convs`).

    Names of ResNets of Detectron2, torchvision and timm are known; others are a ConfigError.
    """
    roles = _roles(list(names))
    if not {"stem", "conv2"} <= set(roles.values()):
        raise ConfigError(
            f"{where} ({positions!r}): the model has no norms named as in a ResNet of Detectron2, torchvision or timm "
            "(stem.conv1.norm and res2.0.conv2.norm, or bn1 and layer1.0.bn2). Fix: give patterns of module names."
        )
    # refuses others
    whitened_convs(positions, bottleneck="conv3" in roles.values(), where=where)
    return [name for name, role in roles.items() if role in _PLACES[positions]]


def _roles(names: Sequence[str]) -> dict[str, str]:
    """Return the role of each norm of a ResNet: the stem, or the convolution of a block before it."""
    roles = {}
    roots = set()  # where the blocks are: a head may also have a bn1
    for name in names:
        block = _BLOCK.fullmatch(name)
        if block:
            part = block["part"]
            roles[name] = _CONV_BEFORE.get(part, part)
            roots.add(block["root"])

    for name in names:
        stem = _STEM.fullmatch(name)
        if stem and stem["root"] in roots:
            roles[name] = "stem"
    return roles
