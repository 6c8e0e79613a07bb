"""Read weight files without running code from them."""

import argparse
import hashlib
import json
import os
import pickle
import re
import struct
from collections import OrderedDict
from collections.abc import Mapping
from typing import IO, Any, ClassVar, Literal, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from ..errors import FileAccessError, MissingFileError, RefusedFileError, WeightsFileError

SAVE_AGAIN = "Fix: save {'model': model.state_dict()} with torch.save, as a .pth file."
_GET_AGAIN = "Fix: get the file again."
_LEGACY_TORCH = pickle.dumps(
    0x1950A86A20F9469CFC6C, protocol=2
)  # first bytes of torch.save's files before torch 1.6


class Contents(NamedTuple):
    """The content of a weight file."""

    value: Any  # usually nested dicts
    metadata: Mapping[str, str] = {}  # the header of a safetensors file
    format: Literal["torch", "pickle", "safetensors"] = "torch"
    size: int = 2**63  # bytes of the file


def read_weights_file(path: str | os.PathLike[str]) -> Contents:
    """Read a weight file: ``torch.save``, safetensors, or a pickle of NumPy arrays.

    The content decides about the format. ``torch.load(weights_only=True)`` and an unpickler with an allow-list read
    tensors, numbers, strings, plain containers and ``argparse.Namespace``; arrays become tensors.

    Raises:
        RefusedFileError: the file names another class or function, which could run code.
        WeightsFileError: the file is damaged, not a regular file, or of an unknown format.
        MissingFileError: the file does not exist.
        FileAccessError: the file cannot be opened.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise MissingFileError(
            f"'{path}': file not found (cwd: {os.getcwd()}). Fix: give an existing file."
        )
    if not os.path.isfile(path):  # opening a pipe would block
        raise WeightsFileError(
            f"'{path}': cannot be read: it is not a regular file. Fix: give a file."
        )
    try:
        file = open(path, "rb")  # noqa: SIM115, closed below
    except OSError as error:
        raise FileAccessError(
            f"'{path}': cannot be read: {error.strerror}. Fix: get read permission."
        ) from error
    try:
        with file:
            return _read(file)._replace(size=os.fstat(file.fileno()).st_size)
    except RefusedFileError as error:
        raise RefusedFileError(
            f"'{path}': was not read: {error}. Fix: use another source, preferably a safetensors file. If you trust "
            "this file, save its tensors by torch.save(model.state_dict(), 'tensors.pth') in a sandbox."
        ) from None
    except WeightsFileError as error:
        raise WeightsFileError(f"'{path}': cannot be read: {error}") from None
    except Exception as error:  # damaged files raise anything, OSError and MemoryError included
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise WeightsFileError(
            f"'{path}': cannot be read: it is damaged ({reason}). {_GET_AGAIN}"
        ) from error


def _read(file: IO[bytes]) -> Contents:
    begin = file.read(len(_LEGACY_TORCH))
    file.seek(0)
    if (
        begin[4:9] == b"\0\0\0\0{"
    ):  # first: the length of the header may look like the first bytes of another format
        data = file.read()
        tensors = safetensors.torch.load(data)  # which checks the header
        header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        return Contents(tensors, header.get("__metadata__") or {}, "safetensors")
    if begin.startswith((b"PK", _LEGACY_TORCH)):
        return Contents(_load_torch(file))
    if begin[:1] == b"\x80":
        # latin1 decodes the strings and arrays of Python 2 in old Detectron files
        return Contents(_Unpickler(file, encoding="latin1").load(), format="pickle")
    if begin.lstrip()[:1] == b"<":
        raise WeightsFileError(
            "it is a web page, so the download failed. Fix: download the file again."
        )
    found = (
        "it is not a file of torch.save, a safetensors file or a pickle"
        if begin
        else "it is empty"
    )
    raise WeightsFileError(f"{found}. {_GET_AGAIN}")


def _load_torch(file: IO[bytes]) -> Any:
    # training scripts save their flags and scores beside the weights
    allowed: list[Any] = [
        argparse.Namespace,
        *((stand_in, name) for name, stand_in in _NUMPY.items()),
    ]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if named := re.search(r"GLOBAL (\S+)", str(error)):
            raise RefusedFileError(f"it names {named[1]}, which could run code") from None
        reason = " ".join(str(error.__context__ or error).split())[
            :200
        ]  # torch wraps it into its advice
        raise WeightsFileError(
            f"it contains more than tensors and plain values ({reason}). {SAVE_AGAIN}"
        ) from error
    except RuntimeError as error:
        if "TorchScript" in str(error):
            raise RefusedFileError("it is a TorchScript archive, which contains code") from None
        raise


class _Dtype:
    """Stand-in for ``numpy.dtype``: numbers only."""

    def __init__(self, code: str, *options: object) -> None:
        if not isinstance(code, str) or not re.fullmatch(r"[biuf]\d\d?", code):
            raise WeightsFileError(
                f"it contains an array of {code!r}, which is not a number. {SAVE_AGAIN}"
            )
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])

    def numbers(self, data: bytes | bytearray | str) -> np.ndarray:
        """Copy numbers from their bytes, which Python 2 wrote as a string."""
        raw = data.encode("latin1") if isinstance(data, str) else data
        return np.frombuffer(raw, self.dtype).astype(self.dtype.newbyteorder("="))


class _Array(Tensor):
    """Stand-in for ``numpy.ndarray``, whose own unpickling reads memory by sizes that a damaged file may set."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results: plain tensors

    def __new__(cls, *arguments: object) -> "_Array":
        return torch.empty(0).as_subclass(cls)

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, column_major, data = state
        self.data = torch.from_numpy(
            dtype.numbers(data).reshape(shape, order="F" if column_major else "C").copy()
        )


