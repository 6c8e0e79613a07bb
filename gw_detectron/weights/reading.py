"""Read weight files without running code from them."""

import argparse
import hashlib
import json
import os
import pickle
import re
import zipfile
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import IO, Any, ClassVar, Literal, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from ..errors import (
    FileAccessError,
    MissingFileError,
    RefusedFileError,
    WeightsFileError,
    kind_of_file,
)

#: key of this package's record in the metadata of a safetensors file, as JSON
RECORD_KEY = "gw_detectron"
CHECKSUM_KEY = "checksum"
SAVE_AGAIN = "Fix: save {'model': model.state_dict()} with torch.save, as a .pth file."
_GET_AGAIN = "Fix: get the file again."
_OTHER_CHECKSUM = f"it is damaged (other checksum than written: {{}}). {_GET_AGAIN}"
#: first bytes of torch.save's files before torch 1.6
_LEGACY_TORCH = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
#: first bytes of a dict in pickles of protocols 0 and 1, which have no header
_DICT_PICKLE = rb"(?s)\(dp\d+\n|\}q.|ccollections\n"


class FileContent(NamedTuple):
    """Content of a weight file."""

    value: Any  # usually nested dicts
    format: Literal["torch", "pickle", "safetensors"] = "torch"
    size: int = 2**63  # bytes of the file


def read_weights_file(path: str | os.PathLike[str]) -> FileContent:
    """Read a weight file: ``torch.save``, safetensors, or a pickle of NumPy arrays.

    The content decides about the format. ``torch.load(weights_only=True)`` and an unpickler with
    an allow-list read tensors, numbers, strings, plain containers and ``argparse.Namespace``;
    arrays become tensors.

    Raises:
        RefusedFileError: the file names another class or function, which could run code.
        WeightsFileError: the file is damaged, not a regular file, or of an unknown format.
        MissingFileError: the file does not exist.
        FileAccessError: the file cannot be opened.
    """
    path = os.fspath(path)
    try:
        # opening a pipe would block
        if os.path.exists(path) and not os.path.isfile(path):
            raise WeightsFileError("it is not a regular file. Fix: give a file.")
        with open(path, "rb") as file:
            return _read(file)
    except FileNotFoundError:
        raise MissingFileError(
            f"'{path}': file not found (cwd: {os.getcwd()}). Fix: give an existing file."
        ) from None
    except PermissionError as error:
        raise FileAccessError(
            f"'{path}': cannot be read: {error.strerror}. Fix: get read permission."
        ) from error
    except RefusedFileError as error:
        raise RefusedFileError(
            f"'{path}': was not read: {error}. Fix: use another source, preferably a safetensors "
            "file. If you trust this file, save its tensors by torch.save(model.state_dict(), "
            "'tensors.pth') in a sandbox."
        ) from None
    except WeightsFileError as error:
        raise WeightsFileError(f"'{path}': cannot be read: {error}") from None
    # damaged files raise anything, OSError and MemoryError included
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise WeightsFileError(
            f"'{path}': cannot be read: it is damaged ({reason}). {_GET_AGAIN}"
        ) from error


def _read(file: IO[bytes]) -> FileContent:
    size = os.fstat(file.fileno()).st_size
    begin = file.read(len(_LEGACY_TORCH))
    file.seek(0)

    # first: the length of the header may look like the first bytes of another format
    if begin[4:9] == b"\0\0\0\0{":
        value = _load_safetensors(file)
        _check_values(value)
        return FileContent(value, "safetensors", size)
    if begin.startswith(b"PK"):
        _check_members(file)
    if begin.startswith((b"PK", _LEGACY_TORCH)):
        return FileContent(_load_torch(file), "torch", size)
    if begin.startswith(b"\x80") or re.match(_DICT_PICKLE, begin):
        # latin1 decodes the strings and arrays of Python 2 in old Detectron files
        value = _Unpickler(file, encoding="latin1").load()
        _check_values(value)
        return FileContent(value, "pickle", size)

    kind = kind_of_file(file.read(1000))
    if not kind:
        kind = f"not a file of torch.save, a safetensors file or a pickle. {_GET_AGAIN}"
    raise WeightsFileError(f"it is {kind.rstrip('.')}.")


