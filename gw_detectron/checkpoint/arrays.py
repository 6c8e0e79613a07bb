"""Stand-ins for numpy in pickles: numpy's own unpickling of arrays is not safe with numbers that were tampered with."""

import codecs
import re
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NUMBERS = re.compile(r"[biuf]\d\d?")  # bool, integers and floating point, with their size in bytes


class PickledDtype:
    """What a pickle says where it names ``numpy.dtype``.

    Args:
        code: kind and size, such as ``f4``.
        options: not used; numpy writes two.
    """

    def __init__(self, code: str, *options: object) -> None:
        if not isinstance(code, str) or not _NUMBERS.fullmatch(code):
            raise ValueError(f"it holds an array of {code!r}, which is not a number")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])

    def numbers(self, data: bytes | str) -> np.ndarray:
        """Reads numbers from their bytes, which Python 2 wrote as text."""
        raw = data.encode("latin1") if isinstance(data, str) else data
        if not isinstance(raw, bytes):
            raise ValueError("it holds an array of objects, which are not numbers")
        return np.frombuffer(raw, self.dtype).astype(self.dtype.newbyteorder("="))


class PickledArray:
    """What a pickle says where it makes a ``numpy.ndarray``.

    Args:
        options: not used; numpy writes the class and an empty array's shape and kind.
    """

    def __init__(self, *options: object) -> None:
        self.tensor: Tensor = torch.empty(0)

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, column_major, data = state
        self.tensor = torch.from_numpy(dtype.numbers(data).reshape(shape, order="F" if column_major else "C").copy())


def pickled_scalar(dtype: PickledDtype, data: bytes | str) -> Any:
    """What a pickle says where it makes a single numpy number."""
    return dtype.numbers(data).item()


def pickled_buffer(data: bytes | bytearray, dtype: PickledDtype, shape: tuple, order: str) -> PickledArray:
    """What a pickle of protocol 5 says where it makes a ``numpy.ndarray``."""
    array = PickledArray()
    raw = bytes(data) if isinstance(data, bytearray) else data  # bytes() of a number would be as many zeros
    array.__setstate__((1, shape, dtype, order == "F", raw))
    return array


class _NdarrayName:
    """Stands for the class ``numpy.ndarray``, which pickles mention and never call."""

    def __init__(self) -> None:
        raise ValueError("an array without numbers")


STAND_INS: dict[str, Any] = {
    "_codecs.encode": codecs.encode,  # how pickles of the old protocols hold bytes
    "numpy.ndarray": _NdarrayName,
    "numpy.dtype": PickledDtype,
    **{
        f"numpy.{core}.{name}": stand_in
        for core in ("core", "_core")
        for name, stand_in in (
            ("multiarray._reconstruct", PickledArray),
            ("multiarray.scalar", pickled_scalar),
            ("numeric._frombuffer", pickled_buffer),
        )
    },
}


def with_tensors(content: Any) -> Any:
    """Replaces arrays in nested dicts, lists and tuples by tensors."""
    if isinstance(content, PickledArray):
        return content.tensor
    if type(content) in (dict, OrderedDict):
        return {key: with_tensors(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [with_tensors(value) for value in content]
    return content