def _frombuffer(data: bytes | bytearray, dtype: _Dtype, shape: tuple, order: str) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", data))
    return array


_NUMPY: dict[str, Any] = {"numpy.ndarray": _Array, "numpy.dtype": _Dtype}
for _core in ("numpy.core", "numpy._core"):
    _NUMPY[f"{_core}.multiarray._reconstruct"] = _Array
    _NUMPY[f"{_core}.multiarray.scalar"] = lambda dtype, data: dtype.numbers(data).item()
    _NUMPY[f"{_core}.numeric._frombuffer"] = _frombuffer
#: all classes and functions that a pickle of arrays may name
_ALLOWED: dict[str, Any] = {**_NUMPY, "collections.OrderedDict": OrderedDict}
_ALLOWED["_codecs.encode"] = lambda text, encoding: text.encode(
    "latin1"
)  # protocols below 3 write bytes as a string


class _Unpickler(
    pickle._Unpickler
):  # the C version allocates memory for counts that a damaged file may set
    """Create numeric arrays and plain Python values; refuse everything else."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if (path := f"{module}.{name}") not in _ALLOWED:
            raise RefusedFileError(f"it names {path}, which could run code")
        return _ALLOWED[path]

    def get_extension(self, code: int) -> Any:
        raise RefusedFileError(
            f"it names a class by its registered number {code}, which could run code"
        )

    def load_build(self) -> None:
        if not isinstance(self.stack[-2], (_Array, _Dtype, OrderedDict)):
            raise RefusedFileError(f"it changes {self.stack[-2]!r:.99}, which could run code")
        pickle._Unpickler.dispatch[pickle.BUILD[0]](self)  # type: ignore[arg-type]

    dispatch[pickle.BUILD[0]] = load_build


def named_tensors(value: Any, size: int) -> OrderedDict[str, Tensor]:
    """Copy a state dict from a file of ``size`` bytes, with its module versions."""
    if not isinstance(value, Mapping):
        raise WeightsFileError(
            f"a {type(value).__name__} instead of a dict of tensors. {SAVE_AGAIN}"
        )
    tensors: OrderedDict[str, Tensor] = OrderedDict()
    for name, tensor in value.items():
        is_tensor = (
            isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta
        )
        if not (isinstance(name, str) and is_tensor):
            raise WeightsFileError(
                f"{name!r:.99} is not a dense tensor ({type(tensor).__name__}). {SAVE_AGAIN}"
            )
        # torch enlarges a storage that is too small for its tensor: its values would be arbitrary memory
        if tensor.numel() * tensor.element_size() > size:
            raise WeightsFileError(
                f"{name} claims more bytes than the file has ({size}). {_GET_AGAIN}"
            )
        tensors[name] = Tensor.detach(tensor)
    if isinstance(
        versions := getattr(value, "_metadata", None), dict
    ):  # by which modules know their older versions
        tensors._metadata = versions  # type: ignore[attr-defined]
    return tensors


def weight_problem(name: str, value: Tensor) -> str:
    """Return why a tensor cannot be a weight in float32, as in "2 with a negative variance", or ""."""
    if not value.is_floating_point():
        return "of wrong type, expected floating-point numbers"
    numbers = value.float()
    if not numbers.isfinite().all():
        return "with values that are NaN or infinite"
    if name.endswith(".running_var") and (numbers < 0).any():
        return "with a negative variance"
    return ""


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