def _load_safetensors(file: IO[bytes]) -> dict[str, Any]:
    """Return the tensors by name; in a file of this package under ``model``, beside its record."""
    tensors = safetensors.torch.load(file.read())
    with safetensors.safe_open(file.name, framework="pt") as header:
        metadata = header.metadata() or {}
    if RECORD_KEY not in metadata:
        return tensors
    return {**json.loads(metadata[RECORD_KEY]), "model": tensors}


def _check_members(file: IO[bytes]) -> None:
    """Compare the checksums of an archive, which torch.load does not."""
    with zipfile.ZipFile(file) as archive:
        member = archive.testzip()
    if member is not None:
        raise WeightsFileError(_OTHER_CHECKSUM.format(brief(member)))
    file.seek(0)


def _check_values(value: Any) -> None:
    """Compare the checksum that a file of this package records; pickles and safetensors have none of their own."""
    if not isinstance(value, Mapping) or CHECKSUM_KEY not in value:
        return
    if checksum_of(value["model"]) != value[CHECKSUM_KEY]:
        raise WeightsFileError(_OTHER_CHECKSUM.format("tensors"))


def checksum_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the CRC-32 of the names and values of tensors."""
    checksum = 0
    for name, tensor in sorted(tensors.items()):
        values = tensor.contiguous().reshape(-1).view(torch.uint8)
        checksum = zlib.crc32(name.encode(), checksum)
        checksum = zlib.crc32(values.numpy().data, checksum)
    return checksum


def _load_torch(file: IO[bytes]) -> Any:
    # training scripts save their flags and scores beside the weights
    allowed: list[Any] = [
        argparse.Namespace,
        *((stand_in, name) for name, stand_in in _ALLOWED.items()),
    ]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named:
            raise RefusedFileError(
                f"it names {named[1]}, which could run code"
            ) from None
        cause = error.__context__ or error  # torch wraps it into its advice
        reason = " ".join(str(cause).split())[:200]
        raise WeightsFileError(
            f"it contains more than tensors and plain values ({reason}). {SAVE_AGAIN}"
        ) from error
    except RuntimeError as error:
        if "TorchScript" in str(error):
            raise RefusedFileError(
                "it is a TorchScript archive, which contains code"
            ) from None
        raise


class _Dtype:
    """Stand-in for ``numpy.dtype``: numbers only.

    A pickle could set offsets and flags of NumPy's own, by which arrays read other memory.
    """

    def __init__(self, code: str, *options: object) -> None:
        if not isinstance(code, str) or not re.fullmatch(r"[biuf]\d\d?", code):
            raise WeightsFileError(
                f"it contains an array of {brief(code)}, which is not a number. {SAVE_AGAIN}"
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
    """Stand-in for ``numpy.ndarray``: a tensor of exactly the numbers in the file.

    NumPy's own unpickling allocates the sizes that a damaged file sets, and may leave them
    uninitialized.
    """

    # results of its methods are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, *arguments: object) -> "_Array":
        return torch.empty(0).as_subclass(cls)

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, column_major, data = state
        numbers = dtype.numbers(data).reshape(shape, order="F" if column_major else "C")
        self.data = torch.from_numpy(numbers)


def _frombuffer(
    data: bytes | bytearray, dtype: _Dtype, shape: tuple, order: str
) -> _Array:
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", data))
    return array


#: all classes and functions that a pickle of arrays may name
_ALLOWED: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    # protocols below 3 write bytes as a string
    "_codecs.encode": lambda text, encoding: text.encode("latin1"),
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
}
for _core in ("numpy.core", "numpy._core"):  # of NumPy 1 and 2
    _ALLOWED[f"{_core}.multiarray._reconstruct"] = _Array
    _ALLOWED[f"{_core}.multiarray.scalar"] = lambda dtype, data: dtype.numbers(
        data
    ).item()
    _ALLOWED[f"{_core}.numeric._frombuffer"] = _frombuffer


# the C version allocates memory for counts that a damaged file may set
class _Unpickler(pickle._Unpickler):
    """Create numeric arrays and plain Python values; refuse everything else."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        if path not in _ALLOWED:
            raise RefusedFileError(f"it names {path}, which could run code")
        return _ALLOWED[path]

    def load_build(self) -> None:
        changed = self.stack[-2]
        if not isinstance(changed, (_Array, _Dtype, OrderedDict)):
            raise RefusedFileError(f"it changes {brief(changed)}, which could run code")
        pickle._Unpickler.dispatch[pickle.BUILD[0]](self)  # type: ignore[arg-type]

    dispatch[pickle.BUILD[0]] = load_build


