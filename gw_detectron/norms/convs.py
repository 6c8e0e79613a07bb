"""Convolutions by name, for any model: ``""`` is plain, ``"WS"`` has standardized weights."""

from torch import nn

from ..errors import ConfigError
from ..layers.weight_standardization import WeightStandardized, standardize_weights

CONVS = ("", "WS")


def convert_convs(model: nn.Module, conv: str, pattern: str = "*", *, where: str = "conv") -> list[str]:
    """Convert the convolutions of a model, in place.

    Args:
        model: any model.
        conv: ``"WS"`` for Weight Standardization, see :func:`gw_detectron.layers.standardize_weights`; ``""`` changes
            nothing.
        pattern: a glob of the convolutions' module names.
        where: the place that an error message names, e.g. ``"MODEL.FPN.CONV"``.

    Returns:
        The names of the converted convolutions.

    Raises:
        ConfigError: an unknown name, or no convolution that it fits.
    """
    if conv not in CONVS:
        raise ConfigError(f"{where} ({conv!r}): unknown convolution. Fix: use one of {list(CONVS)}.")
    try:
        return standardize_weights(model, pattern) if conv else []
    except ValueError as error:
        raise ConfigError(f"{where} ({conv!r}): {error}") from error


def conv_names(model: nn.Module) -> dict[str, str]:
    """Return the names (``"WS"``) of the convolutions of a model that are not plain, by module name."""
    return {name: "WS" for name, module in model.named_modules() if isinstance(module, WeightStandardized)}
