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


def copy_class_change(source: nn.Module, target: nn.Module) -> None:
    """Put the last mixin of a module, and the modules that came with it, on another module of its kind, in place."""
    change_class(target, type(source).__bases__[0])
    for name, child in source.named_children():
        if name not in target._modules:
            target.add_module(name, child)


def original_class(module: nn.Module) -> Any:
    """Return the class that a module had before its last change."""
    return type(module).__bases__[1]


@functools.cache
def _changed(mixin: Any, base: Any) -> type[nn.Module]:
    # torch.fx traces into modules that are not of torch.nn, and would make a computed weight a constant
    return type(f"{mixin.__name__}{base.__name__}", (mixin, base), {"__module__": base.__module__})


def _empty(mixin: Any, base: Any) -> nn.Module:
    cls = _changed(mixin, base)
    return cls.__new__(cls)