def named_tensors(value: Any, size: int) -> OrderedDict[str, Tensor]:
    """Return the tensors of a state dict from a file of ``size`` bytes, with the versions of its modules."""
    if not isinstance(value, Mapping):
        raise WeightsFileError(
            f"a {type(value).__name__} instead of a dict of tensors. {SAVE_AGAIN}"
        )

    tensors: OrderedDict[str, Tensor] = OrderedDict()
    for name, tensor in value.items():
        is_dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        if not isinstance(name, str) or not is_dense or tensor.is_meta:
            kind = type(tensor).__name__
            raise WeightsFileError(
                f"{brief(name)} is not a dense tensor ({kind}). {SAVE_AGAIN}"
            )
        # torch enlarges a storage that is too small for its tensor: its values would be
        # arbitrary memory
        if tensor.numel() * tensor.element_size() > size:
            raise WeightsFileError(
                f"{name} claims more bytes than the file has ({size}). {_GET_AGAIN}"
            )
        tensors[name] = Tensor.detach(tensor)

    # modules of torch read old states by their versions
    versions = getattr(value, "_metadata", None)
    if isinstance(versions, dict):
        tensors._metadata = versions  # type: ignore[attr-defined]
    return tensors


def weight_problems(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of tensors that cannot be weights in float32, by their problem.

    The problem fits after a number, as in "2 with a negative variance".
    """
    problems = defaultdict(list)
    for name, value in tensors.items():
        problems[_problem(name, value)].append(name)
    problems.pop("", None)
    return problems


def _problem(name: str, value: Tensor) -> str:
    if not value.is_floating_point():
        return "of wrong type, expected floating-point numbers"
    numbers = value.float()
    if not numbers.isfinite().all():
        return "with values that are NaN or infinite"
    if name.endswith(".running_var") and (numbers < 0).any():
        return "with a negative variance"
    return ""


def plain_copy(value: Any, limit: int = 10**6) -> Any:
    """Copy nested values from a file as lists, dicts, text and numbers.

    Containers in a file may hold one another, and one container at many places, so that the
    ``repr`` of a small file may never end. Objects of other classes become their names.

    Raises:
        WeightsFileError: the copy would have more characters than the limit, or no end.
    """
    encoder = json.JSONEncoder(
        skipkeys=True, default=lambda item: f"({type(item).__name__})"
    )
    text = ""
    try:
        for part in encoder.iterencode(value):
            text += part
            if len(text) > limit:
                break
        else:
            return json.loads(text)
    # a container that holds itself, or 1000 others
    except (
        RecursionError,
        ValueError,
    ):
        pass
    raise WeightsFileError(
        f"record of the file: more than {limit} characters, or nested without end. {_GET_AGAIN}"
    )


def brief(value: Any) -> str:
    """Show the beginning of a text from an untrusted file; of other values only the type."""
    return repr(value[:99]) if isinstance(value, str) else f"a {type(value).__name__}"


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
