"""Change what a built module does by changing its class, as ``torch.nn.utils.parametrize`` does."""

import functools
from typing import Any

from torch import nn


class ClassChange(nn.Module):
    """Base of mixins for built modules.

    The module keeps its parameters, hooks and mode, and no random number is drawn. The changed class is made at run
    time, where pickle does not find it.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, type(self).__bases__, self.__dict__


def change_class(module: nn.Module, mixin: Any) -> None:
    """Put a mixin, a :class:`ClassChange`, before the class of a module, in place."""
    base: Any = type(module)
    module.__class__ = _changed(mixin, base)


def base_class(module: nn.Module) -> Any:
    """Return the class of a module below its mixins."""
    cls: Any = type(module)
    while issubclass(cls, ClassChange):
        cls = cls.__bases__[1]
    return cls


def change_base(module: nn.Module, base: Any) -> None:
    """Exchange the class of a module below its mixins, in place."""
    module.__class__ = _with_base(type(module), base)


def original_class(module: nn.Module) -> Any:
    """Return the class that a module had before its last change."""
    return type(module).__bases__[1]


def _with_base(cls: Any, base: Any) -> Any:
    if not issubclass(cls, ClassChange):
        return base
    mixin, original = cls.__bases__
    return _changed(mixin, _with_base(original, base))


@functools.cache
def _changed(mixin: Any, base: Any) -> type[nn.Module]:
    # torch.fx traces into modules that are not of torch.nn, and would make a computed weight a constant
    return type(f"{mixin.__name__}{base.__name__}", (mixin, base), {"__module__": base.__module__})


def _empty(mixin: Any, base: Any) -> nn.Module:
    cls = _changed(mixin, base)
    return cls.__new__(cls)
