"""The paper's names for positions of norms in a ResNet.

``S1`` is the stem; ``B1``, ``B2`` and ``B3`` are the first, second and third norm of every block; ``B12`` is the first
two. Source: Group Whitening, section 5.1.1.
"""

import re
from collections.abc import Iterable, Sequence

from ..errors import ConfigError

_CONVS: dict[str, tuple[str, ...]] = {
    "": (),
    "S1": (),
    "S1-B1": ("conv1",),
    "S1-B2": ("conv2",),
    "S1-B3": ("conv3",),
    "S1-B12": ("conv1", "conv2"),
    "ALL": ("conv1", "conv2", "conv3", "shortcut"),
}
POSITIONS = tuple(_CONVS)
#: norms by their module names in ResNets of Detectron2, torchvision and timm
_BLOCK = re.compile(
    r"(|.*\.)(?:res[2-5]|layer[1-4])\.\d+\.(?:(conv\d|shortcut)\.norm|bn(\d)|downsample\.\d+)"
)
#: a deep stem has several: timm's are bn1, conv1.1 and conv1.4, and perhaps maxpool.1
_STEM = re.compile(r"(|.*\.)(?:stem\.conv\d\.norm|bn1|conv1\.\d|maxpool\.\d)")


def whitened_convs(
    positions: str, *, bottleneck: bool = True, where: str = "positions"
) -> tuple[str, ...]:
    """Return the convolutions of a residual block that get the whitening norm.

    Args:
        positions: one of ``"" S1 S1-B1 S1-B2 S1-B3 S1-B12 ALL``; others are a ConfigError.
        bottleneck: False for the two-convolution blocks of ResNet-18 and -34, which have no third norm.
        where: the place that an error message names.
    """
    if not isinstance(positions, str) or positions not in _CONVS:
        raise ConfigError(
            f"{where} ({positions!r}): unknown positions. Fix: use one of {list(POSITIONS)}."
        )
    if positions == "S1-B3" and not bottleneck:
        raise ConfigError(
            f"{where} ({positions!r}): blocks of ResNet-18 and -34 have only two norms. Fix: use e.g. 'S1-B2'."
        )
    return tuple(conv for conv in _CONVS[positions] if bottleneck or conv != "conv3")


def norms_at(positions: str, names: Iterable[str], *, where: str = "positions") -> list[str]:
    """Return the norm layers among ``names`` at the positions (see :func:`whitened_convs`).

    Names of ResNets of Detectron2, torchvision and timm are known; others are a ConfigError.
    """
    roles = _roles(list(names))
    if "stem" not in roles.values() or "conv2" not in roles.values():
        raise ConfigError(
            f"{where} ({positions!r}): the model has no norms named as in a ResNet of Detectron2, torchvision or timm "
            "(stem.conv1.norm and res2.0.conv2.norm, or bn1 and layer1.0.bn2). Fix: give patterns of module names."
        )
    convs = whitened_convs(positions, bottleneck="conv3" in roles.values(), where=where)
    chosen = {"stem", *convs} if positions else set()
    return [name for name, role in roles.items() if role in chosen]


def _roles(names: Sequence[str]) -> dict[str, str]:
    """Return the role of each norm of a ResNet: the stem, or the convolution of a block before it."""
    blocks = {name: match for name in names if (match := _BLOCK.fullmatch(name))}
    roots = {
        match[1] for match in blocks.values()
    }  # where the stem is: a head may also have a bn1
    roles = {}
    for name in names:
        if match := blocks.get(name):
            _, conv, number = match.groups()
            roles[name] = conv or (f"conv{number}" if number else "shortcut")
        elif (stem := _STEM.fullmatch(name)) and stem[1] in roots:
            roles[name] = "stem"
    return roles
