"""Check a pickle before it is read: names, number of operations, copies and nesting."""

import pickletools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import IO, Any

from ..errors import RefusedFileError, WeightsFileError

SAVE_AGAIN = "Fix: save {'model': model.state_dict()} with torch.save, as a .pth file."

#: nesting of containers; Python's recursion ends near 1000, its hash of nested tuples crashes at some 10,000
DEEPEST = 100
#: operations of a pickle; a million take 6 s and 0.2 GB, a checkpoint of 1,250 tensors with momentum has 79,000
MOST_OPERATIONS = 1_000_000
#: objects and characters that repeated references may stand for, in multiples of the file size
MOST_REPEATED = 16
_ALWAYS_REPEATED = 2**20  # also in tiny files

_LONGEST_INTEGER = 2048  # bits; json and yaml do not write those of more than 4300 digits

_PUT = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_GET = ("GET", "BINGET", "LONG_BINGET", "DUP")
_CHANGE = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
_DICTS = ("collections.OrderedDict", "collections.Counter")


@dataclass
class _Item:
    """An object that a pickle would create.

    Args:
        size: objects and characters that a copy or a hash of it visits.
        depth: nesting of tuples.
        name: the value of a string or integer, the name of a class or function.
        parts: the names of the parts of a tuple.
        is_dict: its items may be set.
    """

    size: int = 1
    depth: int = 0
    name: object = None
    parts: tuple[object, ...] = ()
    is_dict: bool = False


def most_repeated(size: int) -> int:
    """Return how much a file of ``size`` bytes may stand for."""
    return MOST_REPEATED * size + _ALWAYS_REPEATED


def check_pickle(
    file: IO[bytes],
    size: int,
    is_allowed: Callable[[str], bool],
    check_reference: Callable[[tuple[object, ...]], None] = lambda _: None,
) -> None:
    """Walk the operations of a pickle without creating its objects.

    A few hundred bytes can describe tuples whose hash takes years, or arrays that fill the memory.

    Args:
        file: it is read up to the end of the pickle.
        size: bytes of the whole file.
        is_allowed: takes the path of a class or function, such as ``collections.OrderedDict``.
        check_reference: takes the strings, integers and names of a reference to an object outside of the pickle, None
            for its other parts.

    Raises:
        RefusedFileError: the pickle names a class or function that is not allowed.
        WeightsFileError: the pickle exceeds a limit of this module, or is damaged.
    """
    stack: list[_Item] = []
    marks: list[int] = []
    memo: dict[int, _Item] = {}
    repeated = 0
    source: Any = SimpleNamespace(read=file.read, readline=file.readline)  # without tell(), which is slow
    value: Any
    for count, (operation, value, _) in enumerate(pickletools.genops(source)):
        name, before = operation.name, operation.stack_before
        if count > MOST_OPERATIONS:
            raise WeightsFileError(f"it has more than {MOST_OPERATIONS} operations. {SAVE_AGAIN}")
        if name == "MARK":
            marks.append(len(stack))
            continue
        if name in _PUT:
            memo[len(memo) if value is None else value] = stack[-1]
            continue
        if name in _GET:
            stack.append(stack[-1] if name == "DUP" else memo[value])
            repeated += stack[-1].size
            if repeated > most_repeated(size):
                raise WeightsFileError(f"its references stand for far more than its {size} bytes. {SAVE_AGAIN}")
            continue
        if name == "POP" and marks and marks[-1] == len(stack):
            marks.pop()
            continue
        start = len(stack) - len(before)
        if pickletools.markobject in before:
            start = marks.pop() - before.index(pickletools.markobject)
        if start < (marks[-1] if marks else 0):
            raise IndexError(f"stack underflow at {name}")
        taken, stack[start:] = stack[start:], []
        if name == "BUILD" and taken[0].name is not None:
            raise RefusedFileError(f"it changes {taken[0].name}, which could run code")
        if name.startswith("SETITEM") and not taken[0].is_dict:  # it could write to a tensor's memory
            raise WeightsFileError(f"it sets items of an object that is no dict. {SAVE_AGAIN}")
        if name == "BINPERSID":
            check_reference(taken[0].parts)
        if name in _CHANGE:
            taken[0].size += len(taken) - 1
            stack.append(taken[0])
        elif operation.stack_after:
            stack.append(_created(name, value, taken, is_allowed))


def _created(operation: str, value: Any, taken: Sequence[_Item], is_allowed: Callable[[str], bool]) -> _Item:
    """Return the object that an operation creates from its argument and the objects that it takes from the stack."""
    item = _Item(1 + sum(part.size for part in taken))
    if operation.startswith("TUPLE") or operation == "FROZENSET":
        item.depth = 1 + max((part.depth for part in taken), default=0)
        item.parts = tuple(part.name for part in taken)
        if item.depth > DEEPEST:
            raise WeightsFileError(f"it nests tuples deeper than {DEEPEST}. {SAVE_AGAIN}")
    elif operation in ("EMPTY_DICT", "DICT"):
        item.is_dict = True
    elif operation in ("GLOBAL", "INST", "STACK_GLOBAL"):
        path = f"{taken[0].name}.{taken[1].name}" if operation == "STACK_GLOBAL" else value.replace(" ", ".", 1)
        if not is_allowed(path):
            raise RefusedFileError(f"it names {path}, which could run code")
        item.name = path
    elif operation in ("EXT1", "EXT2", "EXT4"):
        raise RefusedFileError(f"it names a class by its registered number {value}, which could run code")
    elif operation in ("REDUCE", "NEWOBJ", "NEWOBJ_EX"):
        if str(taken[0].name).endswith((".Tensor", "Storage")):
            raise WeightsFileError(f"it creates a tensor without values. {SAVE_AGAIN}")
        item.is_dict = taken[0].name in _DICTS
    elif isinstance(value, int):
        if value.bit_length() > _LONGEST_INTEGER:
            raise WeightsFileError(f"it contains an integer of more than {_LONGEST_INTEGER} bits. {SAVE_AGAIN}")
        item.name = value
    elif isinstance(value, (str, bytes, bytearray)):
        item.size += len(value)
        item.name = value
    return item
