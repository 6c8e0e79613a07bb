"""Unpickle arrays of numbers without numpy's classes and functions.

numpy's own unpickling allocates and reads memory by sizes that a damaged file may set.
"""

import pickle
import re
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import RefusedFileError, WeightsFileError
from .pickle_check import SAVE_AGAIN

_SAVE_NUMBERS = "Fix: save arrays of numbers only."


class _Dtype:
    """Stand-in for ``numpy.dtype``: numbers only."""

    def __init__(self, code: str, *options: object) -> None:
        if not isinstance(code, str) or not re.fullmatch(r"[biuf]\d\d?", code):
            raise WeightsFileError(f"it contains an array of {code!r}, which is not a number. {_SAVE_NUMBERS}")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])

    def numbers(self, data: bytes | bytearray | str) -> np.ndarray:
        """Copy numbers from their bytes, which Python 2 wrote as a string."""
        raw = data.encode("latin1") if isinstance(data, str) else data
        if not isinstance(raw, (bytes, bytearray)):
            raise WeightsFileError(f"it contains an array of objects, which are not numbers. {_SAVE_NUMBERS}")
        return np.frombuffer(raw, self.dtype).astype(self.dtype.newbyteorder("="))


class NumpyArray:
    """Stand-in for ``numpy.ndarray`` and the function that creates one."""

    tensor: Tensor

    def __init__(self, *options: object) -> None:
        pass

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, column_major, data = state
        self.tensor = torch.from_numpy(dtype.numbers(data).reshape(shape, order="F" if column_major else "C").copy())


def _scalar(dtype: _Dtype, data: bytes | str) -> Any:
    return dtype.numbers(data).item()


def _frombuffer(data: bytes | bytearray, dtype: _Dtype, shape: tuple, order: str) -> NumpyArray:
    array = NumpyArray()
    array.__setstate__((1, shape, dtype, order == "F", data))
    return array


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise WeightsFileError(f"it contains bytes in the encoding {encoding!r}. Fix: save it again with Python 3.")
    return text.encode("latin1")


STAND_INS: dict[str, Any] = {
    "_codecs.encode": _encode,  # pickle protocols below 3 write bytes as a string
    "numpy.ndarray": NumpyArray,
    "numpy.dtype": _Dtype,
}
for _core in ("numpy.core", "numpy._core"):
    STAND_INS[f"{_core}.multiarray._reconstruct"] = NumpyArray
    STAND_INS[f"{_core}.multiarray.scalar"] = _scalar
    STAND_INS[f"{_core}.numeric._frombuffer"] = _frombuffer


def is_allowed(path: str) -> bool:
    """Tell whether a pickle of arrays may name a class or function."""
    return path in STAND_INS or path == "collections.OrderedDict"


class NumpyUnpickler(pickle._Unpickler):  # the C version allocates memory for counts that a damaged file may set
    """Create only numeric arrays and plain Python values."""

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if not is_allowed(path):  # as check_pickle has done before
            raise RefusedFileError(f"it names {path}, which could run code")
        return STAND_INS.get(path, OrderedDict)

    def persistent_load(self, pid: Any) -> Any:
        raise WeightsFileError(f"it refers to objects outside of the file. {SAVE_AGAIN}")
