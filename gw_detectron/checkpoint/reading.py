"""Read weight files without running code that they contain."""

import argparse
import os
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from ..errors import MissingFileError, UserError

_LEGACY_TORCH = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # first bytes of torch.save's files before torch 1.6
_GET_AGAIN = "Fix: get the file again."
_SAVE_DENSE = "Fix: save dense tensors with torch.save."
_SAVE_NUMBERS = "Fix: save arrays of numbers only."
_LARGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors format


class WeightsFileError(UserError, ValueError):
    """A weight file is damaged or has an unsupported format."""


class RefusedFileError(WeightsFileError):
    """A weight file could run code when it is read."""


class Contents(NamedTuple):
    """The content of a weight file.

    Args:
        value: the object in the file, usually nested dicts; numpy arrays are converted to tensors.
        metadata: the header of a safetensors file, empty for other formats.
        format: the format, which is detected from the file's first bytes.
    """

    value: Any
    metadata: Mapping[str, str] = {}
    format: Literal["torch", "pickle", "safetensors"] = "torch"


def read_weights_file(path: str | os.PathLike[str]) -> Contents:
    """Read a weight file without running code that it contains.

    Formats: ``torch.save``, safetensors, and a pickle of numpy arrays.

    Only tensors, numeric arrays, numbers, strings, plain containers and ``argparse.Namespace`` are created. Sizes are
    compared with the file size before memory is allocated; archives of ``torch.save`` are verified by checksum.

    Raises:
        RefusedFileError: the file names another class or function, which could run code.
        WeightsFileError: the file is truncated, damaged, no regular file, or of an unknown format.
        MissingFileError: the file does not exist.
        OSError: the file cannot be opened.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise MissingFileError(f"'{path}': file not found (cwd: {os.getcwd()}). Fix: give an existing file.")
    if not (os.path.isfile(path) or os.path.isdir(path)):  # opening a pipe would block
        raise WeightsFileError(f"'{path}': cannot be read: it is not a regular file. Fix: give a file.")
    with open(path, "rb") as file:  # raises IsADirectoryError
        begin = file.read(len(_LEGACY_TORCH))
    try:
        return _read(path, os.path.getsize(path), begin)
    except RefusedFileError as error:
        raise RefusedFileError(f"'{path}': was not read: {error}. Fix: {_how_to_extract_tensors(path)}") from None
    except WeightsFileError as error:
        raise WeightsFileError(f"'{path}': cannot be read: {error}") from None
    except Exception as error:  # damaged files raise anything, OSError and MemoryError included
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise WeightsFileError(
            f"'{path}': cannot be read: it is cut off or damaged ({reason}). {_GET_AGAIN}"
        ) from error


def _read(path: str, size: int, begin: bytes) -> Contents:
    if size == 0:
        raise WeightsFileError(f"it is empty. {_GET_AGAIN}")
    if begin.startswith(b"PK"):
        _check_archive(path, size)
    if begin.startswith(b"PK") or begin == _LEGACY_TORCH:
        return Contents(_load_torch(path, size))
    if begin[:1] == b"\x80":
        with open(path, "rb") as file:  # latin1 decodes the strings and arrays of Python 2 in old Detectron files
            return Contents(_arrays_to_tensors(_NumpyUnpickler(file, encoding="latin1").load()), format="pickle")
    if begin[8:9] == b"{" and struct.unpack("<Q", begin[:8])[0] < _LARGEST_HEADER:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return Contents(tensors, file.metadata() or {}, "safetensors")
    if begin.lstrip()[:1] == b"<":
        raise WeightsFileError("it is a web page, so the download failed. Fix: download the file again.")
    raise WeightsFileError(
        "it is not a file of torch.save, a safetensors file or a pickle. Fix: save the tensors with torch.save."
    )


def _how_to_extract_tensors(path: str) -> str:
    load = f"torch.load({path!r}, weights_only=False)"
    if path.endswith(".pkl"):
        load = f"pickle.load(open({path!r}, 'rb'))"
    return (
        "use another source, preferably a safetensors file. If you trust this file, extract its tensors in a sandbox: "
        f"import pickle, torch; content = {load}; torch.save({{name: value for name, value in "
        "content['model'].items()}, 'tensors.pth')  # or 'state_dict' instead of 'model'"
    )


def _check_archive(path: str, size: int) -> None:
    if not zipfile.is_zipfile(path):
        raise WeightsFileError(f"it is cut off: the archive's directory at its end is missing. {_GET_AGAIN}")
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        if any(part.filename.endswith("/constants.pkl") for part in parts):
            raise RefusedFileError("it is a TorchScript archive, which contains code")
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise WeightsFileError(
                "it has compressed parts, which torch.save never writes. Fix: save the tensors with torch.save."
            )
        if sum(part.file_size for part in parts) > size:
            raise WeightsFileError(f"its parts claim to be larger than the file. {_GET_AGAIN}")
        damaged = archive.testzip()
    if damaged:
        raise WeightsFileError(f"it is damaged: wrong checksum of its part {damaged}. {_GET_AGAIN}")


def _load_torch(path: str, size: int) -> Any:
    # training scripts save their flags and scores beside the weights
    allowed: list[Any] = [argparse.Namespace, *((stand_in, name) for name, stand_in in _STAND_INS.items())]
    try:
        with torch.serialization.safe_globals(allowed):
            # on the meta device no memory is allocated, so false sizes are found first
            _walk(torch.load(path, map_location="meta", weights_only=True), lambda value: _check_size(value, size))
            return _arrays_to_tensors(torch.load(path, map_location="cpu", weights_only=True))
    except NotImplementedError:
        raise WeightsFileError(f"it contains sparse or quantized tensors. {_SAVE_DENSE}") from None
    except pickle.UnpicklingError as error:
        if named := re.search(r"GLOBAL (\S+)", str(error)):
            raise RefusedFileError(f"it names {named[1]}, which could run code") from None
        raise


def _check_size(value: Any, size: int) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise WeightsFileError(f"it contains a tensor of layout {value.layout}. {_SAVE_DENSE}")
        last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        reach = (value.storage_offset() + last + 1) * value.element_size() if value.numel() else 0
        if (claimed := max(value.untyped_storage().nbytes(), reach)) > size:
            raise WeightsFileError(
                f"it claims a tensor of {claimed} bytes, but the file has only {size} bytes. {_GET_AGAIN}"
            )
    return value


def _arrays_to_tensors(content: Any) -> Any:
    return _walk(content, lambda value: value.tensor if isinstance(value, _Array) else value)


def _walk(content: Any, convert: Any) -> Any:
    """Apply ``convert`` to all leaves of nested containers, in place.

    Every container is visited once: a tiny file can nest one list in itself, or share it 2**40 times.
    """
    done: dict[int, tuple[Any, Any]] = {}  # with the originals, whose ids would be used again after their death

    def visit(value: Any) -> Any:
        if not isinstance(value, (dict, list, tuple)):
            return convert(value)
        if id(value) not in done:
            done[id(value)] = value, value
            pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
            changed = {key: new for key, item in pairs if (new := visit(item)) is not item}
            if isinstance(value, (dict, list)):
                for key, new in changed.items():
                    value[key] = new
            elif changed:
                done[id(value)] = value, tuple(changed.get(key, item) for key, item in pairs)
        return done[id(value)][1]

    return visit(content)


# Stand-ins for numpy: its own unpickling allocates and reads memory by sizes that a damaged file may set.


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


class _Array:
    """Stand-in for ``numpy.ndarray`` and the function that creates one."""

    tensor: Tensor

    def __init__(self, *options: object) -> None:
        pass

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, column_major, data = state
        self.tensor = torch.from_numpy(dtype.numbers(data).reshape(shape, order="F" if column_major else "C").copy())


def _scalar(dtype: _Dtype, data: bytes | str) -> Any:
    return dtype.numbers(data).item()


def _frombuffer(data: bytes | bytearray, dtype: _Dtype, shape: tuple, order: str) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", data))
    return array


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise WeightsFileError(f"it contains bytes in the encoding {encoding!r}. Fix: save it again with Python 3.")
    return text.encode("latin1")


_STAND_INS: dict[str, Any] = {
    "_codecs.encode": _encode,  # pickle protocols below 3 write bytes as a string
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
}
for _core in ("numpy.core", "numpy._core"):
    _STAND_INS[f"{_core}.multiarray._reconstruct"] = _Array
    _STAND_INS[f"{_core}.multiarray.scalar"] = _scalar
    _STAND_INS[f"{_core}.numeric._frombuffer"] = _frombuffer


class _NumpyUnpickler(pickle._Unpickler):  # the C version allocates memory for counts that a damaged file may set
    """Create only numeric arrays and plain Python values."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if f"{module}.{name}" not in _STAND_INS:
            raise RefusedFileError(f"it names {module}.{name}, which could run code")
        return _STAND_INS[f"{module}.{name}"]
